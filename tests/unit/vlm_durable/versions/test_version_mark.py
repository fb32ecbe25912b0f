"""A version mark outlives damage to one copy, is never lowered by itself, and tells old from new."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.support.damage import flip_bit
from vlm_durable.files.layout import Home
from vlm_durable.files.sealed_json import FormatVersionError, seal, unseal
from vlm_durable.versions import version_mark
from vlm_durable.versions.version_mark import (
    UNKNOWN_STORE,
    MarkComparison,
    VersionMark,
    VersionMarkFile,
    compare_with_mark,
)

NAME = "property_catalog/catalog"


def marks_in(home: Path, asset: str = "property_catalog", key: str = "catalog") -> VersionMarkFile:
    return VersionMarkFile(Home(home).asset(asset).partition(key))


def mark(sequence: int, digest: str = "d", name: str = NAME) -> VersionMark:
    return VersionMark.now(name, sequence, digest)


@pytest.mark.parametrize(
    ("sequence", "digest", "wanted"),
    [
        (3, "d", MarkComparison.CURRENT),
        (3, "e", MarkComparison.OTHER),
        (2, "d", MarkComparison.OLDER),
        (2, "e", MarkComparison.OLDER),
        (4, "d", MarkComparison.NEWER),
        (4, "e", MarkComparison.NEWER),
    ],
)
def test_a_version_is_told_from_the_marked_one(sequence: int, digest: str, wanted: MarkComparison) -> None:
    """An older whole file is never taken for the newest one."""
    assert compare_with_mark(mark(3), sequence, digest) is wanted
    assert compare_with_mark(None, sequence, digest) is MarkComparison.NEWER


def test_a_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Both copies say the same; writing it again writes nothing."""
    marks, written = marks_in(tmp_path), mark(3)
    assert marks.raise_to(written)
    assert marks.read().mark == written
    assert marks.copies[0].read_bytes() == marks.copies[1].read_bytes()
    assert not marks.raise_to(mark(3))
    assert not marks.raise_to(mark(2))
    assert marks.read().mark == written


@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_mark_is_never_lowered(tmp_path: Path) -> None:
    """A start that sees older data leaves the mark; only another version of its number takes its place."""
    marks = marks_in(tmp_path)
    marks.raise_to(mark(5))
    marks.raise_to(mark(4))
    marks.raise_to(mark(5, "another"))
    marks.write(mark(4, "another"))
    reading = marks.read().mark
    assert reading is not None
    assert (reading.sequence, reading.digest) == (5, "d")
    marks.write(mark(5, "another"))
    reading = marks.read().mark
    assert reading is not None
    assert (reading.sequence, reading.digest) == (5, "another")


def test_a_mark_of_another_origin_raises_nothing(tmp_path: Path) -> None:
    """The mark of another home's file, copied here, is written over, however high its number is."""
    marks = marks_in(tmp_path)
    marks.raise_to(mark(3, "mine:d"))
    other = marks_in(tmp_path / "other")
    other.raise_to(mark(9, "its:d"))
    marks.copies[1].write_bytes(other.copies[0].read_bytes())
    assert marks.raise_to(mark(3, "mine:d"))
    reading = marks.read()
    assert [(one.sequence, one.origin) for one in reading.marks] == [(3, "mine")] * 2


def test_two_damaged_copies_are_not_the_same_as_none(tmp_path: Path) -> None:
    """Unreadable never means empty."""
    marks = marks_in(tmp_path)
    assert not marks.read().is_unreadable
    marks.raise_to(mark(3))
    for copy in marks.copies:
        copy.write_bytes(b"?")
    reading = marks.read()
    assert (reading.mark, reading.is_unreadable) == (None, True)


def test_no_number_is_given_twice_where_the_mark_cannot_be_read(tmp_path: Path) -> None:
    """Nor once a person accepted the loss; without any mark the first number is 1."""
    marks = marks_in(tmp_path)
    marks.forget()
    assert (marks.next_sequence(), marks.next_sequence(3)) == (1, 4)
    marks.raise_to(mark(7))
    for copy in marks.copies:
        copy.write_bytes(b"?")
    given = marks.next_sequence(3)
    assert given > 7
    marks.forget()
    assert not marks.read().is_unreadable
    assert marks.next_sequence() > given


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", ["flip", "empty", "gone", "folder", "foreign", "older"])
def test_one_copy_is_enough_and_the_other_comes_back(tmp_path: Path, number: int, damage: str) -> None:
    """The highest readable copy counts; the next raise writes the damaged one anew."""
    marks, written = marks_in(tmp_path), mark(7)
    marks.raise_to(written)
    copy = marks.copies[number]
    if damage == "flip":
        flip_bit(copy)
    elif damage == "empty":
        copy.write_bytes(b"")
    elif damage == "gone":
        copy.unlink()
    elif damage == "folder":
        copy.unlink()
        copy.mkdir()
    elif damage == "foreign":
        other = marks_in(tmp_path, "property_descriptions", "0-9")
        other.raise_to(mark(9, name="property_descriptions/0-9"))
        copy.write_bytes(other.copies[0].read_bytes())
    else:
        older = marks_in(tmp_path / "older")
        older.raise_to(mark(6))
        copy.write_bytes(older.copies[0].read_bytes())
    reading = marks.read()
    assert reading.mark == written
    assert reading.damaged == (() if damage in ("gone", "older") else (copy,))
    if damage == "folder":
        copy.rmdir()
    assert marks.raise_to(written)
    assert copy.read_bytes() == marks.copies[1 - number].read_bytes()


def test_a_mark_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    """It is not damaged, and must not be written over."""
    marks = marks_in(tmp_path)
    marks.raise_to(mark(1))
    path = marks.copies[0]
    content = unseal(path.read_bytes())
    path.write_bytes(seal(json.dumps({**content, "format": 99}).encode()))
    before = path.read_bytes()
    with pytest.raises(FormatVersionError, match="a newer version wrote it"):
        marks.raise_to(mark(2))
    assert path.read_bytes() == before


def test_marks_that_cannot_be_read_for_a_moment_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails at both copies says nothing of them: the newest version is not forgotten."""
    marks = marks_in(tmp_path)
    marks.raise_to(mark(7))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(version_mark, "read_sealed", fail)
        with pytest.raises(OSError, match="Input/output error"):
            marks.raise_to(mark(6))
    reading = marks.read()
    assert reading.mark is not None
    assert reading.mark.sequence == 7


def test_a_mark_that_cannot_be_read_is_not_one_without_a_store(tmp_path: Path) -> None:
    """Written anew it still says that a store may have had the object, until a store is seen to have it."""
    marks = marks_in(tmp_path)
    marks.raise_to(mark(3))
    assert marks.last_store() is None
    marks.note_store("s3://bucket")
    for copy in marks.copies:
        copy.write_bytes(b"damaged")
    assert marks.last_store() == UNKNOWN_STORE
    marks.raise_to(mark(3))
    marks.raise_to(mark(4))
    assert marks.last_store() == UNKNOWN_STORE
    marks.note_store("s3://bucket")
    assert marks.last_store() == "s3://bucket"
