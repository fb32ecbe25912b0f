"""Errors of the storage at file operations: nothing is promised, the error has a name, work goes on."""

import errno
import itertools

import pytest

from faults.file_operations import FileOperations, fail_at
from tests.support.journals import open_journal, plain_rows
from tests.support.shares import share_of
from vlm_durable.files.layout import Home
from vlm_durable.journal.journal_errors import (
    CrossDeviceError,
    DirectoryNotWritableError,
    DiskFullError,
    JournalError,
    JournalStorageError,
)

IDS = [f"p{n}" for n in range(9)]


def paths_in(home):
    return Home(home).asset("a").partition("KEY")


def commit(paths, promised):
    """Go on from whatever stands there, three rows in a commit."""
    with open_journal(paths, "g", IDS) as journal:
        assert promised <= journal.done_ids
        for first in range(0, len(IDS), 3):
            ids = IDS[first : first + 3]
            if journal.missing_ids.issuperset(ids):
                journal.submit(plain_rows(ids, first))
                journal.flush()
            promised.update(ids)
        assert [i for batch in journal.read_ordered() for i in batch["property_id"].to_pylist()] == IDS


@pytest.mark.parametrize(
    ("code", "only", "named"),
    [
        (errno.EIO, "", JournalStorageError),
        *share_of(
            [
                (errno.ENOSPC, "write", DiskFullError),
                (errno.EXDEV, "link", CrossDeviceError),
                (errno.EDQUOT, "fsync", DiskFullError),
                (errno.ENOSPC, "create", DiskFullError),
                (errno.ENOSPC, "link", DiskFullError),
                (errno.EROFS, "create", DirectoryNotWritableError),
            ],
            3,
        ),
    ],
)
def test_an_error_at_any_operation_is_named_and_nothing_is_promised_after_it(memory_path, code, only, named):
    """Faults 7, 8: what was acknowledged before stays, the error has a name, and the next start goes on."""
    met = 0
    for at in itertools.count(1):
        home = memory_path / str(at)
        promised, operations = set(), FileOperations(home, fail_at(at, code, only=only))
        try:
            with operations.watched():
                commit(paths_in(home), promised)
        except JournalError as error:
            assert type(error) is named, error
            assert "What to do" in str(error)
            met += 1
        commit(paths_in(home), promised)
        if sum(only in ("", done.name) for done in operations.log) < at - 1:
            break
    assert met > 2, "hardly any operation met the error"


def test_short_writes_are_continued(memory_path):
    """Fault 8: a write that takes only part of the bytes is no error and leaves whole files."""
    operations = FileOperations(memory_path)
    operations.longest_write = 100
    with operations.watched():
        commit(paths_in(memory_path), promised := set())
    commit(paths_in(memory_path), promised)
