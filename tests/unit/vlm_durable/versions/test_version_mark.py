"""A version mark outlives damage to one copy, is never lowered by itself, and tells old from new."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.support.damage import flip_bit
from vlm_durable.files.sealed_json import FormatVersionError, seal, unseal
from vlm_durable.versions import version_mark
from vlm_durable.versions.version_mark import (
    MarkComparison,
    VersionMark,
    compare_with_mark,
    mark_copies,
    raise_version_mark,
    read_version_mark,
    write_version_mark,
)

NAME = "property_catalog/catalog"


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
    path, written = tmp_path / "marks" / "catalog.json", mark(3)
    assert raise_version_mark(path, written)
    assert read_version_mark(path, name=NAME).mark == written
    assert [copy.read_bytes() for copy in mark_copies(path)] == [path.read_bytes()] * 2
    assert not raise_version_mark(path, mark(3))
    assert not raise_version_mark(path, mark(2))
    assert read_version_mark(path, name=NAME).mark == written


@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_mark_is_never_lowered(tmp_path: Path) -> None:
    """A start that sees older data leaves the mark; only another version of its number takes its place."""
    path = tmp_path / "catalog.json"
    raise_version_mark(path, mark(5))
    raise_version_mark(path, mark(4))
    raise_version_mark(path, mark(5, "another"))
    write_version_mark(path, mark(4, "another"))
    reading = read_version_mark(path, name=NAME).mark
    assert reading is not None
    assert (reading.sequence, reading.digest) == (5, "d")
    write_version_mark(path, mark(5, "another"))
    reading = read_version_mark(path, name=NAME).mark
    assert reading is not None
    assert (reading.sequence, reading.digest) == (5, "another")


def test_a_mark_of_another_origin_raises_nothing(tmp_path: Path) -> None:
    """The mark of another home's file, copied here, is written over, however high its number is."""
    path = tmp_path / "catalog.json"
    raise_version_mark(path, mark(3, "mine:d"))
    raise_version_mark(tmp_path / "other.json", mark(9, "its:d"))
    mark_copies(path)[1].write_bytes((tmp_path / "other.json").read_bytes())
    assert raise_version_mark(path, mark(3, "mine:d"))
    reading = read_version_mark(path, name=NAME)
    assert [(one.sequence, one.origin) for one in reading.marks] == [(3, "mine")] * 2


def test_two_damaged_copies_are_not_the_same_as_none(tmp_path: Path) -> None:
    """Unreadable never means empty."""
    path = tmp_path / "catalog.json"
    assert not read_version_mark(path, name=NAME).is_unreadable
    raise_version_mark(path, mark(3))
    for copy in mark_copies(path):
        copy.write_bytes(b"?")
    reading = read_version_mark(path, name=NAME)
    assert (reading.mark, reading.is_unreadable) == (None, True)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", ["flip", "empty", "gone", "folder", "foreign", "older"])
def test_one_copy_is_enough_and_the_other_comes_back(tmp_path: Path, number: int, damage: str) -> None:
    """The highest readable copy counts; the next raise writes the damaged one anew."""
    path, written = tmp_path / "catalog.json", mark(7)
    raise_version_mark(path, written)
    copy = mark_copies(path)[number]
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
        raise_version_mark(tmp_path / "other.json", mark(9, name="property_descriptions/0-9"))
        copy.write_bytes((tmp_path / "other.json").read_bytes())
    else:
        raise_version_mark(tmp_path / "old.json", mark(6))
        copy.write_bytes((tmp_path / "old.json").read_bytes())
    reading = read_version_mark(path, name=NAME)
    assert reading.mark == written
    assert reading.damaged == (() if damage in ("gone", "older") else (copy,))
    if damage == "folder":
        copy.rmdir()
    assert raise_version_mark(path, written)
    assert copy.read_bytes() == mark_copies(path)[1 - number].read_bytes()


def test_a_mark_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    """It is not damaged, and must not be written over."""
    path = tmp_path / "catalog.json"
    raise_version_mark(path, mark(1))
    content = unseal(path.read_bytes())
    path.write_bytes(seal(json.dumps({**content, "format": 99}).encode()))
    before = path.read_bytes()
    with pytest.raises(FormatVersionError, match="a newer version wrote it"):
        raise_version_mark(path, mark(2))
    assert path.read_bytes() == before


def test_marks_that_cannot_be_read_for_a_moment_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails at both copies says nothing of them: the newest version is not forgotten."""
    path = tmp_path / "catalog.json"
    raise_version_mark(path, mark(7))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(version_mark, "read_sealed", fail)
        with pytest.raises(OSError, match="Input/output error"):
            raise_version_mark(path, mark(6))
    reading = read_version_mark(path, name=NAME)
    assert reading.mark is not None
    assert reading.mark.sequence == 7
