"""What the commands say of a data set agrees, on real files made by the real example model."""

import json
import shutil

import pyarrow.parquet as pq
from typer.testing import CliRunner

from resources.publishing.published import PublishedPartitions
from vlm_assets.cli.main import app

BOTH = ("property_descriptions", "property_embeddings")
KEYS = ("000000000-000000007", "000000008-000000015")


def record_of(desk, asset):
    """What is published of the first partition."""
    return PublishedPartitions(desk.settings.home / asset).record(KEYS[0])


def told(desk, *arguments):
    """A command of the command line over this home: its exit code and what it said, as JSON."""
    done = CliRunner().invoke(app, [*arguments, "--home", str(desk.settings.home), "--json"])
    assert done.stdout, done.exception
    return done.exit_code, json.loads(done.stdout)


def test_a_recompute_that_changes_no_text_leaves_the_embeddings_valid(desk):
    """Embeddings depend on the texts that were embedded, not on the bytes of the descriptions' file."""
    for key in KEYS:
        assert desk.materialize(*BOTH, key=key).success
    before = desk.file.read_bytes()
    assert desk.materialize("property_descriptions", config={"recompute": True}).success
    assert desk.file.read_bytes() != before
    code, found = told(desk, "audit")
    assert (code, found["wrong"]) == (0, [])
    _, status = told(desk, "status")
    assert {one["state"] for one in status["partitions"]} == {"done"}
    again = desk.materialize("property_embeddings")
    verified = again.result.asset_materializations_for_node("property_embeddings")[0].metadata["verified"]
    assert "No device was needed" in verified.value


def test_moving_a_model_folder_changes_nothing(desk, tmp_path):
    """The fingerprint holds what the model is, never where it lies: finished partitions stay finished."""
    here, there = tmp_path / "models" / "mine", tmp_path / "elsewhere" / "renamed"
    shutil.copytree(desk.settings.model, here)
    there.parent.mkdir()
    before = desk.changed(model=str(here))
    assert before.materialize(*BOTH).success
    here.rename(there)
    moved = before.changed(model=str(there))
    done = moved.materialize(*BOTH)
    for asset in BOTH:
        metadata = done.result.asset_materializations_for_node(asset)[0].metadata
        assert "No device was needed" in metadata["verified"].value
        files = json.dumps(dict(record_of(moved, asset).metadata))
        assert str(tmp_path) not in files
    rows = pq.read_table(moved.file, columns=["model"]).column(0).to_pylist()
    assert set(rows) == {"mine"}
