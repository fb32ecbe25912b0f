"""The two newest verified copies of the control state, from which a damaged database is put back.

What lives here: making a copy, verifying it, keeping two. What does not: when a copy is made or used
(``database.py``).
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from vlm_durable.files.files import make_directory, publish_replacing, sha256_of, sync_file, temporary_name
from vlm_durable.state.sqlite_file import check_pages

KEPT = 2

_NAME = re.compile(r"state\.(\d{15})\.([0-9a-f]{64})\.db")


@dataclass(frozen=True)
class Copy:
    """One copy. Its name holds its number of changes and the SHA-256 of its bytes. made_at: unix seconds."""

    path: Path
    changes: int
    sha256: str
    made_at: float

    def is_whole(self) -> bool:
        """Whether its bytes are those that were written. An unreadable copy is not whole."""
        try:
            return sha256_of(self.path) == self.sha256
        except OSError:
            return False


class Copies:
    """The copies in one folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def were_made(self) -> bool:
        """Whether a copy was ever made: then a missing database is a loss, not a first start."""
        return self.directory.is_dir()

    def listed(self) -> list[Copy]:
        """All copies, the newest first, unverified. Raises OSError."""
        copies = []
        for path in self.directory.iterdir() if self.were_made else ():
            if match := _NAME.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process keeps newer ones
                    copies.append(Copy(path, int(match[1]), match[2], path.stat().st_mtime))
        return sorted(copies, key=lambda copy: copy.changes, reverse=True)

    def make(self, source: sqlite3.Connection) -> None:
        """Copy the committed state, verify the copy, and keep the two newest. Durable when it returns.

        Raises DatabaseDamagedError where the source is not sound, OSError, sqlite3.Error.
        """
        make_directory(self.directory)
        for leftover in self.directory.glob(".state.db.*"):
            # A young one may be a copy that another process is making.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > 3600.0:
                    leftover.unlink()
        temporary = temporary_name(self.directory / "state.db")
        try:
            temporary.touch(mode=0o600)
            with closing(sqlite3.connect(temporary, isolation_level=None)) as copied:
                # Page by page: VACUUM INTO would build the indexes anew, from a damaged cell too.
                source.backup(copied)
                copied.execute("PRAGMA journal_mode=DELETE")
                check_pages(copied, temporary)
                changes = changes_of(copied)
            sync_file(temporary)
            name = f"state.{changes:015d}.{sha256_of(temporary)}.db"
            publish_replacing(temporary, self.directory / name)
        finally:
            temporary.unlink(missing_ok=True)
        for old in self.listed()[KEPT:]:
            old.path.unlink(missing_ok=True)


def changes_of(connection: sqlite3.Connection) -> int:
    """How many write transactions a database has seen. Raises sqlite3.Error, ValueError."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'changes'").fetchone()
    return int(row[0]) if row else 0
