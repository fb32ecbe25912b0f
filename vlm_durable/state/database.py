"""The control state: the memory of the control plane, in one database.

What lives here: opening it (SQLite in the home, Postgres by URL), transactions, heartbeats, copies, and
restoring a damaged database. What does not: the tables (``tables.py``), and the decisions that follow from
their rows. Facts about the data (segments, manifests, high-water marks, published records) stay in files
beside the data; leases and the liveness of processes stay operating-system locks.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from vlm_durable.commands import command
from vlm_durable.state import tables
from vlm_durable.state.copies import Copies, changes_of
from vlm_durable.state.sqlite_file import (
    ControlStateError,
    DatabaseDamagedError,
    SqliteFile,
    check_seals,
    create_tables,
    refuse_network_file_system,
)

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
        return (
            f"{self.why} It was restored from the copy of {_when(self.copy_at)}. Attempts and alerts noted"
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
        self._store: _SqliteStore | _PostgresStore = (
            _SqliteStore(directory, clock) if url is None else _PostgresStore(url)
        )

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction that only reads. Without a database, all tables are empty."""
        return self._store.read(work)

    def write(self, work: Callable[[sa.Connection], T], *, copy: bool = False) -> T:
        """Run ``work`` in a transaction that excludes all other writers; durable when it returns.

        copy: make a verified copy too, for a pause, a cancel or a device left out. ``work`` may be run twice.
        Transactions must not be nested.
        """
        return self._store.write(work, copy=copy)

    def beat(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` on the tables of ``tables.liveness``, without fsync: a power cut may lose it."""
        return self._store.beat(work)

    def read_beats(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction that only reads the tables of ``tables.liveness``."""
        return self._store.read_beats(work)

    def copy_if_due(self) -> None:
        """Make a verified copy where the newest is an hour old. A failure is logged: the next call tries."""
        self._store.copy_if_due()

    def restorations(self) -> list[StateRestoration]:
        """The restorations of the database, oldest first."""
        table = tables.restorations

        def read(connection: sa.Connection) -> list[StateRestoration]:
            rows = connection.execute(
                sa.select(table.c.at, table.c.why, table.c.copy_at).order_by(table.c.at)
            )
            return [StateRestoration(*row) for row in rows]

        return self.read(read)


class _SqliteStore:
    """Two files in ``.state``: one that is durable, with copies, and one for heartbeats."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        refuse_network_file_system(directory)
        self._clock = clock
        self._aside = directory / "damaged"
        self._copies = Copies(directory / "copies", tables.metadata)
        self._copied_at = 0.0
        self._file = SqliteFile(directory / NAME, durable=True, replace=self._put_back, check=self._check)
        self._liveness = SqliteFile(
            directory / LIVENESS_NAME,
            durable=False,
            busy_seconds=_BEAT_SECONDS,
            replace=self._new_liveness,
            check=self._check_liveness,
        )

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        if not self._file.is_there and not self._copies.were_made:
            return _read_empty(work, tables.metadata)
        return self._file.transact(work, writing=False)

    def write(self, work: Callable[[sa.Connection], T], *, copy: bool) -> T:
        result = self._file.transact(lambda connection: _counted(connection, work), writing=True)
        if copy:
            self._copy()
        else:
            self.copy_if_due()
        return result

    def beat(self, work: Callable[[sa.Connection], T]) -> T:
        return self._liveness.transact(work, writing=True)

    def read_beats(self, work: Callable[[sa.Connection], T]) -> T:
        if not self._liveness.is_there:
            return _read_empty(work, tables.liveness)
        return self._liveness.transact(work, writing=False)

    def copy_if_due(self) -> None:
        if self._is_copied() or not self._file.is_there:
            return
        copies = self._copies.listed()
        # Another process may have made a copy since this one last checked.
        self._copied_at = copies[0].made_at if copies else 0.0
        if not self._is_copied():
            self._copy()

    def _is_copied(self) -> bool:
        return abs(self._clock() - self._copied_at) < COPY_SECONDS

    def _copy(self) -> None:
        try:
            self._file.with_connection(self._copies.make)
            self._copied_at = self._clock()
        except DatabaseDamagedError as error:
            self._file.mend(str(error))
        except (OSError, sqlite3.Error) as error:
            self._copied_at = 0.0
            _log.error(
                "The control state could not be copied to %s (%s). What was changed is kept in the database"
                " itself; the copy is tried again. Make room on that disk.",
                self._copies.directory,
                error,
            )

    def _check(self, connection: sqlite3.Connection) -> None:
        """Check the schema's version, every sealed row, and that no copy has more changes."""
        path = self._file.path
        changes = changes_of(connection)
        if _sqlite_version(connection, path) < tables.VERSION:
            connection.execute("BEGIN IMMEDIATE")
            # Another process may have updated it while this one waited.
            if _sqlite_version(connection, path) < tables.VERSION:
                create_tables(connection, tables.metadata)
                for statement in tables.BRING_UP_TO_DATE:
                    connection.execute(statement)
                connection.execute("UPDATE meta SET value = ? WHERE name = 'version'", (str(tables.VERSION),))
            connection.execute("COMMIT")
        check_seals(connection, tables.metadata, path)
        for copy in self._copies.listed():
            if copy.changes > changes and self._copies.is_good(copy):
                raise DatabaseDamagedError(
                    f"{path} has lost its last changes: it has {changes} of them, a copy has {copy.changes}."
                )

    def _check_liveness(self, connection: sqlite3.Connection) -> None:
        """Raise where tables are missing: another version's file is made anew, it holds only heartbeats."""
        table_names = {
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        if missing := sorted(set(tables.liveness.tables) - table_names):
            raise DatabaseDamagedError(f"{self._liveness.path} lacks the tables {', '.join(missing)}.")

    def _put_back(self, why: str) -> None:
        """Replace the database by the newest good copy; begin a new one where there is no good copy."""
        first = not self._copies.were_made and not self._file.is_there
        listed = self._copies.listed()
        copy = next(self._copies.good(aside=self._aside), None)
        # A newer copy that is damaged may have held a pause, a cancel or a device left out.
        doubtful = copy is None or copy.changes < listed[0].changes
        now = self._clock()
        if copy is not None and doubtful:
            why = f"{why} Its newest copy was damaged too, so everything is paused: check what was cancelled."
        restoration = StateRestoration(now, why, copy.made_at if copy is not None else None)

        def fill(connection: sqlite3.Connection) -> None:
            if copy is None:
                create_tables(connection, tables.metadata)
                connection.execute(
                    "INSERT INTO meta (name, value) VALUES ('version', ?)", (str(tables.VERSION),)
                )
                connection.execute("INSERT INTO meta (name, value) VALUES ('changes', '0')")
            if first:
                return
            connection.execute(
                "INSERT INTO restorations (at, why, copy_at) VALUES (?, ?, ?)",
                (restoration.at, restoration.why, restoration.copy_at),
            )
            connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'changes'")
            # All of Dagster's runs are read again for cancels.
            connection.execute("DELETE FROM meta WHERE name = ?", (tables.CANCELS_LOOKED_UNTIL,))
            if doubtful:
                # Unreadable is never empty: what a person stopped must not start by itself.
                connection.execute(
                    "INSERT OR IGNORE INTO pause (id, since, reason) VALUES (1, ?, ?)",
                    (now, "the control state was damaged, and its newest copy too"),
                )

        start = copy.path.read_bytes() if copy is not None else None
        self._file.install(fill, start=start, aside=self._aside)
        if not first:
            _log.error("%s", restoration.sentence())
        self._copied_at = 0.0

    def _new_liveness(self, why: str) -> None:
        self._liveness.remove()
        self._liveness.install(
            lambda connection: create_tables(connection, tables.liveness), start=None, aside=self._aside
        )


class _PostgresStore:
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
        _postgres.add(self)

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
                tables.metadata.create_all(connection)
                tables.liveness.create_all(connection)
                self._check_version(connection)
            self._engine = engine
        return self._engine

    def _check_version(self, connection: sa.Connection) -> None:
        query = sa.select(tables.meta.c.value).where(tables.meta.c.name == "version")
        version = connection.execute(query).scalar()
        if version is None:
            connection.execute(tables.meta.insert().values(name="version", value=str(tables.VERSION)))
            return
        if _checked_version(version, "The database of VLM_ASSETS_STATE_URL") < tables.VERSION:
            for statement in tables.BRING_UP_TO_DATE:
                connection.execute(sa.text(statement))
            update = tables.meta.update().where(tables.meta.c.name == "version")
            connection.execute(update.values(value=str(tables.VERSION)))

    def forget_in_forked_child(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=False)


_postgres: weakref.WeakSet[_PostgresStore] = weakref.WeakSet()


def _forget_in_forked_child() -> None:
    for store in tuple(_postgres):
        store.forget_in_forked_child()


os.register_at_fork(after_in_child=_forget_in_forked_child)


def _counted(connection: sa.Connection, work: Callable[[sa.Connection], T]) -> T:
    """Run ``work`` and count the change: the count shows when a database has lost changes that a copy has."""
    result = work(connection)
    connection.exec_driver_sql("UPDATE meta SET value = value + 1 WHERE name = 'changes'")
    return result


_reading_nothing = threading.RLock()


def _read_empty(work: Callable[[sa.Connection], T], metadata: sa.MetaData) -> T:
    with _reading_nothing, _empty(metadata).connect() as connection:
        return work(connection)


@cache
def _empty(metadata: sa.MetaData) -> sa.Engine:
    """A database in memory with empty tables, made once: 15 ms, and a run reads after each batch."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    metadata.create_all(engine)
    return engine


def _sqlite_version(connection: sqlite3.Connection, path: Path) -> int:
    version = connection.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()[0]
    return _checked_version(version, str(path))


def _checked_version(version: str, place: str) -> int:
    """The version of a schema. Raises ControlStateError where this program does not know that version."""
    number = int(version)
    if not tables.VERSION - 1 <= number <= tables.VERSION:
        other = "a newer version" if number > tables.VERSION else "too old a version"
        raise ControlStateError(
            f"{place} was written by {other} of this program (schema {number}; this one reads"
            f" {tables.VERSION - 1} and {tables.VERSION}). Install the version that wrote it, or one in"
            " between; nothing was changed."
        )
    return number


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).astimezone().isoformat(" ", "seconds")
