"""A backup of files: each content once, under its digest, and one list of the files and their contents.

The list is replaced after every content that it names was read back. So a killed backup leaves the backup
before it whole, and the next one does not copy the same contents again.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_durable.files.seen_files import is_settled, signature_of

FORMAT = 1

_LISTS = ("backup.json", "backup.copy.json")
_CONTENTS, _STAGING, _LOCK = "contents", ".staging", ".lock"
_MARKER = ".restoring"
_MARKER_LEFTOVERS = f".{_MARKER}.*{files.TEMPORARY_SUFFIX}"
"""What a kill leaves while the marker is written."""


class BackupError(Exception):
    """A backup cannot be made or restored. The message says why, and what to do."""


class ChangedError(Exception):
    """A file changed while it was copied."""


@dataclass(frozen=True)
class KeptFile:
    """A file of a backup. signature: size, times and inode of its source; "" where they may be too young."""

    size: int
    sha256: str
    signature: str


@dataclass(frozen=True)
class FileList:
    """The files of a backup, by the path in the home. about: a description for people."""

    about: Mapping[str, Any]
    files: Mapping[str, KeptFile]


def read_list(folder: Path) -> FileList | None:
    """The list of the last finished backup in a folder; None where there is none. Raises BackupError."""
    why: list[str] = []
    for name in _LISTS:
        try:
            content = read_sealed(folder / name, format_=FORMAT)
            kept = {path: KeptFile(*parts) for path, parts in content["files"].items()}
            return FileList(content["about"], kept)
        except FileNotFoundError:
            continue
        except (BrokenSealError, OSError, KeyError, TypeError) as error:
            why.append(f"{folder / name}: {error}")
    if why:
        raise BackupError(
            f"The list of what the backup in {folder} holds cannot be read ({'; '.join(why)}). Nothing was"
            " changed. Take another backup, or make one in another folder."
        )
    return None


@dataclass
class BackupWriter:
    """A backup that is being made. copied, copied_bytes: contents that earlier backups did not have.

    deep: contents of earlier backups are read again, and copied again if they are damaged.
    """

    folder: Path
    before: FileList | None
    deep: bool
    kept: dict[str, KeptFile] = field(default_factory=dict)
    copied: int = 0
    copied_bytes: int = 0
    _seen: dict[str, KeptFile] = field(default_factory=dict)
    _written: set[str] = field(default_factory=set)

    def copy(self, source: Path, name: str) -> KeptFile:
        """Copy a file, unless an earlier copy is still current. It is not in the backup until ``keep``.

        Raises ChangedError, FileNotFoundError, OSError.
        """
        signature = signature_of(source.stat())
        copied_before = self._seen.get(name) or (
            self.before.files.get(name) if self.before is not None else None
        )
        if copied_before is not None and copied_before.signature == signature and self._has(copied_before):
            return copied_before
        temporary, sha256 = files.copy_temporary(source, self.folder / name, self.folder / _STAGING)
        size = temporary.stat().st_size
        if sha256 in self._written:
            temporary.unlink()
        else:
            content = _content(self.folder, sha256)
            if not content.parent.is_dir():
                files.make_directory(content.parent)
            files.publish_replacing(temporary, content)
            self._written.add(sha256)
            self.copied, self.copied_bytes = self.copied + 1, self.copied_bytes + size
        if signature_of(after := source.stat()) != signature:
            raise ChangedError(f"{source} changed while it was copied")
        self._seen[name] = KeptFile(size, sha256, signature if is_settled(after) else "")
        return self._seen[name]

    def keep(self, copies: Mapping[str, KeptFile]) -> None:
        """Add these copies to the backup."""
        self.kept.update(copies)

    def drop(self, prefix: str) -> None:
        """Leave files whose names begin with ``prefix`` out of the backup."""
        self.kept = {name: kept for name, kept in self.kept.items() if not name.startswith(prefix)}

    def finish(self, about: Mapping[str, Any]) -> None:
        """Replace the list, in both copies; then remove contents that it does not name. Raises OSError."""
        content = {"about": dict(about), "files": {name: astuple(kept) for name, kept in self.kept.items()}}
        for name in _LISTS:
            write_sealed(self.folder / name, content, format_=FORMAT)
        named = {kept.sha256 for kept in self.kept.values()}
        for path in (self.folder / _CONTENTS).glob("*/*"):
            if path.name not in named:
                path.unlink()

    def _has(self, kept: KeptFile) -> bool:
        content = _content(self.folder, kept.sha256)
        try:
            is_there = content.stat().st_size == kept.size
            return is_there and (
                not self.deep or kept.sha256 in self._written or files.sha256_of(content) == kept.sha256
            )
        except OSError:
            return False


@contextlib.contextmanager
def open_backup(folder: Path, *, deep: bool = False) -> Iterator[BackupWriter]:
    """Begin a backup in a folder, which may hold earlier backups. Raises BackupError, OSError."""
    if not folder.is_dir():
        files.make_directory(folder)
        folder.chmod(0o700)
    with _alone(folder):
        before = read_list(folder)
        names = {path.name for path in folder.iterdir()}
        strange = names - {
            *_LISTS,
            _CONTENTS,
            _STAGING,
            _LOCK,
            "lost+found",
        }
        if strange and _CONTENTS not in names:
            raise BackupError(
                f"{folder} holds other files ({', '.join(sorted(strange)[:3])}). Nothing was changed. Name a"
                " folder of its own for the backup."
            )
        for name in (_CONTENTS, _STAGING):
            files.make_directory(folder / name)
        for leftover in (folder / _STAGING).iterdir():
            leftover.unlink()
        yield BackupWriter(folder, before, deep)


def restore(
    folder: Path,
    home: Path,
    *,
    last: Callable[[str], int],
    advance: Callable[[int, int], None] = lambda done, files: None,
) -> FileList:
    """Copy a backup's files into an empty folder, each compared with its digest as it is written.

    last: gives a file's rank; files of the highest rank come last. advance: called with the number of files
    restored so far and of all files. After a kill, calling it again finishes the work. Raises BackupError,
    OSError.
    """
    content = read_list(folder)
    if content is None:
        raise BackupError(f"{folder} holds no finished backup. Nothing was changed.")
    _refuse_used(home, folder)
    files.make_directory(home)
    for leftover in home.glob(_MARKER_LEFTOVERS):
        leftover.unlink()
    write_sealed(home / _MARKER, {"from": str(folder.absolute())})
    for number, name in enumerate(sorted(content.files, key=lambda name: (last(name), name))):
        advance(number, len(content.files))
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BackupError(f"{folder} names a file outside of the home: {name}. Take another backup.")
        _restore_file(folder, content.files[name], home / name)
    (home / _MARKER).unlink()
    files.sync_directory(home)
    return content


def _restore_file(folder: Path, kept: KeptFile, path: Path) -> None:
    if not path.parent.is_dir():
        files.make_directory(path.parent)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{files.TEMPORARY_SUFFIX}"):
        leftover.unlink()
    if path.exists() and files.sha256_of(path) == kept.sha256:
        return
    source = _content(folder, kept.sha256)
    try:
        temporary, sha256 = files.copy_temporary(source, path)
        if sha256 == kept.sha256:
            files.publish_replacing(temporary, path)
            return
        temporary.unlink()
        why = "holds other bytes than were backed up"
    except FileNotFoundError:
        why = "is not there"
    raise BackupError(
        f"{source}, the backup's copy of {path.name}, {why}. {path} was not restored, and the home is not"
        f" complete: no command works in it. If the home that was backed up is still there, run"
        f" {command('backup', folder, '--deep', '--home', 'ITS_HOME')}."
        " Then restore again, or restore another backup."
    )


def _refuse_used(home: Path, folder: Path) -> None:
    try:
        begun = read_sealed(home / _MARKER)["from"] == str(folder.absolute())
    except (OSError, BrokenSealError, KeyError):
        begun = False
    entries = sorted(home.iterdir()) if home.is_dir() else []
    # Empty folders may exist before the first file, such as a `.state` that is a link to another disk.
    used = [
        path.name
        for path in entries
        if path.name != "lost+found"
        and not path.match(_MARKER_LEFTOVERS)
        and (not path.is_dir() or any(path.iterdir()))
    ]
    if used and not begun:
        raise BackupError(
            f"{home} is not empty ({', '.join(used[:3])}). Nothing was changed. Restore into an empty folder:"
            f" {command('restore', folder, '--home', 'DIR')}."
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    lock = acquire_lock(folder / _LOCK, seconds=0.0)
    if lock is None:
        raise BackupError(f"Another process is making a backup in {folder}. Wait until it has ended.")
    try:
        yield
    finally:
        lock.close()


def _content(folder: Path, sha256: str) -> Path:
    return folder / _CONTENTS / sha256[:2] / sha256
