"""vlm_durable/journal/journal.py: submit, flush, read in order, retire, close."""

import contextlib
import random
from dataclasses import replace

import pyarrow as pa
import pytest

from faults.file_operations import FileOperations
from tests.support.damage import flip_bit
from tests.support.kills import killed_homes
from vlm_durable.files import files
from vlm_durable.journal import commits
from vlm_durable.journal import journal as journal_module
from vlm_durable.journal.high_water_mark import read_mark, slots
from vlm_durable.journal.journal import clear_retired
from vlm_durable.journal.journal_errors import (
    DiskFullError,
    FencedError,
    JournalError,
    JournalLossError,
    RowsRefusedError,
    SegmentUnreadableError,
)
from vlm_durable.journal.segments import encode


def test_rows_come_back_as_they_were_submitted_in_catalogue_order(home):
    """Any order of submission, nulls, structs and lists: the same values, by ordinal."""
    order = list(range(12))
    random.Random(3).shuffle(order)
    home.commit(order[:5], order[5:9], order[9:])
    assert home.restored() == list(range(12))


def test_each_commit_is_told_when_it_happens(home):
    """With all rows that are committed by then; the heartbeat of a long batch depends on it."""
    told = []
    with home.open() as journal:
        journal.submit(home.rows(0, 1))
        journal.flush()
        journal.on_commit(told.append)
        for ordinals in ((2,), (3, 4)):
            journal.submit(home.rows(*ordinals))
            journal.flush()
    assert told == [3, 5]


def test_a_commit_that_cannot_be_told_stands(home, caplog):
    """Whoever is told may fail: the journal goes on."""

    def fail(rows):
        raise OSError("no heartbeat")

    with home.open() as journal:
        journal.on_commit(fail)
        for ordinal in (0, 1):
            journal.submit(home.rows(ordinal))
            journal.flush()
    assert home.restored() == [0, 1]
    assert "it stands" in caplog.text


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_rows_waiting_at_close_are_committed(home, error):
    """Leaving the with-block is a flush, a stop signal's way too."""
    with contextlib.suppress(KeyboardInterrupt), home.open() as journal:
        journal.submit(home.rows(0, 1))
        if error:
            raise error
    assert home.restored() == [0, 1]


def test_duplicates_are_refused_and_named(home):
    """An id twice in a table, waiting, or committed: refused, nothing of the table taken."""
    with home.open() as journal:
        with pytest.raises(RowsRefusedError, match="p1"):
            journal.submit(home.rows(1, 2, 1))
        journal.submit(home.rows(1))
        with pytest.raises(RowsRefusedError, match="p1"):
            journal.submit(home.rows(1, 2))
        journal.flush()
        with pytest.raises(RowsRefusedError, match="p1"):
            journal.submit(home.rows(1))
        journal.submit(home.rows(2))
    assert home.restored() == [1, 2]


def test_ids_of_another_range_are_refused_and_named(home):
    """Rows that do not belong here never enter, and the message says which."""
    with home.open() as journal, pytest.raises(RowsRefusedError, match="p77"):
        journal.submit(home.rows(1, 77))


def test_rows_of_another_form_are_refused(home):
    """Another schema, or no place in the order: refused before the disk is touched."""
    with home.open() as journal:
        with pytest.raises(RowsRefusedError, match="columns"):
            journal.submit(home.rows(1).drop_columns(["description"]))
        null = home.rows(1).set_column(0, "ordinal", pa.array([None], pa.int64()))
        with pytest.raises(RowsRefusedError, match="nulls"):
            journal.submit(null)
        assert journal.committed_rows == 0


def test_a_full_disk_is_named_and_raised_by_every_later_call(home, monkeypatch):
    """Fault 7: nothing is acknowledged; flush, submit and close all say so; the next start goes on."""
    journal = home.open()
    journal.submit(home.rows(0, 1))
    journal.flush()
    with monkeypatch.context() as broken:
        broken.setattr(files.os, "fsync", _no_space)
        journal.submit(home.rows(2))
        with pytest.raises(DiskFullError, match="free some space"):
            journal.flush()
    with pytest.raises(DiskFullError):
        journal.submit(home.rows(3))
    assert journal.done_ids == {"p0", "p1"}
    with pytest.raises(DiskFullError):
        journal.close()
    assert home.restored() == [0, 1]


def _no_space(descriptor):
    raise OSError(28, "No space left on device")


def test_a_failed_read_back_is_not_acknowledged(home, monkeypatch):
    """What the disk returns differs from what was written: the commit fails, no segment is published."""
    journal = home.open()
    monkeypatch.setattr(files, "verify_bytes", _flips_a_bit)
    journal.submit(home.rows(0))
    with pytest.raises(SegmentUnreadableError):
        journal.flush()
    with pytest.raises(SegmentUnreadableError):
        journal.close()
    assert home.segments() == []


def _flips_a_bit(path, *, size, sha256):
    flip_bit(path)


def test_a_row_lost_on_the_way_into_the_file_is_noticed(home, monkeypatch):
    """The segment verifies by itself but holds fewer rows than were submitted: not acknowledged."""
    monkeypatch.setattr(commits, "encode", lambda table, identity: encode(table.slice(1), identity))
    journal = home.open()
    journal.submit(home.rows(0, 1, 2))
    with pytest.raises(SegmentUnreadableError, match="other than it was written"):
        journal.flush()
    with pytest.raises(SegmentUnreadableError):
        journal.close()
    assert home.segments() == []


def test_a_writer_whose_lock_was_taken_in_place_commits_nothing(home):
    """Where the lock does not hold, the other writer's name in the lock file is noticed before a commit."""
    journal = home.open()
    (home.directory / "writer.lock").write_text("process 1 on elsewhere\n")
    journal.submit(home.rows(0))
    with pytest.raises(FencedError):
        journal.flush()
    with pytest.raises(FencedError):
        journal.close()
    assert home.restored() == []


def test_a_writer_whose_lock_was_taken_after_its_segment_names_no_manifest(committed):
    """Promise 10: a writer that was overtaken between segment and manifest acknowledges nothing."""

    def take_over(operation):
        if operation.name == "link" and "segment" in operation.paths[1]:
            (committed.directory / "writer.lock").write_text("process 1 on elsewhere\n")

    with pytest.raises(FencedError), committed.open() as journal:
        before = committed.manifests()
        with FileOperations(committed.root, after=take_over).watched():
            journal.submit(committed.rows(9))
            with pytest.raises(FencedError):
                journal.flush()
        assert len(committed.segments()) == 4
        assert committed.manifests() == before


@pytest.mark.parametrize(("taken", "named"), [(True, FencedError), (False, SegmentUnreadableError)])
def test_a_written_segment_that_a_takeover_cleared_away_says_takeover(home, monkeypatch, taken, named):
    """Fault 14: its temporary file removed by the new writer before the read-back: fenced, not damage."""
    real = commits.verify_unlisted

    def after_a_pause(path, identity, *, name=None):
        path.unlink()
        if taken:
            (home.directory / "writer.lock").unlink()
        return real(path, identity, name=name)

    journal = home.open()
    monkeypatch.setattr(commits, "verify_unlisted", after_a_pause)
    journal.submit(home.rows(0))
    with pytest.raises(named):
        journal.flush()
    with pytest.raises(named):
        journal.close()
    assert home.segments() == []


def test_retire_removes_the_journal_and_the_mark_remembers(home):
    """After publication the folder is gone; beginning the same generation again is refused, not silent."""
    home.commit((0, 1, 2, 3, 4, 5))
    journal = home.open()
    with pytest.raises(JournalError, match="6 of 12"):
        journal.retire()
    journal.submit(home.rows(*range(6, 12)))
    journal.retire()
    assert not home.directory.exists()
    with pytest.raises(JournalError):
        journal.submit(home.rows(0))
    with pytest.raises(JournalLossError, match="12 rows were published"):
        home.open()
    with home.open(accept_loss="published file and backup are gone") as again:
        assert len(again.missing_ids) == 12


def test_a_retirement_killed_anywhere_is_finished_later(home, tmp_path):
    """Fault 1: the next start removes the journal. Whichever slot is lost later, nobody misses its rows."""
    home = replace(home, root=tmp_path / "home")
    home.commit((0, 1, 2), (3, 4, 5), (6, 7, 8, 9, 10, 11))
    assert clear_retired(home.directory, home.mark) is False, "a journal at work is left alone"
    journal = home.open()
    homes = [root for root, _ in killed_homes(home.root, journal.retire, tmp_path / "killed")]
    assert len(homes) > 20
    for killed in (replace(home, root=root) for root in (*homes, home.root)):
        if not clear_retired(killed.directory, killed.mark) and killed.directory.exists():
            killed.open().retire()
        assert not killed.directory.exists()
        for slot in slots(killed.mark):
            other = slot.read_bytes()
            slot.unlink()
            assert read_mark(killed.mark, key="KEY", generation="generation").mark.retired
            slot.write_bytes(other)


@pytest.mark.parametrize("gone", [False, True])
def test_a_retirement_killed_while_its_manifest_is_named_is_finished(home, monkeypatch, gone):
    """Fault 6: the temporary name is left too; it goes with the rest, even where only it is left."""
    home.commit(tuple(range(12)))
    journal = home.open()
    real = files.Path.unlink

    def dies(path, missing_ok=False):
        if path.name.startswith(".manifest"):
            raise SystemExit
        real(path, missing_ok=missing_ok)

    with monkeypatch.context() as killed, pytest.raises(SystemExit):
        killed.setattr(files.Path, "unlink", dies)
        journal.retire()
    for path in (*home.manifests(), *home.segments()) if gone else ():
        path.unlink()
    assert clear_retired(home.directory, home.mark) is True
    assert not home.directory.exists()


def test_a_segment_that_changes_under_an_open_journal_is_noticed_on_reading(committed):
    """Fault 10: the digest is checked again when rows are read for publication."""
    with committed.open() as journal:
        path = committed.segments()[0]
        flip_bit(path, 100)
        with pytest.raises(SegmentUnreadableError, match="has changed"):
            list(journal.read_ordered())


@pytest.mark.parametrize("taken", [True, False])
def test_an_open_overtaken_while_it_recovers_reads_again_only_while_it_holds_the_lock(
    home, monkeypatch, taken
):
    """Fault 14: beaten to its manifest number it reads again; where its lock is gone, it stops."""
    real, attempts = journal_module.settle, []

    def beaten_once(found, **named):
        attempts.append(found)
        if len(attempts) == 1:
            if taken:
                (home.directory / "writer.lock").unlink()
            raise FencedError("the number is taken")
        return real(found, **named)

    monkeypatch.setattr(journal_module, "settle", beaten_once)
    if taken:
        with pytest.raises(FencedError, match="removed or taken"):
            home.open()
    else:
        home.open().close()
    assert len(attempts) == (1 if taken else 2)


@pytest.mark.parametrize(("taken", "named"), [(True, FencedError), (False, JournalLossError)])
def test_a_loss_that_a_takeover_explains_says_takeover(committed, monkeypatch, taken, named):
    """Fault 14: paused while it read, an opener sees files go; that is a loss only while it is the writer."""
    real = journal_module.survey_journal

    def late(directory, identity, mark):
        committed.segments()[-1].unlink()
        if taken:
            (directory / "writer.lock").unlink()
        return real(directory, identity, mark)

    monkeypatch.setattr(journal_module, "survey_journal", late)
    with pytest.raises(named):
        committed.open()
    monkeypatch.undo()
    with pytest.raises(JournalLossError):
        committed.open()


def test_rows_that_a_takeover_took_away_while_they_were_read_say_takeover(committed):
    """Fault 14: another writer published and retired; whoever still reads for publication is told so."""
    with committed.open() as journal:
        (committed.directory / "writer.lock").unlink()
        for path in committed.segments():
            path.unlink()
        with pytest.raises(FencedError, match="another writer may have taken over"):
            list(journal.read_ordered())
