"""The control state: the memory of the control plane, in one database.

SQLite in the home, or Postgres by URL. A damaged database is put back from its two newest verified copies.
Facts about the data (segments, manifests, high-water marks, published records) stay in files beside it;
leases and the liveness of processes stay locks of the system.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from vlm_durable.commands import command
from vlm_durable.files.files import (
    make_directory,
    publish_replacing,
    set_aside,
    sha256_of,
    sync_file,
    temporary_name,
)
from vlm_durable.state import tables
from vlm_durable.state.sqlite_file import (
    ControlStateError,
    DatabaseDamagedError,
    SqliteFile,
    check_pages,
    driver,
    refuse_network_file_system,
)
from vlm_durable.wording import moment

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

    def make(self, source: sqlite3.Connection, at: float) -> None:
        """Copy the committed state, verify the copy, and keep the two newest. Durable when it returns.

        at: unix seconds by the clock that says when the next copy is due; a rehearsal simulates it.
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
            os.utime(temporary, (at, at))
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


T = TypeVar("T")

COPY_SECONDS = 3600.0
"""A change that is not copied at once is copied within this time."""

NAME = "state.db"
LIVENESS_NAME = "liveness.db"

_BEAT_SECONDS = 2.0
"""A heartbeat is skipped if it cannot be written within this time: the commit thread waits for it."""

_CONNECT_SECONDS = 5
_STATEMENT_MILLISECONDS = 10_000
_ADVISORY_LOCK = 0x766C6D  # "vlm": any number that no other program of this Postgres uses

_BEGIN_ANEW = f"End all processes, and move {NAME}* and copies out of that folder."
"""How a home begins with an empty control state."""

_COUNT_CHANGE = "UPDATE meta SET value = value + 1 WHERE name = 'changes'"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateRestoration:
    """The database was put back. at, copy_at: unix seconds; copy_at None: no copy was good."""

    at: float
    why: str
    copy_at: float | None

    def sentence(self) -> str:
        """Say what happened and what may be missing, for people."""
        if self.copy_at is None:
            return (
                f"{self.why} No copy was good, so a new database was begun, and everything is paused. Cancels"
                " are read again from Dagster's runs; devices that were left out are used again. Check both,"
                f" then run {command('devices', 'resume')}. No property is lost."
            )
        copied = moment(self.copy_at, timespec="seconds")
        return (
            f"{self.why} It was restored from the copy of {copied}. Attempts and alerts noted"
            " after that may be missing. Every pause, cancel and device left out is copied at once, so"
            " they are in it. No property is lost."
        )


def open_state(directory: Path, url: str | None = None) -> ControlState:
    """The control state of one home; the same object for the same home. Nothing is created before its use.

    directory: HOME/.state. url: of a database elsewhere (``postgresql+psycopg2://…``, one database a home);
    None: SQLite in ``directory``. Raises ControlStateError where that is a network file system.
    """
    return _opened(directory, url)


@cache
def _opened(directory: Path, url: str | None) -> ControlState:
    return ControlState(directory, url)


class ControlState:
    """The database of one home, for any number of processes and threads; safe to use in a forked child.

    Every method raises ControlStateError where the database cannot be used now.
    """

    def __init__(
        self, directory: Path, url: str | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.directory = directory
        self.is_shared = url is not None
        """Whether other machines may use it too."""
        self._clock = clock
        self._database: _SqliteDatabase | _PostgresDatabase = (
            _SqliteDatabase(directory, clock) if url is None else _PostgresDatabase(url)
        )

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction that only reads. Without a database, all tables are empty."""
        return self._database.read(work)

    def write(self, work: Callable[[sa.Connection], T], *, copy: bool = False) -> T:
        """Run ``work`` in a transaction that excludes all other writers; durable when it returns.

        copy: make a verified copy too, for a pause, a cancel or a device left out. ``work`` may be run twice.
        Transactions must not be nested.
        """
        return self._database.write(work, copy=copy)

    def beat(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` on the tables of ``tables.liveness``, without fsync: a power cut may lose it."""
        return self._database.beat(work)

    def read_beats(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction that only reads the tables of ``tables.liveness``."""
        return self._database.read_beats(work)

    def copy_if_due(self) -> None:
        """Make a verified copy where the newest is an hour old. A failure is logged: the next call tries."""
        self._database.copy_if_due()

    def restorations(self) -> list[StateRestoration]:
        """The restorations of the database, oldest first."""
        table = tables.restorations

        def read(connection: sa.Connection) -> list[StateRestoration]:
            rows = connection.execute(
                sa.select(table.c.at, table.c.why, table.c.copy_at).order_by(table.c.at)
            )
            return [StateRestoration(*row) for row in rows]

        return self.read(read)


class _SqliteDatabase:
    """Two files in ``.state``: one that is durable, with copies, and one for heartbeats."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        refuse_network_file_system(directory)
        self._clock = clock
        self._copies = Copies(directory / "copies")
        self._file = SqliteFile(
            directory / NAME, tables.metadata, durable=True, check=self._check, replace=self._put_back
        )
        # Only heartbeats: where this file is damaged, or another version's, an empty one is begun.
        self._liveness = SqliteFile(
            directory / LIVENESS_NAME, tables.liveness, durable=False, busy_seconds=_BEAT_SECONDS
        )

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        if not self._file.path.exists() and not self._copies.were_made:
            self._file.refuse_lost_disk()
            return _read_empty(work)
        return self._file.transact(work, writing=False)

    def write(self, work: Callable[[sa.Connection], T], *, copy: bool) -> T:
        def counted(connection: sa.Connection) -> T:
            if copy:
                # Damage that is only seen after the change, by the copy, would cost the change.
                check_pages(driver(connection), self._file.path)
            result = work(connection)
            # The number shows when a database has lost changes that a copy has.
            connection.exec_driver_sql(_COUNT_CHANGE)
            return result

        result = self._file.transact(counted, writing=True)
        if copy:
            self._copy()
        else:
            self.copy_if_due()
        return result

    def beat(self, work: Callable[[sa.Connection], T]) -> T:
        return self._liveness.transact(work, writing=True)

    def read_beats(self, work: Callable[[sa.Connection], T]) -> T:
        if not self._liveness.path.exists():
            return _read_empty(work)
        return self._liveness.transact(work, writing=False)

    def copy_if_due(self) -> None:
        self._copy(only_if_due=True)

    def _copy(self, *, only_if_due: bool = False) -> None:
        try:
            if only_if_due and not self._is_due():
                return
            at = self._clock()
            self._file.transact(lambda connection: self._copies.make(driver(connection), at), writing=False)
        except (OSError, sqlite3.Error, sa.exc.DBAPIError) as error:
            _log.error(
                "The control state could not be copied to %s (%s). What was changed is kept in the database"
                " itself; the copy is tried again. Make room on that disk.",
                self._copies.directory,
                error,
            )

    def _is_due(self) -> bool:
        copied_at = max((copy.made_at for copy in self._copies.listed()), default=0.0)
        return abs(self._clock() - copied_at) >= COPY_SECONDS and self._file.path.exists()

    def _check(self, connection: sa.Connection) -> None:
        """Check the schema's version, and that no copy has more changes."""
        path = self._file.path
        if not _has_schema(connection, str(path), _BEGIN_ANEW):
            raise DatabaseDamagedError(f"{path} does not name the version of its schema.")
        changes = changes_of(driver(connection))
        for copy in self._copies.listed():
            if copy.changes > changes and copy.is_whole():
                raise DatabaseDamagedError(
                    f"{path} has lost its last changes: it has {changes} of them, a copy has {copy.changes}."
                )

    def _put_back(self, why: str) -> None:
        """Replace the database by the newest whole copy; begin a new one where there is none."""
        first = not self._copies.were_made and not self._file.path.exists()
        listed = self._copies.listed()
        copy = next((copy for copy in listed if copy.is_whole()), None)
        # A newer copy that is damaged may have held a pause, a cancel or a device left out.
        doubtful = copy is None or copy.changes < listed[0].changes
        if copy is not None and doubtful:
            why = f"{why} Its newest copy was damaged too, so everything is paused: check what was cancelled."
        restoration = StateRestoration(self._clock(), why, copy.made_at if copy is not None else None)

        def fill(connection: sa.Connection) -> None:
            _create_tables(connection, str(self._file.path), _BEGIN_ANEW)
            if copy is None:
                connection.execute(tables.meta.insert().values(name="changes", value="0"))
            if first:
                return
            connection.execute(tables.restorations.insert().values(asdict(restoration)))
            connection.exec_driver_sql(_COUNT_CHANGE)
            # All of Dagster's runs are read again for cancels.
            connection.execute(tables.meta.delete().where(tables.meta.c.name == tables.CANCELS_LOOKED_UNTIL))
            if doubtful:
                # Unreadable is never empty: what a person stopped must not start by itself.
                pause = tables.pause.insert().prefix_with("OR IGNORE")
                reason = "the control state was damaged, and its newest copy too"
                connection.execute(pause.values(id=1, since=restoration.at, reason=reason))

        self._file.install(fill, start=copy.path if copy is not None else None)
        # Afterwards: where the installation fails, the next one must find the damaged copies too.
        for damaged in listed[: listed.index(copy) if copy is not None else None]:
            set_aside(damaged.path, self._file.path.parent / "damaged")
        if not first:
            _log.error("%s", restoration.sentence())


class _PostgresDatabase:
    """A Postgres database for one home. Durability, checksums and backups are the server's."""

    def __init__(self, url: str) -> None:
        try:
            self._url = sa.make_url(url)
        except sa.exc.ArgumentError:
            raise ControlStateError(
                "VLM_ASSETS_STATE_URL is no address of a database: it is of the form"
                " postgresql+psycopg2://USER:PASSWORD@HOST/DATABASE"
            ) from None
        if self._url.get_backend_name() != "postgresql":
            raise ControlStateError(
                f"VLM_ASSETS_STATE_URL is for Postgres (postgresql+psycopg2://…), not for"
                f" {self._url.get_backend_name()!r}. Unset it for SQLite in the home."
            )
        self._engine: sa.Engine | None = None
        self._pid = os.getpid()

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        return self._transact(work)

    def write(self, work: Callable[[sa.Connection], T], *, copy: bool) -> T:
        def alone(connection: sa.Connection) -> T:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
            return work(connection)

        return self._transact(alone)

    def beat(self, work: Callable[[sa.Connection], T]) -> T:
        def unsynced(connection: sa.Connection) -> T:
            connection.execute(sa.text("SET LOCAL synchronous_commit = off"))
            return work(connection)

        return self._transact(unsynced)

    def read_beats(self, work: Callable[[sa.Connection], T]) -> T:
        return self._transact(work)

    def copy_if_due(self) -> None:
        """Nothing to do: Postgres is backed up by its own means."""

    def _transact(self, work: Callable[[sa.Connection], T]) -> T:
        try:
            with self._ready().begin() as connection:
                return work(connection)
        except (sa.exc.ProgrammingError, sa.exc.DataError, sa.exc.IntegrityError):
            raise  # A fault of the statement, not of the server.
        except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
            why = str(getattr(error, "orig", error)).strip()
            raise ControlStateError(
                f"The database of VLM_ASSETS_STATE_URL ({self._url.render_as_string()}) does not answer:"
                f" {why}. Nothing was changed; it is tried again at the next look."
            ) from error

    def _ready(self) -> sa.Engine:
        if self._pid != os.getpid() and self._engine is not None:
            # A forked child neither uses nor closes its parent's connections.
            self._engine.dispose(close=False)
            self._engine = None
        if self._engine is None:
            engine = sa.create_engine(
                self._url,
                pool_pre_ping=True,
                hide_parameters=True,
                connect_args={
                    "connect_timeout": _CONNECT_SECONDS,
                    "tcp_user_timeout": _STATEMENT_MILLISECONDS,
                    "options": f"-c statement_timeout={_STATEMENT_MILLISECONDS}",
                },
            )
            with engine.begin() as connection:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
                tables.liveness.create_all(connection)
                place = "The database of VLM_ASSETS_STATE_URL"
                _create_tables(connection, place, "Set it to an empty database.")
            self._engine, self._pid = engine, os.getpid()
        return self._engine


_reading_empty = threading.RLock()


def _read_empty(work: Callable[[sa.Connection], T]) -> T:
    with _reading_empty, _empty().connect() as connection:
        return work(connection)


@cache
def _empty() -> sa.Engine:
    """A database in memory with empty tables, made once: 15 ms, and a run reads after each batch."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    tables.metadata.create_all(engine)
    tables.liveness.create_all(engine)
    return engine


def _create_tables(connection: sa.Connection, place: str, begin_anew: str) -> None:
    """Create missing tables. Raises ControlStateError as ``_has_schema`` does."""
    tables.metadata.create_all(connection)
    if not _has_schema(connection, place, begin_anew):
        connection.execute(tables.meta.insert().values(name="version", value=str(tables.VERSION)))


def _has_schema(connection: sa.Connection, place: str, begin_anew: str) -> bool:
    """Whether a database names the version of its schema. Raises ControlStateError where it is another one.

    begin_anew: how a person begins with an empty database.
    """
    version = connection.scalar(sa.select(tables.meta.c.value).where(tables.meta.c.name == "version"))
    if version is not None and int(version) > tables.VERSION:
        raise ControlStateError(
            f"{place} was written by a newer version of this program (schema {version}; this one reads"
            f" {tables.VERSION}). Install the version that wrote it; nothing was changed."
        )
    if version is not None and int(version) < tables.VERSION:
        raise ControlStateError(
            f"{place} has schema {version}, and this version of the program reads {tables.VERSION} alone."
            " Nothing was changed. Go on with the version that wrote it, or begin anew: pauses, cancels,"
            f" devices left out and rows in doubt are then forgotten, and no property is. {begin_anew}"
        )
    return version is not None
