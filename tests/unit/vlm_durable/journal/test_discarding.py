"""Discarding a journal: its rows are gone and not missed, and no other journal is touched."""

import pytest

from vlm_durable.journal import setting_aside
from vlm_durable.journal.high_water_mark import read_mark
from vlm_durable.journal.journal_errors import FencedError, JournalLockedError, JournalLossError
from vlm_durable.journal.setting_aside import discard


def discarded(home) -> bool:
    return discard(home.directory, key="KEY", generation="generation", high_water_mark=home.mark)


def test_a_discarded_journal_is_gone_and_its_mark_says_so(committed):
    """The folder goes; the mark keeps the rows' number, retired."""
    assert discarded(committed)
    assert not committed.directory.exists()
    mark = read_mark(committed.mark, key="KEY", generation="generation").mark
    assert (mark.retired, mark.rows) == (True, 9)


def test_it_is_never_continued_by_accident(committed):
    """Opening the same generation again stops, as after any publication: it is not a fresh start."""
    discarded(committed)
    with pytest.raises(JournalLossError):
        committed.open()


def test_a_journal_in_use_is_not_discarded(committed):
    """Who holds the writer's lock keeps the journal, and goes on committing."""
    with committed.open() as journal:
        with pytest.raises(JournalLockedError):
            discarded(committed)
        journal.submit(committed.rows(9))
        journal.flush()
    assert committed.restored() == list(range(10))


def test_a_journal_that_does_not_read_stays(committed):
    """Where no manifest reads, nobody knows what would be given up: nothing is touched."""
    for path in committed.manifests():
        path.write_bytes(b"?")
    assert not discarded(committed)
    assert len(committed.segments()) == 3
    assert not read_mark(committed.mark, key="KEY", generation="generation").mark.retired


def test_what_no_manifest_lists_goes_too(committed):
    """Damaged segments and files of killed writers do not keep the folder."""
    committed.segments()[0].write_bytes(b"damaged")
    (committed.directory / ".segment.1-abc.tmp").write_bytes(b"half")
    (committed.directory / "segment-000009-00000009-ffffffffffffffffffffffffffffffff.parquet").write_bytes(
        b"?"
    )
    assert discarded(committed)
    assert not committed.directory.exists()


@pytest.mark.parametrize("left", [[], ["writer.lock"]])
def test_the_last_step_can_be_repeated(committed, left):
    """A folder that a kill left with no manifest any more is removed by doing it again."""
    for path in committed.directory.iterdir():
        if path.name not in left:
            path.unlink()
    assert discarded(committed)
    assert not committed.directory.exists()
    assert read_mark(committed.mark, key="KEY", generation="generation").mark.retired


def test_a_mark_ahead_of_every_manifest_is_followed(committed):
    """Damaged or lost manifests: the number follows the mark's, and the mark's rows are not lowered."""
    for path in committed.manifests()[-2:]:
        path.unlink()
    assert discarded(committed)
    mark = read_mark(committed.mark, key="KEY", generation="generation").mark
    assert (mark.retired, mark.rows) == (True, 9)


def test_a_discarding_that_is_overtaken_removes_nothing(committed, monkeypatch):
    """The lock was taken while the mark was written: the other's rows stay, and this process is told."""
    real = setting_aside.write_mark

    def taken(path, mark):
        (committed.directory / "writer.lock").unlink()
        real(path, mark)

    monkeypatch.setattr(setting_aside, "write_mark", taken)
    with pytest.raises(FencedError):
        discarded(committed)
    assert len(committed.segments()) == 3
