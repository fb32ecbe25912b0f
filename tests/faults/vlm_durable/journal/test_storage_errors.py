"""Errors of the storage at file operations: nothing is promised, the error has a name, work goes on."""

import itertools

import pytest

from tests.support.shares import share_of


@pytest.mark.parametrize(
    ("mode", "only", "named"),
    [
        ("EIO", None, "JournalStorageError"),
        *share_of(
            [
                ("ENOSPC", "write", "DiskFullError"),
                ("EXDEV", "link", "CrossDeviceError"),
                ("EDQUOT", "fsync", "DiskFullError"),
                ("ENOSPC", "create", "DiskFullError"),
                ("ENOSPC", "link", "DiskFullError"),
                ("EROFS", "create", "DirectoryNotWritableError"),
            ],
            3,
        ),
    ],
)
def test_an_error_at_any_operation_is_named_and_nothing_is_promised_after_it(
    writers, stride, mode, only, named
):
    """Faults 7, 8, at every third operation: nothing acknowledged, the error has a name, work goes on."""
    met = 0
    for at in itertools.count(1, stride):
        home = writers.new_home()
        struck = writers.run(home, mode, at, only=only)
        writers.finish(home, set(struck.promised))
        if struck.finished and struck.operations < at:
            break
        if not struck.finished:
            assert struck.error == named, struck.message
            assert "What to do" in struck.message
            met += 1
    assert met > 2, "hardly any operation met the error"


def test_short_writes_are_continued(writers):
    """Fault 8: a write that takes only part of the bytes is no error and leaves whole files."""
    home = writers.new_home()
    struck = writers.run(home, "short")
    assert struck.finished, struck.message
    writers.finish(home, set(struck.promised))
