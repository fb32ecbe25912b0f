"""The errors of a journal. Each message says what happened, where, and what to do next."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from pathlib import Path

from vlm_durable.commands import command
from vlm_durable.wording import counted


def accept_loss_command(key: str) -> str:
    """The command by which a person gives up lost rows."""
    return command("repair", "--accept-loss", key)


class JournalError(Exception):
    """The journal cannot go on. No committed row was touched."""


class JournalLockedError(JournalError):
    """Another process is writing this journal."""


class FencedError(JournalError):
    """Another writer has taken this journal over: this writer commits nothing more."""


class RowsRefusedError(JournalError):
    """Submitted rows do not fit this journal: other columns or ids, nulls, or an id committed already."""


class SegmentUnreadableError(JournalError):
    """A segment does not verify: digest, page checksum, schema, rows or ids."""


class JournalLossError(JournalError):
    """Committed rows cannot be restored. The run stops here until a person decides."""

    def __init__(
        self,
        *,
        key: str,
        generation: str,
        directory: Path,
        promised_rows: int,
        restorable_rows: int,
        reasons: Sequence[str],
        copies: Sequence[Path],
    ) -> None:
        self.key = key
        self.promised_rows = promised_rows
        self.restorable_rows = restorable_rows
        self.reasons = tuple(reasons)
        self.copies = tuple(copies)
        self.command = accept_loss_command(key)
        places = "; ".join(str(path) for path in copies) or "none that the journal knows of"
        super().__init__(
            f"{key} (generation {generation}): committed rows cannot be restored from {directory}. "
            f"{counted(restorable_rows, 'rows')} can be restored,"
            f" {counted(promised_rows, 'were', 'was')} committed. "
            f"Missing: {first_few(reasons)}. Nothing was changed. Copies to look at first: {places}. "
            f"Put the missing files back and start again, or accept the loss with: {self.command}"
        )


class JournalStorageError(JournalError):
    """The storage failed. Nothing was acknowledged after that; committed rows are still there."""


class DirectoryNotWritableError(JournalStorageError):
    """The journal's directory cannot be created or written."""


class DiskFullError(JournalStorageError):
    """No space or quota left. Free some and start again; committed rows are safe."""


class CrossDeviceError(JournalStorageError):
    """Two directories that files move between lie on different devices, or links are not supported."""


_STORAGE_ERRORS: dict[int, tuple[type[JournalStorageError], str]] = {
    errno.ENOSPC: (DiskFullError, "the disk is full: free some space"),
    errno.EDQUOT: (DiskFullError, "the quota is used up: free some space"),
    errno.EACCES: (DirectoryNotWritableError, "not allowed: give this user write access"),
    errno.EPERM: (DirectoryNotWritableError, "not allowed: give this user write access and hard links"),
    errno.EROFS: (DirectoryNotWritableError, "mounted read-only: remount it for writing"),
    errno.ENOTDIR: (DirectoryNotWritableError, "a file stands where a directory is needed: move it away"),
    errno.EEXIST: (DirectoryNotWritableError, "a file stands where a directory is needed: move it away"),
    errno.EXDEV: (CrossDeviceError, "a rename or link would cross devices: keep both on one file system"),
    errno.EOPNOTSUPP: (CrossDeviceError, "this file system has no hard links: use a local one"),
}


def storage_error(error: OSError, *, doing: str, where: Path) -> JournalStorageError:
    """The named exception for an operating-system error met while ``doing`` something at ``where``."""
    kind, advice = _STORAGE_ERRORS.get(
        error.errno or 0, (JournalStorageError, "look at the disk (dmesg) before going on")
    )
    return kind(
        f"{doing} failed at {where}: {error}. Nothing of it counts as committed, all that was committed "
        f"before is safe. What to do: {advice}; then start again, it resumes by itself."
    )


def first_few(reasons: Sequence[str], limit: int = 3) -> str:
    """The first reasons, and how many more there are: a journal may have thousands of segments."""
    more = f"; and {len(reasons) - limit} more" if len(reasons) > limit else ""
    return "; ".join(reasons[:limit]) + more


def sample(ids: Iterable[str], limit: int = 5) -> str:
    """The first few ids, sorted, and how many more there are."""
    ordered = sorted(ids)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
