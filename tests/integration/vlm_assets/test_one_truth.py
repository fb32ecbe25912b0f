"""What the commands say of a data set agrees, on real files."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from tests.support.damage import flip_bit
from tests.support.scripted_engine import LostAfterOneBatch
from vlm_assets.assets.learned_labels import LEARNED_LABELS, write_learned
from vlm_assets.commands.main import app
from vlm_durable.state.database import open_state
from vlm_durable.versions.published import PublishedPartitions

BOTH = ("property_descriptions", "property_embeddings")
KEYS = ("000000000-000000007", "000000008-000000015")

pytestmark = pytest.mark.usefixtures("scripted_engine")


def record_of(desk, asset):
    """What is published of the first partition."""
    return PublishedPartitions(desk.settings.layout.asset(asset)).record(KEYS[0])


def told(desk, *arguments):
    """A command of the command line over this home: its exit code and what it said, as JSON."""
    done = CliRunner().invoke(app, [*arguments, "--home", str(desk.settings.home), "--json"])
    assert done.stdout, done.exception
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.published(*BOTH)
def test_a_recompute_that_changes_no_text_leaves_the_embeddings_valid(desk):
    """Embeddings depend on the texts that were embedded, not on the bytes of the descriptions' file."""
    assert desk.materialize(*BOTH, key=KEYS[1]).success
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
    write_learned(here, ["a"], here, made_of="training")
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
    # Whose labels it learned is kept here, for a model may go.
    (kept,) = (moved.settings.state_directory / "learned").iterdir()
    assert kept.read_bytes() == (there / LEARNED_LABELS).read_bytes()


def interrupt(desk):
    """Half of the first partition is committed; its journal's folder."""
    lost = LostAfterOneBatch(model=desk.settings.model)
    assert "device is lost" in desk.materialize(vision_language_model=lost).failure
    return desk.settings.descriptions.partition(KEYS[0]).journals


def state_of(desk, key=KEYS[0], asset="property_descriptions"):
    partitions = told(desk, "status")[1]["partitions"]
    (found,) = [one for one in partitions if (one["asset"], one["key"]) == (asset, key)]
    return found


def test_a_deleted_journal_is_said_by_status_audit_and_repair(desk):
    """No counter is believed: rows whose files are gone are lost, and a person decides."""
    journals = interrupt(desk)
    assert (state_of(desk)["state"], state_of(desk)["rows"]) == ("interrupted", 4)
    assert told(desk, "audit", "--deep")[0] == 0
    shutil.rmtree(journals)
    found = state_of(desk)
    assert (found["state"], found["rows"]) == ("rows lost", 0)
    assert "repair --accept-loss" in found["note"]
    for depth in ((), ("--deep",)):
        code, said = told(desk, "audit", *depth)
        assert code == 1
        assert [(one["kind"], one["key"]) for one in said["wrong"]] == [("journal", KEYS[0])]
    repair = CliRunner().invoke(app, ["repair", "--home", str(desk.settings.home), "--yes"])
    assert repair.exit_code == 1
    assert "by hand. 4 rows are committed" in repair.output
    assert "JournalLossError" in desk.materialize().failure


def test_a_damaged_segment_is_found_by_the_deep_audit(desk):
    """Segments of unfinished work are read to the last byte, as published files are."""
    (segment,) = interrupt(desk).glob("*/segment-*.parquet")
    flip_bit(segment)
    code, said = told(desk, "audit", "--deep")
    assert (code, [one["kind"] for one in said["wrong"]]) == (1, ["journal"])


@pytest.mark.published(*BOTH)
def test_status_never_says_that_all_is_well_beside_damage_or_an_alert(desk):
    """A flipped byte changes no size; status reads every file that changed, and says what the audit says."""
    assert desk.materialize(*BOTH, key=KEYS[1]).success
    _, status = told(desk, "status")
    (step,) = status["next_steps"]
    assert step.startswith("Everything is published; `vlm-assets audit --deep")
    flip_bit(desk.file, 40)
    assert state_of(desk)["state"] == "damaged"
    code, said = told(desk, "audit")
    assert (code, said["wrong"][0]["kind"]) == (1, "digest_differs")
    assert desk.materialize().success
    assert state_of(desk)["state"] == "done"
    alert = Alert("sensor_silent", "sensor/alerts", "1", "error", "alerts has gone silent", "Look.")
    Outbox(open_state(desk.settings.state_directory)).post(alert)
    _, status = told(desk, "status")
    assert not any("Everything is published" in step for step in status["next_steps"])
