"""Setting a generation aside, killed or failing at any file operation: no row is lost, and none is used."""

import contextlib
import errno
import itertools
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from faults.file_operations import FileOperations, fail_at
from tests.support.kills import killed_homes
from vlm_durable.files.layout import PartitionPaths
from vlm_durable.journal.high_water_mark import slots
from vlm_durable.journal.journal_errors import JournalLockedError, JournalStorageError
from vlm_durable.journal.setting_aside import is_set_aside, move_set_aside, note_set_aside, unmoved

ROWS = 9


@pytest.fixture
def new_home(home):
    """Makes a home with a journal of nine rows."""
    numbers = itertools.count()

    def make():
        made = replace(home, root=home.root / "made" / str(next(numbers)))
        made.commit((0, 1, 2), (3, 4, 5), (6, 7, 8))
        return made

    return make


def set_aside(paths: PartitionPaths) -> None:
    note_set_aside(paths, "generation", "its device gave wrong answers")
    move_set_aside(paths, "generation")


def begin_again(paths: PartitionPaths) -> None:
    """What the next run does: note it, as its cause is told again, and move what is left."""
    note_set_aside(paths, "generation", "its device gave wrong answers")
    for generation in unmoved(paths):
        move_set_aside(paths, generation)


def assert_set_aside(paths: PartitionPaths) -> None:
    assert is_set_aside(paths, "generation")
    assert not paths.journal("generation").exists()
    assert not any(slot.exists() for slot in slots(paths.high_water_mark("generation"))), (
        "nobody misses the rows"
    )
    (aside,) = paths.quarantine.iterdir()
    assert sum(pq.read_metadata(segment).num_rows for segment in aside.glob("segment-*")) == ROWS
    assert list(unmoved(paths)) == []


def test_killed_at_each_operation_it_is_finished_by_the_next_run(new_home, tmp_path):
    """Fault 1: before the note nothing has changed; after it no row is lost, and none can be resumed."""
    home = new_home()
    homes = killed_homes(home.root, lambda: set_aside(home.paths), tmp_path / "killed")
    assert len(homes) > 8
    for root, _ in homes:
        killed = replace(home, root=root)
        if not is_set_aside(killed.paths, "generation"):
            assert killed.restored() == list(range(ROWS))
        begin_again(killed.paths)
        assert_set_aside(killed.paths)


def test_storage_that_fails_at_any_operation_is_named_and_loses_nothing(new_home):
    """Fault 8: any other error than the journal's own fails here; the next run finishes."""
    for at in itertools.count(1):
        paths = new_home().paths
        operations = FileOperations(paths.asset.home.root, fail_at(at, errno.EIO))
        with operations.watched(), contextlib.suppress(JournalStorageError):
            set_aside(paths)
        if operations.count < at:
            break
        begin_again(paths)
        assert_set_aside(paths)
    assert at > 8, "hardly any operation failed"


def test_a_journal_in_use_is_not_moved(committed):
    """Its writer goes on until it looks at the note; what it holds is not taken from under it."""
    paths = committed.paths
    with committed.open():
        note_set_aside(paths, "generation", "its device gave wrong answers")
        with pytest.raises(JournalLockedError):
            move_set_aside(paths, "generation")
        assert paths.journal("generation").is_dir()
    begin_again(paths)
    assert_set_aside(paths)


def test_a_note_that_does_not_read_counts(committed):
    """Damage to the note lets no row of it be used."""
    paths = committed.paths
    note_set_aside(paths, "generation", "its device gave wrong answers")
    paths.set_aside_note("generation").write_bytes(b"?")
    assert is_set_aside(paths, "generation")
    begin_again(paths)
    assert_set_aside(paths)
