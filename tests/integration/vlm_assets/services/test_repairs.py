"""Repairs that compute, and a loss that a person accepts, through real materializations."""

from __future__ import annotations

import shutil

import dagster as dg
import pytest

from vlm_assets.home_definitions import build_defs
from vlm_assets.services.home_audit import audit
from vlm_assets.services.journal_losses import accept_loss, find_losses
from vlm_assets.services.repairs import find_repairs, put_right, recomputations
from vlm_catalog.catalog import Catalog
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.journal_errors import JournalLossError
from vlm_durable.mirror.mirror import NO_MIRROR
from vlm_durable.versions.published import PublishedPartitions

KEY = "000000000-000000007"
BOTH = ("property_descriptions", "property_embeddings")

pytestmark = pytest.mark.usefixtures("scripted_engine")


def look(desk, *, deep=True):
    return audit(desk.settings, Catalog.open(desk.settings.home), deep=deep)


def repair(desk, **options):
    """Do what a repair of the whole home would do, its computing in this process."""
    found = look(desk)
    repairs = find_repairs(desk.settings, found, **options)
    for one in repairs:
        put_right(desk.settings, one)
    for wanted in recomputations(repairs, BOTH):
        for key in wanted.keys:
            defs = build_defs(desk.settings)
            done = dg.materialize(
                defs.assets,
                selection=list(wanted.assets),
                partition_key=key,
                instance=desk.instance,
                resources=defs.resources,
                run_config=wanted.run_config(desk.settings),
            )
            assert done.success
    return repairs


def test_a_materialized_dataset_is_sound(desk):
    """What the assets publish is what the audit wants, to the last byte and vector."""
    assert desk.materialize(*BOTH).success
    found = look(desk)
    assert found.ok and not found.findings
    assert found.total("property_embeddings").rows == 8


@pytest.mark.published(*BOTH)
@pytest.mark.parametrize("loss", ["both copies", "both records", "both folders"])
def test_what_no_copy_holds_is_computed_again(desk, loss):
    """After a repair nothing is wrong any more, embeddings of the new descriptions included."""
    if loss == "both copies":
        desk.file.unlink()
        desk.paths.version(0).write_bytes(b"")
    elif loss == "both records":
        desk.paths.record.write_bytes(b"?")
        desk.paths.record_copy.write_bytes(b"?")
    else:
        shutil.rmtree(desk.settings.descriptions.published)
        shutil.rmtree(desk.settings.descriptions.versions)
    assert not look(desk).ok
    assert repair(desk)
    found = look(desk)
    assert found.ok, found.wrong
    assert found.total("property_descriptions").rows == found.total("property_embeddings").rows == 8


def test_failed_properties_are_tried_again_and_ok_rows_kept(desk, images_away):
    """--failed computes the failed rows only: what was ok is the same row as before."""
    images_away.take(images_away.ids[0])
    assert desk.materialize(*BOTH).success
    images_away.put_back(*images_away.ids)
    before = PublishedPartitions(desk.settings.descriptions).read(KEY).to_table().to_pylist()
    assert before[0]["status"] == "failed"
    assert len(repair(desk, failed=True)) == 1
    after = PublishedPartitions(desk.settings.descriptions).read(KEY).to_table().to_pylist()
    assert after[0]["status"] == "ok"
    kept = [row["property_id"] for row in before if row["status"] == "ok"]
    assert [row for row in after if row["property_id"] in kept] == [
        row for row in before if row["status"] == "ok"
    ]
    assert look(desk).ok


@pytest.fixture
def interrupted(desk, monkeypatch):
    """A run that ended after its first committed batch of four."""
    submit = Journal.submit

    def submit_once(self, table):
        if self.committed_rows:
            raise OSError("the disk went away")
        submit(self, table)
        self.flush()

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "submit", submit_once)
        assert not desk.materialize().success
    return desk


def test_an_interrupted_partition_has_nothing_to_accept(interrupted):
    """Where all committed rows can be restored, there is no loss, and looking for one changes no row."""
    assert find_losses(interrupted.settings, Catalog.open(interrupted.settings.home), KEY) == []
    assert interrupted.materialize().success


@pytest.mark.parametrize("gone", ["segments", "the journal"])
def test_a_loss_stops_every_start_until_a_person_accepts_it(interrupted, gone):
    """The message's command finds exactly the loss of the stopped start, and after it the start goes on."""
    (journal,) = interrupted.paths.journals.iterdir()
    for path in journal.glob("segment-*" if gone == "segments" else "*"):
        path.unlink()
    stopped = interrupted.materialize()
    assert not stopped.success
    assert f"vlm-assets repair --accept-loss {KEY}" in stopped.failure
    (loss,) = find_losses(interrupted.settings, Catalog.open(interrupted.settings.home), KEY)
    assert isinstance(loss.error, JournalLossError)
    assert (loss.lost_rows, loss.error.restorable_rows) == (4, 0)
    assert not interrupted.materialize().success, "looking accepts nothing"
    said = accept_loss(loss, NO_MIRROR)
    assert "accepted the loss of 4 rows" in said
    assert find_losses(interrupted.settings, Catalog.open(interrupted.settings.home), KEY) == []
    assert interrupted.materialize().success
    assert look(interrupted).ok


@pytest.mark.published(*BOTH)
def test_a_published_partition_has_nothing_to_accept(desk):
    """The retired mark of what is published is no loss."""
    assert find_losses(desk.settings, Catalog.open(desk.settings.home), KEY) == []
    assert look(desk).ok
