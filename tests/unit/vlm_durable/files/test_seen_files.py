"""What is remembered of a file is believed only while the file is the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.damage import flip_bit
from vlm_durable.files import seen_files
from vlm_durable.files.seen_files import SeenFiles, signature_of

DAY_SECONDS = 86_400.0


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(seen_files, "_SETTLED_NS", -(10**9))
    path = tmp_path / "file"
    path.write_bytes(b"rows")
    return path


def remember(note: Path, file: Path, name: str = "file") -> SeenFiles:
    seen = SeenFiles(note)
    seen.keep(name, signature_of(file.stat()), "sound", file.stat())
    seen.save()
    return seen


def recall(note: Path, file: Path, *, trusted_seconds: float = float("inf")) -> str | None:
    seen = SeenFiles(note, trusted_seconds=trusted_seconds)
    return seen.outcome("file", signature_of(file.stat()))


def test_another_process_knows_what_was_found(file: Path, tmp_path: Path) -> None:
    """A file is read once, whoever asks."""
    assert recall(tmp_path / "note.json", file) is None
    remember(tmp_path / "note.json", file)
    assert recall(tmp_path / "note.json", file) == "sound"


@pytest.mark.promise("Nothing damaged is used")
def test_a_changed_file_is_looked_at_again(file: Path, tmp_path: Path) -> None:
    """Other bytes of the same length, with the old time put back, or another file in its place."""
    note, before = tmp_path / "note.json", file.stat()
    remember(note, file)
    flip_bit(file, 0)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert recall(note, file) is None
    remember(note, file)
    (tmp_path / "other").write_bytes(file.read_bytes())
    (tmp_path / "other").replace(file)
    assert recall(note, file) is None


def test_a_file_that_changed_just_now_is_not_remembered(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next change could come within the same tick of the clock."""
    monkeypatch.setattr(seen_files, "_SETTLED_NS", 10**12)
    remember(tmp_path / "note.json", file)
    assert not (tmp_path / "note.json").exists()


def test_what_was_found_long_ago_or_later_than_now_is_not_trusted(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that rots changes no time of its file: who asks for that reads it again."""
    note, now = tmp_path / "note.json", seen_files.time.time_ns
    remember(note, file)
    assert recall(note, file, trusted_seconds=DAY_SECONDS) == "sound"
    for days in (1.01, -1.0):
        monkeypatch.setattr(
            seen_files.time, "time_ns", lambda days=days: now() + int(days * DAY_SECONDS * 1e9)
        )
        assert recall(note, file, trusted_seconds=DAY_SECONDS) is None


def test_files_that_were_read_together_are_read_again_apart(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand files that were verified in one night are not all read in another one."""
    note, now = tmp_path / "note.json", seen_files.time.time_ns()
    seen = SeenFiles(note, trusted_seconds=DAY_SECONDS)
    for number in range(100):
        seen.keep(str(number), signature_of(file.stat()), "sound", file.stat())
    due = []
    for days in (0.49, 0.75, 1.01):
        monkeypatch.setattr(seen_files.time, "time_ns", lambda days=days: now + int(days * DAY_SECONDS * 1e9))
        due.append(len(list(seen.doubtful("damaged"))))
    assert due[0] == 0 < due[1] < due[2] == 100


def test_a_damaged_note_counts_as_none(file: Path, tmp_path: Path) -> None:
    """Then everything is read again, and nothing stops."""
    note = tmp_path / "note.json"
    remember(note, file)
    flip_bit(note)
    assert recall(note, file) is None


def test_two_processes_forget_nothing_of_each_other(file: Path, tmp_path: Path) -> None:
    """The one that saves later keeps what the other one found."""
    note = tmp_path / "note.json"
    first, second = SeenFiles(note), SeenFiles(note)
    for name, seen in (("file", first), ("other", second)):
        seen.keep(name, signature_of(file.stat()), "sound", file.stat())
        seen.save()
    assert recall(note, file) == "sound"


def test_where_nothing_can_be_written_the_look_goes_on(file: Path, tmp_path: Path) -> None:
    """A full disk costs the note, and not the answer."""
    (tmp_path / "folder").write_bytes(b"no folder")
    seen = remember(tmp_path / "folder" / "note.json", file)
    assert seen.outcome("file", signature_of(file.stat())) == "sound"
