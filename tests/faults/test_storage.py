"""``make faults HOME_DIR=…``: what is said about a directory, and that each reason against it is found."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.__main__ import main
from faults.storage import examine
from vlm_durable.files import file_systems
from vlm_durable.files.file_systems import FileSystemVerdict, MountEntry, judge_mount, mount_of


def against(directory: Path) -> str:
    """The reasons against a directory, after a look of a second."""
    return " ".join(examine(directory, seconds=0.2).against)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that counts as one on a local disk, whatever the tests run on."""
    entry = MountEntry("/dev/disk", Path("/"), "ext4", frozenset({"rw"}))
    monkeypatch.setattr(file_systems, "mount_of", lambda directory: entry)
    return tmp_path


def test_a_disk_that_keeps_its_promises_is_trusted(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, what was tried, and what was not; nothing is left in the directory."""
    assert main(["--home-dir", str(disk), "--minutes", "0.02"]) == 0
    said = capsys.readouterr().out
    assert "kept every promise that was tried" in said
    assert "kills: nothing committed was lost" in said
    assert "Not tried: whether the drive itself" in said
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("nfs4", "rw", "network file system (nfs4"),
        ("fuse.sshfs", "rw", "network file system (fuse.sshfs"),
        ("tmpfs", "rw", "memory (tmpfs)"),
        ("ext4", "rw,nobarrier", "mounted with nobarrier"),
        ("xfs", "ro", "read-only"),
    ],
)
def test_the_kind_of_mount_counts(kind: str, options: str, said: str) -> None:
    """A network file system, memory, no barriers and read-only speak against a directory."""
    verdict = FileSystemVerdict(Path("home"))
    judge_mount(MountEntry("device", Path("/mnt"), kind, frozenset(options.split(","))), verdict)
    assert said in verdict.sentences()
    assert not verdict.trusted


def test_the_nearest_mount_is_the_one(tmp_path: Path) -> None:
    """The longest mount point above the directory, spaces included; of two at one place the later."""
    table = tmp_path / "mounts"
    home = tmp_path / "my disk" / "home"
    point = str(tmp_path / "my disk").replace(" ", "\\040")
    table.write_text(f"root / ext4 rw 0 0\nold {point} xfs rw 0 0\nnew {point} nfs4 rw,hard 0 0\n")
    assert mount_of(home, table) == MountEntry("new", tmp_path / "my disk", "nfs4", frozenset({"rw", "hard"}))


def _refuses(code: int) -> Callable[..., object]:
    def call(*arguments: object, **named: object) -> object:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("owner", "name", "broken", "said"),
    [
        (fcntl, "flock", lambda *arguments: None, "flock does not exclude"),
        (fcntl, "flock", _refuses(errno.ENOLCK), "Locks: No locks available"),
        (os, "link", _refuses(errno.EPERM), "no hard links"),
        (os, "fsync", _refuses(errno.EIO), "Syncs and reads back: Input/output error"),
        (os, "pread", lambda *arguments: b"other", "not what was written"),
        (os, "link", lambda one, two: Path(two).write_bytes(b""), "could overwrite"),
    ],
)
def test_storage_that_lies_is_not_trusted(
    disk: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: object, said: str
) -> None:
    """A lock that does not exclude, no hard links, fsync that fails, other bytes read back: each by name."""
    monkeypatch.setattr(owner, name, broken)
    assert said in against(disk)


def test_storage_on_which_nothing_was_killed_is_not_trusted(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills that never came say nothing of a disk."""
    monkeypatch.setattr("faults.kills.at_random", lambda chance, place, number: Counter(cases=1))
    assert "No kills took place" in against(disk)


def test_a_part_of_the_home_on_another_device_is_found(disk: Path, mounted) -> None:
    """Fault 9: EXDEV, said before the first property and not at the first quarantine."""
    other = mounted("tmpfs")
    (disk / "property_descriptions").mkdir()
    (disk / ".quarantine").symlink_to(other.path)
    assert "another device" in against(disk)


def test_a_real_read_only_mount_and_a_missing_directory(mounted, capsys) -> None:
    """Exit code 1 and a sentence, not a traceback."""
    mount = mounted("ext4")
    mount.remount(read_only=True)
    assert main(["--home-dir", str(mount.path)]) == 1
    assert "It cannot be written: Read-only file system" in capsys.readouterr().out
    assert main(["--home-dir", str(mount.path / "missing")]) == 1
    assert "create it first" in capsys.readouterr().out


def test_a_loop_mounted_disk_is_looked_up_in_the_mount_table(mounted) -> None:
    """The real table names the file system that the directory is on."""
    assert mount_of(mounted("xfs").path).kind == "xfs"
