"""vlm_durable/journal/recovery.py: one verified state from whatever is on disk, or a refusal."""

import json
import shutil

import pyarrow as pa
import pytest

from vlm_durable.files.sealed_json import FormatVersionError, seal, unseal
from vlm_durable.journal.commits import newest_manifest
from vlm_durable.journal.high_water_mark import slots
from vlm_durable.journal.journal_errors import (
    CrossDeviceError,
    DirectoryNotWritableError,
    JournalError,
    JournalLossError,
)


def test_a_first_start_is_empty_and_says_so(home):
    """Nothing there and nothing promised: begins with nothing, no refusal."""
    with home.open() as journal:
        assert journal.done_ids == frozenset()
        assert journal.recovery.sentence() == (
            "KEY: 0 of 12 rows restored from 0 segments (no manifest yet, high-water mark: none yet), "
            "12 to do. 0 segments adopted. 0 files quarantined."
        )


@pytest.mark.parametrize("size", [0, 1, 40, -1])
def test_a_truncated_newest_manifest_opens_the_state_before_it(committed, size):
    """Fault 11: cut short or emptied, it is moved aside, and its rows come back by adoption."""
    newest = committed.manifests()[-1]
    newest.write_bytes(newest.read_bytes()[:size])
    with committed.open() as journal:
        assert journal.done_ids == {f"p{n}" for n in range(9)}
        assert journal.recovery.manifest_rows == 6
        assert journal.recovery.sequence == 5, "a number that was taken is never used again"
        assert len(journal.recovery.adopted) == 1
        assert [why for _, why in journal.recovery.quarantined if "manifest" in why]
    assert len(committed.quarantined()) == 1
    assert committed.restored() == list(range(9))


def test_every_manifest_unreadable_still_restores_what_the_mark_promises(committed):
    """Segments say whose they are, so all rows are adopted where the mark confirms their number."""
    for path in committed.manifests():
        path.write_bytes(b"\0" * 100)
    assert committed.restored() == list(range(9))


def test_nothing_readable_but_segments_is_refused(committed):
    """With neither manifests nor mark nobody knows how much there was: unreadable never means empty."""
    for path in committed.manifests():
        path.write_bytes(b"")
    shutil.rmtree(committed.mark.parent)
    with pytest.raises(JournalLossError, match="how much there was is unknown"):
        committed.open()


def test_a_last_segment_lost_with_its_manifest_is_refused_though_the_rows_add_up(committed, tmp_path):
    """Adopted rows must not make up for lost ones: the mark knows the last segment by its name."""
    with committed.open() as journal:
        journal.submit(committed.rows(9))
    *_, last = committed.segments()
    spare = last.read_bytes()
    committed.manifests()[-1].unlink()
    last.unlink()
    twin = type(committed)(tmp_path / "twin")
    twin.commit((10, 11))
    shutil.copy(twin.segments()[0], committed.directory)
    with pytest.raises(JournalLossError, match=f"11 rows can be restored, 10 were .*{last.name}"):
        committed.open()
    last.write_bytes(spare)
    assert committed.restored() == list(range(12))


def test_a_manifest_under_another_number_is_damage(committed):
    """A manifest copied to a later number must not take the journal back to its state."""
    oldest, *_, newest = committed.manifests()
    forged = newest.with_name("manifest-000000000099.json")
    shutil.copy(oldest, forged)
    found = committed.survey()
    assert forged in found.damaged
    assert found.head.rows == 9


def test_a_manifest_that_its_successor_did_not_follow_is_damage(committed):
    """Each manifest carries the digest of the one before it: another one in its place is put aside."""
    before = committed.manifests()[-2]
    content = unseal(before.read_bytes())
    before.write_bytes(seal(json.dumps({**content, "epoch": 7}).encode()))
    found = committed.survey()
    assert "followed" in found.damaged[before]
    assert not found.losses


@pytest.mark.promise("What can be restored without loss")
def test_a_listed_segment_that_is_gone_is_refused_and_back_when_put_back(committed):
    """Fault 12: it stops by name; the copy put back, the same start goes on."""
    lost = committed.segments()[0]
    aside = committed.root / "copy"
    lost.rename(aside)
    with pytest.raises(JournalLossError, match=rf"{lost.name} \(3 rows\) is not there"):
        committed.open()
    aside.rename(lost)
    assert committed.restored() == list(range(9))


def test_a_listed_segment_that_does_not_verify_is_refused_without_the_mark_too(committed):
    """Promise 8: the manifest alone says what was committed, where the high-water mark is lost."""
    damaged = committed.segments()[1]
    damaged.write_bytes(b"nothing")
    shutil.rmtree(committed.mark.parent)
    with pytest.raises(JournalLossError, match=rf"{damaged.name} \(3 rows\) does not verify"):
        committed.open()
    assert damaged.read_bytes() == b"nothing"


def test_an_accepted_loss_is_recorded_and_only_the_lost_rows_are_done_again(committed):
    """After a person's word the damaged file is kept aside and exactly its rows are missing."""
    damaged = committed.segments()[1]
    damaged.write_bytes(b"nothing")
    with committed.open(accept_loss="disk swapped, J.") as journal:
        assert journal.missing_ids == {"p3", "p4", "p5", "p9", "p10", "p11"}
        assert "loss accepted: disk swapped, J." in journal.recovery.sentence()
        journal.submit(committed.rows(3, 4, 5))
    assert committed.quarantined()[0].startswith(damaged.name)
    assert committed.restored() == list(range(9))
    events = newest_manifest(committed.directory).events
    assert [event["accepted_loss"] for event in events if "accepted_loss" in event] == ["disk swapped, J."]


def test_accept_loss_without_a_loss_changes_nothing(committed):
    """The command given needlessly drops no row and records no loss."""
    with committed.open(accept_loss="just in case") as journal:
        assert journal.committed_rows == 9
        assert journal.recovery.accepted_loss is None


def test_a_segment_of_another_journal_is_not_adopted(committed, tmp_path_factory):
    """A file copied in from elsewhere verifies by itself, but is not ours: it goes to quarantine."""
    other = type(committed)(tmp_path_factory.mktemp("other"))
    with other.open(fingerprints={"catalogue": "c1", "model": "another"}) as journal:
        journal.submit(other.rows(9, 10))
    stranger = other.segments()[0]
    shutil.copy(stranger, committed.directory)
    with committed.open() as journal:
        assert journal.committed_rows == 9
        assert "belongs to another journal" in journal.recovery.quarantined[0][1]


def test_an_unlisted_segment_with_committed_ids_is_put_aside_not_doubled(committed):
    """Rows that two writers made count once: the listed segment wins, the other is kept aside."""
    listed = {record.name for record in newest_manifest(committed.directory).segments}
    spare = committed.segments()[2].read_bytes()
    name = committed.segments()[2].name
    twin = committed.directory / name.replace("segment-000001-00000003", "segment-000000-00000009")
    twin.write_bytes(spare)
    assert twin.name not in listed
    assert committed.restored() == list(range(9))
    assert committed.quarantined()[0].startswith(twin.name)


def test_left_over_temporaries_go(committed):
    """What a killed writer left half written is removed, beside the segments and beside the mark."""
    left = [
        committed.directory / ".x.parquet.1-a.tmp",
        committed.mark.parent / f".{committed.mark.name}.1-a.tmp",
    ]
    for path in left:
        path.write_bytes(b"half")
    assert committed.restored() == list(range(9))
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fingerprints": {"catalogue": "c1", "model": "m2"}}, "model is 'm1' there and 'm2' here"),
        ({"fingerprints": {"catalogue": "c2", "model": "m1"}}, "catalogue is 'c1' there"),
        ({"key": "OTHER"}, "KEY"),
        ({"generation": "other"}, "generation"),
        ({"expected_ids": frozenset({"p0", "p1"})}, "expected_rows is 12 there and 2 here"),
        ({"schema": pa.schema([("property_id", pa.string())])}, "the schema needs"),
    ],
)
def test_other_work_is_refused_by_what_differs(committed, changes, named):
    """Fault 15: settings or catalogue changed under a journal: named, and nothing is mixed."""
    with pytest.raises(JournalError, match=named):
        committed.open(**changes)
    assert committed.restored() == list(range(9))


def test_another_schema_is_refused(committed):
    """A column renamed under a journal is another meaning, not the same rows."""
    schema = committed.rows(0).schema
    renamed = schema.set(2, schema.field(2).with_name("described"))
    with pytest.raises(JournalError, match="schema"):
        committed.open(schema=renamed)


def test_a_manifest_of_a_newer_version_is_refused_though_an_older_one_reads(committed):
    """A newer program's state is never taken for damage: nothing is moved, and the message names the way."""
    newest = committed.manifests()[-1]
    content = unseal(newest.read_bytes())
    newest.write_bytes(seal(json.dumps({**content, "format": 99}).encode()))
    with pytest.raises(FormatVersionError, match="newer version"):
        committed.open()
    assert committed.quarantined() == []


def test_a_quarantine_on_another_device_is_refused(home, elsewhere):
    """Fault 9: files that would have to cross devices are refused at the start."""
    with pytest.raises(CrossDeviceError):
        home.open(quarantine=elsewhere / "quarantine")


def test_a_place_that_cannot_be_a_directory_is_refused_by_name(home):
    """A file where the journal's folder belongs: a named error, and the file stays."""
    home.directory.parent.mkdir(parents=True)
    home.directory.write_text("not a folder")
    with pytest.raises(DirectoryNotWritableError, match="What to do"):
        home.open()
    assert home.directory.read_text() == "not a folder"


def test_three_manifests_stay_and_all_verify(committed):
    """The current manifest and two before it are kept, whatever the number of commits."""
    assert len(committed.manifests()) == 3
    for path in committed.manifests():
        unseal(path.read_bytes())


def test_an_older_manifest_is_not_pruned_while_a_kept_one_is_damaged(committed):
    """Purging waits for verified successors: with one of three damaged in place, the fourth stays."""
    with committed.open() as journal:
        oldest_kept = committed.manifests()[0]
        committed.manifests()[1].write_bytes(b"damaged")
        journal.submit(committed.rows(9))
        journal.flush()
        assert oldest_kept.exists()


@pytest.mark.parametrize("slot", ["", ".other"])
def test_a_damaged_mark_slot_is_put_aside_and_the_other_serves(committed, slot):
    """One bad slot of the mark leaves the other; nothing is lost and nothing refused."""
    damaged = committed.mark.with_name(committed.mark.name + slot)
    damaged.write_bytes(b"\0")
    assert committed.restored() == list(range(9))
    assert list(damaged.parent.glob(f"{damaged.name}.????????????"))


@pytest.mark.parametrize("swapped", [(0,), (1,), (0, 1)])
def test_marks_that_were_swapped_between_two_journals_are_recovered_from(committed, swapped):
    """Issue 12, item 10: the other slot and the journal say what there was; the foreign slot is set aside."""
    other = type(committed)(committed.root / "elsewhere")
    with other.open(key="K2") as journal:
        journal.submit(other.rows(0, 1))
        journal.flush()
        journal.submit(other.rows(2))
        journal.flush()
    for number in swapped:
        one, two = slots(committed.mark)[number], slots(other.mark)[number]
        content = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)
    assert committed.restored() == list(range(9))
    assert other.restored(key="K2") == [0, 1, 2]
    assert len(list(committed.mark.parent.glob(f"{committed.mark.name}*.????????????"))) == len(swapped)
    assert committed.restored() == list(range(9))


def test_a_mark_of_another_journal_alone_says_nothing_about_this_one(committed):
    """Without a journal of its own, a foreign mark is no fresh start: how much there was is unknown."""
    other = type(committed)(committed.root / "elsewhere")
    with pytest.raises(JournalLossError, match="how much there was is unknown"):
        other.open(high_water_mark=committed.mark, key="K2")


def test_opening_again_and_again_reaches_the_same_rows(committed):
    """Fault 6: recovery is idempotent; only sequence and epoch go up."""
    with committed.open() as first:
        pass
    with committed.open() as second:
        assert second.done_ids == first.done_ids
        assert second.recovery.sequence == first.recovery.sequence + 1
        assert second.recovery.epoch == first.recovery.epoch + 1
