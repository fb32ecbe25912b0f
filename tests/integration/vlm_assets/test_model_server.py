"""Describing through a real model server: transformers' own, started, asked, used again, and killed."""

import itertools
import logging
import os
import signal
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from resources.vision_language_model import VisionLanguageModel
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_engine.devices.loaded_servers import LoadedServers, end_loaded_servers

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
    yield desk.changed(
        engine="server",
        server_command=COMMAND,
        server_requests=4,
    )
    end_loaded_servers(desk.settings.state_directory, logging.getLogger("test"))


class KillingModel(VisionLanguageModel):
    """Kills the server that it asks while the first batch is under way."""

    def load(self, device, **how):
        engine = super().load(device, **how)
        describe, calls = engine.describe, itertools.count()

        def kill(batch, *, attempt):
            if next(calls) == 1:
                os.kill(living(self.server.state_directory).server.pid, signal.SIGKILL)
            return describe(batch, attempt=attempt)

        engine.describe = kill
        return engine


def living(state_directory):
    """The one server of a home."""
    (record,) = LoadedServers(Path(state_directory)).living()
    return record


def rows(file: Path) -> dict[str, dict]:
    return {row["property_id"]: row for row in pq.read_table(file).to_pylist()}


def test_server_describes_as_the_engine_in_this_process_does(desk, server_desk, caplog):
    """A server that ignores response_format gives the same descriptions; killed, it costs no property.

    The second partition finds the server of the first one, so that loading a model is not paid again.
    """
    state = desk.settings.state_directory
    done = server_desk.materialize()
    assert done.success, done.failure
    served = rows(desk.file)
    first = living(state)

    killing = KillingModel(**vars(build_vision_language_model(server_desk.settings)))
    with caplog.at_level(logging.INFO, "vlm_engine.server"):
        done = server_desk.materialize(key=SECOND, vision_language_model=killing)
    assert done.success, done.failure
    assert "is used again" in caplog.text
    assert "anew (1 of 3)" in caplog.text
    assert living(state).server != first.server
    after_the_kill = rows(desk.file.with_name(f"{SECOND}.parquet"))
    assert "engine_error" not in {row["error_kind"] for row in after_the_kill.values()}

    done = desk.materialize(config={"recompute": True})
    assert done.success, done.failure
    own = rows(desk.file)
    assert served.keys() == own.keys()
    assert [row["status"] for row in served.values()] == [row["status"] for row in own.values()]
    assert {row["model_revision"] for row in served.values()} == {killing.exact_revision()}
    assert {row["fingerprint"] for row in served.values()}.isdisjoint(
        row["fingerprint"] for row in own.values()
    )
    pairs = [
        (value, own[name]["description"][field])
        for name, row in served.items()
        if row["status"] == "ok"
        for field, value in row["description"].items()
    ]
    assert len(pairs) > 50
    assert sum(one == other for one, other in pairs) / len(pairs) > 0.9
    assert all(row["output_tokens"] > 20 for row in served.values() if row["status"] == "ok")
