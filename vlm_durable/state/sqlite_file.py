"""One SQLite file that many processes share: opened, checked, and replaced where it is damaged or gone.

File systems on which SQLite's locks and its write-ahead log cannot be trusted are refused.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import sqlalchemy as sa

from vlm_durable.files.file_systems import MOUNTS, NETWORK, mount_of
from vlm_durable.files.files import make_directory, publish_replacing, set_aside, sync_file, temporary_name
from vlm_durable.files.layout import dangling_link
from vlm_durable.files.lock_files import acquire_lock

T = TypeVar("T")

BUSY_SECONDS = 10.0
"""Seconds that a transaction waits for another process's."""

_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_NOT_NOW = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
    }
)
"""Errors of the machine: the file may be sound."""


class ControlStateError(OSError):
    """The control state cannot be read or written now. The message says why and what to do."""


class DatabaseDamagedError(Exception):
    """The file is gone, is no database, or is not what was written. The message says which."""


class SqliteFile:
    """A shared SQLite file. Transactions share a lock: a process that holds it alone may replace the file.

    durable: every commit is on the disk when it returns. metadata: the tables that it has.
    check: called after SQLite's own check when a process uses the file first; raises DatabaseDamagedError.
    replace: called with the reason where the file is missing or damaged, holding the lock alone; puts a new
    file there with ``install``.
    """

    def __init__(
        self,
        path: Path,
        metadata: sa.MetaData,
        *,
        durable: bool,
        busy_seconds: float = BUSY_SECONDS,
        check: Callable[[sa.Connection], None] = lambda connection: None,
        replace: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self._metadata = metadata
        self._durable = durable
        self._busy_seconds = busy_seconds
        self._check = check
        self._replace = replace or (lambda why: self.install(metadata.create_all))
        self._checked: tuple[int, int, int] | None = None
        self._engine = self._engine_of(path)

    def transact(self, work: Callable[[sa.Connection], T], *, writing: bool) -> T:
        """Run ``work`` in one transaction; a writing one excludes all others. Not to be nested.

        ``work`` is run again where the file turns out to be damaged. Raises ControlStateError.
        """
        for _ in range(3):
            try:
                with self._locked(shared=True), self._explained():
                    self._check_once()
                    with self._engine.execution_options(immediate=writing).begin() as connection:
                        return work(connection)
            except DatabaseDamagedError:
                self._mend()
        raise ControlStateError(
            f"{self.path} was damaged again as soon as it was put back. Look at the disk's health"
            " (`dmesg`), or set VLM_ASSETS_STATE_URL to a database elsewhere."
        )

    def install(self, fill: Callable[[sa.Connection], None], *, start: Path | None = None) -> None:
        """Put a new file in place with one rename, the old one into ``damaged``. Only for ``replace``.

        start: the file that it begins as; None: an empty database. fill: makes its tables and its rows.
        """
        for leftover in self.path.parent.glob(f".{self.path.name}.*"):
            leftover.unlink(missing_ok=True)
        temporary = temporary_name(self.path)
        try:
            # For this account alone, as are then SQLite's files beside it: any reader of them could lock it.
            temporary.touch(mode=0o600)
            if start is not None:
                temporary.write_bytes(start.read_bytes())
            engine = self._engine_of(temporary)
            with engine.begin() as connection:
                fill(connection)
            with engine.connect() as connection:
                # Closing writes the log into the file too, and says nothing where that fails.
                busy = driver(connection).execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                if busy:
                    raise DatabaseDamagedError(f"{temporary} is in use, and nobody may use it yet.")
            engine.dispose()
            sync_file(temporary)
            # The file before its log: a kill in between leaves a missing file, never an old one that seems
            # whole.
            for ending in ("", "-wal", "-shm"):
                old = self.path.with_name(self.path.name + ending)
                if old.exists():
                    set_aside(old, self.path.parent / "damaged")
            publish_replacing(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def refuse_lost_disk(self) -> None:
        """Raise ControlStateError where the file's folder is a link to a disk that is not mounted."""
        if problem := dangling_link(self.path.parent):
            raise ControlStateError(problem)

    def _mend(self) -> None:
        """Have the file replaced, unless another process has done so meanwhile. Raises ControlStateError."""
        self._checked = None
        with self._locked(shared=False):
            try:
                with self._explained():
                    self._check_once()
            except DatabaseDamagedError as damage:
                try:
                    self._replace(str(damage))
                except (OSError, sa.exc.DBAPIError) as error:
                    why = getattr(error, "orig", error)
                    raise ControlStateError(
                        f"{damage} It could not be replaced ({why}). Make room on the disk of"
                        f" {self.path.parent}, or see that this user may write there; nothing was lost beyond"
                        " that."
                    ) from error

    def _check_once(self) -> None:
        """Check the file when this process uses it first. Raises DatabaseDamagedError."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            raise DatabaseDamagedError(f"{self.path} is missing.") from None
        identity = (os.getpid(), status.st_dev, status.st_ino)
        if identity == self._checked:
            return
        # A forked child neither uses nor closes its parent's connections.
        self._engine.dispose(close=self._checked is None or self._checked[0] == os.getpid())
        with self._explained(checking=True), self._engine.begin() as connection:
            check_pages(driver(connection), self.path)
            self._check(connection)
            for table in self._metadata.tables.values():
                connection.execute(sa.select(table).limit(0))
        self._checked = identity

    def _engine_of(self, path: Path) -> sa.Engine:
        def connect() -> sqlite3.Connection:
            # mode=rw: a file that vanished is not created again, empty.
            connection = sqlite3.connect(
                f"file:{quote(str(path))}?mode=rw",
                uri=True,
                timeout=self._busy_seconds,
                isolation_level=None,
                check_same_thread=False,
            )
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'OFF'}")
            return connection

        engine = sa.create_engine(
            "sqlite://", creator=connect, poolclass=sa.pool.QueuePool, hide_parameters=True
        )
        sa.event.listen(engine, "begin", _begin)
        return engine

    @contextmanager
    def _explained(self, *, checking: bool = False) -> Iterator[None]:
        """Turn SQLite's errors into this module's. A sound file raises none while it is checked."""
        try:
            yield
        except (sa.exc.DBAPIError, sqlite3.Error, ValueError) as raised:
            error = getattr(raised, "orig", raised)
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _NOT_NOW:
                raise ControlStateError(
                    f"{self.path} cannot be used now ({error}). Make room on its disk, see that this user"
                    " may write there, and that no process that uses it is stopped; nothing was changed."
                ) from raised
            if code in _DAMAGED or checking:
                raise DatabaseDamagedError(f"{self.path} is damaged ({error}).") from raised
            raise

    @contextmanager
    def _locked(self, *, shared: bool) -> Iterator[None]:
        """Hold the lock: shared for transactions, alone for replacing the file."""
        path = self.path.with_suffix(".lock")
        try:
            if not self.path.parent.is_dir():
                self.refuse_lost_disk()
                make_directory(self.path.parent)
            lock = acquire_lock(path, seconds=self._busy_seconds, shared=shared)
        except ControlStateError:
            raise
        except OSError as error:
            raise ControlStateError(
                f"{path} cannot be opened ({error.strerror}). Give this user the right to write in"
                f" {self.path.parent}."
            ) from error
        if lock is None:
            raise ControlStateError(
                f"{self.path} is in use by a process that does not go on (`fuser {path}` names it)."
                " End it; nothing was changed."
            )
        try:
            yield
        finally:
            lock.close()


def _begin(connection: sa.Connection) -> None:
    # A transaction that reads and then writes would fail where another process wrote in between.
    immediate = connection.get_execution_options().get("immediate")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def driver(connection: sa.Connection) -> sqlite3.Connection:
    """The driver's own connection."""
    driver_connection = connection.connection.driver_connection
    assert isinstance(driver_connection, sqlite3.Connection)
    return driver_connection


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Have SQLite compare all tables with their indexes. Raises DatabaseDamagedError, sqlite3.Error."""
    verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        raise DatabaseDamagedError(f"{path} is damaged ({verdict}).")


def refuse_network_file_system(directory: Path, mounts: Path = MOUNTS) -> None:
    """Raise ControlStateError where ``directory`` is on a network file system."""
    try:
        kind = mount_of(directory, mounts).kind
    except OSError:
        return  # Not Linux: the system does not say.
    if kind in NETWORK:
        raise ControlStateError(
            f"{directory} is on a network file system ({kind}), where SQLite loses what it was told. Set"
            f" VLM_ASSETS_HOME to a folder on a local disk, or make {directory} a link to one, or set"
            " VLM_ASSETS_STATE_URL to a Postgres database (postgresql+psycopg2://USER@HOST/DATABASE), which"
            " several machines can share. Nothing was changed."
        )
