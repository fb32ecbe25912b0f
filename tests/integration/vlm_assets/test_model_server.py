"""Describing through a real model server: transformers' own, started, asked, and used again."""

import logging
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from resources.gpu.residents import Residents, end_residents
from vlm_assets.resource_settings import build_vision_language_model

SECOND = "000000008-000000015"
COMMAND = (
    f"{Path(sys.executable).with_name('transformers')} serve {{model}} --host {{host}} --port {{port}}"
    " --device cpu --dtype float32"
)


@pytest.fixture
def server_desk(desk, monkeypatch, tmp_path):
    """The same home, described by a server that we start."""
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # the server lists what lies there
    yield desk.changed(engine="server", server_command=COMMAND, server_requests=4)
    end_residents(desk.settings.state_directory, logging.getLogger("test"))


def descriptions(file: Path) -> dict[str, dict]:
    rows = pq.read_table(file).to_pylist()
    return {row["property_id"]: row for row in rows}


def test_server_describes_as_the_engine_in_this_process_does(desk, server_desk):
    """A server that ignores response_format gives the same descriptions, and the next partition adopts it."""
    served = server_desk.materialize()
    assert served.success, served.failure
    rows = descriptions(desk.file)
    (first,) = Residents(desk.settings.state_directory).living()
    again = server_desk.materialize(key=SECOND)
    assert again.success, again.failure
    (second,) = Residents(desk.settings.state_directory).living()
    assert first.server == second.server, "a partition is not to pay for loading the model again"

    own = desk.materialize(config={"recompute": True})
    assert own.success, own.failure
    expected = descriptions(desk.file)
    assert rows.keys() == expected.keys()
    assert [row["status"] for row in rows.values()] == [row["status"] for row in expected.values()]
    assert {row["model_revision"] for row in rows.values()} == {
        build_vision_language_model(desk.settings).exact_revision()
    }
    assert {row["fingerprint"] for row in rows.values()}.isdisjoint(
        row["fingerprint"] for row in expected.values()
    )
    pairs = [
        (value, expected[name]["description"][field])
        for name, row in rows.items()
        if row["description"] is not None
        for field, value in row["description"].items()
    ]
    alike = sum(served == own for served, own in pairs)
    assert len(pairs) > 50
    assert alike / len(pairs) > 0.9
    assert all(row["output_tokens"] > 20 for row in rows.values() if row["status"] == "ok")
