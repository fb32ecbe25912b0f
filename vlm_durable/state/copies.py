"""The two newest verified copies of the control state, from which a damaged database is put back.

What lives here: making a copy with SQLite's backup, verifying it, keeping two. What does not: when a copy is
made or used (``database.py``).
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from vlm_durable.files.files import (
    make_directory,
    publish_replacing,
    set_aside,
    sha256_of,
    sync_file,
    temporary_name,
)
from vlm_durable.state.sqlite_file import DatabaseDamagedError, check_pages, check_seals, prepare

KEPT = 2

_NAME = re.compile(r"state\.(\d{15})\.([0-9a-f]{64})\.db")


@dataclass(frozen=True)
class Copy:
    """One copy. Its name holds its number of changes and the SHA-256 of its bytes."""

    path: Path
    changes: int
    sha256: str

    @property
    def made_at(self) -> float:
        """Unix seconds. Raises OSError."""
        return self.path.stat().st_mtime


class Copies:
    """The copies in one folder. sealed: the tables whose rows are verified."""

    def __init__(self, directory: Path, sealed: sa.MetaData) -> None:
        self.directory = directory
        self._sealed = sealed

    @property
    def were_made(self) -> bool:
        """Whether a copy was ever made: then a missing database is a loss, not a first start."""
        return self.directory.is_dir()

    def listed(self) -> list[Copy]:
        """All copies, the newest first, unverified. Raises OSError."""
        if not self.directory.is_dir():
            return []
        copies = [
            Copy(path, int(match[1]), match[2])
            for path in self.directory.iterdir()
            if (match := _NAME.fullmatch(path.name))
        ]
        return sorted(copies, key=lambda copy: copy.changes, reverse=True)

    def good(self, *, aside: Path) -> Iterator[Copy]:
        """The copies that verify, the newest first; others are moved to ``aside``. Raises OSError."""
        for copy in self.listed():
            if self.is_good(copy):
                yield copy
            elif copy.path.exists():
                set_aside(copy.path, aside)

    def is_good(self, copy: Copy) -> bool:
        """Whether a copy's bytes are those that were written. An unreadable copy is not good."""
        try:
            return sha256_of(copy.path) == copy.sha256
        except OSError:
            return False

    def make(self, source: sqlite3.Connection) -> Copy:
        """Copy the committed state, verify the copy, and keep the two newest. Durable when it returns.

        Raises DatabaseDamagedError where the source is not sound, OSError, sqlite3.Error.
        """
        make_directory(self.directory)
        self._remove_old_leftovers()
        temporary = temporary_name(self.directory / "state.db")
        try:
            temporary.touch(mode=0o600)
            with closing(sqlite3.connect(temporary, isolation_level=None)) as copied:
                prepare(copied)
                source.backup(copied)
                copied.execute("PRAGMA journal_mode=DELETE")
                check_pages(copied, temporary)
                check_seals(copied, self._sealed, temporary)
                changes = changes_of(copied)
            sync_file(temporary)
            sha256 = sha256_of(temporary)
            copy = Copy(self.directory / f"state.{changes:015d}.{sha256}.db", changes, sha256)
            publish_replacing(temporary, copy.path)
        finally:
            temporary.unlink(missing_ok=True)
        for old in self.listed()[KEPT:]:
            old.path.unlink(missing_ok=True)
        return copy

    def _remove_old_leftovers(self) -> None:
        """Remove a killed process's files. A young file may be a copy that another process is making."""
        for leftover in self.directory.glob(".state.db.*"):
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > 3600.0:
                    leftover.unlink()


def changes_of(connection: sqlite3.Connection) -> int:
    """How many write transactions a database has seen. Raises DatabaseDamagedError, sqlite3.Error."""
    try:
        row = connection.execute("SELECT value FROM meta WHERE name = 'changes'").fetchone()
        return int(row[0])
    except (sqlite3.OperationalError, TypeError, ValueError) as error:
        raise DatabaseDamagedError(
            f"The database does not say how often it was changed ({error})."
        ) from error
