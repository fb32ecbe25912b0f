"""One SQLite file that many processes share: opened, checked, and replaced where it is damaged or gone.

What lives here: connections, the seals of rows, replacing the file while processes have it open, and refusing
file systems on which SQLite's locks and its write-ahead log cannot be trusted. What does not: what the tables
mean (``tables.py``), the copies (``copies.py``).

SQLite's pages carry no digests, so a flipped bit in a cell is read as if it had been written. Every table
with a column ``seal`` therefore keeps a digest of each row, by triggers that call ``row_seal``.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import sqlalchemy as sa

from vlm_durable.files.file_systems import MOUNTS, NETWORK, mount_of
from vlm_durable.files.files import make_directory, publish_replacing, set_aside, sync_file, temporary_name
from vlm_durable.files.lock_files import LockFile
from vlm_durable.wording import counted

T = TypeVar("T")

BUSY_SECONDS = 10.0
"""Seconds that a transaction waits for another process's."""

_LOOK_SECONDS = 0.02
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
    """The file is gone, is no database, or holds other bytes than were written. The message says which."""


class SqliteFile:
    """A shared SQLite file. durable: every commit is on the disk when it returns.

    busy_seconds: how long a transaction waits for others; BUSY_SECONDS unless given.

    replace: called with the reason when the file is missing or damaged, while no process has a transaction
    under way; it puts a new file there with ``install``. check: called when a file is opened, after its pages
    were checked; it raises DatabaseDamagedError.
    """

    def __init__(
        self,
        path: Path,
        *,
        durable: bool,
        busy_seconds: float | None = None,
        replace: Callable[[str], None],
        check: Callable[[sqlite3.Connection], None] = lambda connection: None,
    ) -> None:
        self.path = path
        self._durable = durable
        self._busy_seconds = BUSY_SECONDS if busy_seconds is None else busy_seconds
        self._replace = replace
        self._check = check
        self._guard = threading.Lock()
        self._engine: sa.Engine | None = None
        self._identity: tuple[int, int] | None = None
        _opened.add(self)

    @property
    def is_there(self) -> bool:
        """Whether the file is there."""
        return self.path.exists()

    def transact(self, work: Callable[[sa.Connection], T], *, writing: bool) -> T:
        """Run ``work`` in one transaction; a writing one excludes all others. Not to be nested.

        ``work`` is run again where the file turns out to be damaged. Raises ControlStateError.
        """
        for _ in range(3):
            try:
                with self._lock(shared=True):
                    engine = self._current_engine()
                    try:
                        options = {"immediate": writing}
                        with engine.execution_options(**options).begin() as connection:
                            return work(connection)
                    except sa.exc.DBAPIError as error:
                        explained = self._explained(error.orig)
                        if explained is None:
                            raise
                        raise explained from error
            except DatabaseDamagedError as error:
                self.mend(str(error))
        raise ControlStateError(
            f"{self.path} was damaged again as soon as it was put back. Look at the disk's health"
            " (`dmesg`), or set VLM_ASSETS_STATE_URL to a database elsewhere."
        )

    def with_connection(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` on the driver's own connection, for SQLite's backup. Raises as ``transact``, or
        DatabaseDamagedError."""
        with self._lock(shared=True):
            pooled = self._current_engine().raw_connection()
            try:
                connection = pooled.driver_connection
                assert isinstance(connection, sqlite3.Connection)
                return work(connection)
            except sqlite3.Error as error:
                explained = self._explained(error)
                if explained is None:
                    raise
                raise explained from error
            finally:
                pooled.close()

    def mend(self, why: str) -> None:
        """Have the file replaced, unless another process has done so meanwhile. Raises ControlStateError."""
        with self._lock(shared=False):
            with self._guard:
                self._close()
            try:
                self._current_engine()
            except DatabaseDamagedError as error:
                why = str(error)
            else:
                return
            try:
                self._replace(why)
            except (OSError, sqlite3.Error) as error:
                raise ControlStateError(
                    f"{why} It could not be replaced ({error}). Make room on the disk of {self.path.parent},"
                    " or see that this user may write there; nothing was lost beyond that."
                ) from error

    def install(
        self, fill: Callable[[sqlite3.Connection], None], *, start: bytes | None, aside: Path
    ) -> None:
        """Put a new file in place with one rename; keep the old one in ``aside``. Only ``replace`` calls it.

        start: the bytes it begins with; None: an empty database. fill: makes its tables and its rows.
        """
        make_directory(self.path.parent)
        for leftover in self.path.parent.glob(f".{self.path.name}.*"):
            leftover.unlink(missing_ok=True)
        temporary = temporary_name(self.path)
        try:
            # For this account alone, as are then SQLite's files beside it: any reader of them could lock it.
            temporary.touch(mode=0o600)
            if start is not None:
                temporary.write_bytes(start)
            with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                prepare(connection)
                connection.execute("BEGIN")
                fill(connection)
                connection.execute("COMMIT")
            sync_file(temporary)
            # The file before its log: a kill in between leaves a missing file, never an old one that seems
            # whole.
            for name in (self.path, *self._beside()):
                if name.exists():
                    set_aside(name, aside)
            publish_replacing(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the file and its log. Only from ``replace``."""
        for name in (self.path, *self._beside()):
            name.unlink(missing_ok=True)

    def _beside(self) -> list[Path]:
        return [self.path.with_name(self.path.name + ending) for ending in ("-wal", "-shm")]

    def _current_engine(self) -> sa.Engine:
        """The engine of the current file, which is checked when it is first opened."""
        with self._guard:
            try:
                file_stat = self.path.stat()
            except FileNotFoundError:
                raise DatabaseDamagedError(f"{self.path} is missing.") from None
            identity = (file_stat.st_dev, file_stat.st_ino)
            if self._engine is not None and self._identity == identity:
                return self._engine
            self._close()
            try:
                connection = self._connect()
                try:
                    check_pages(connection, self.path)
                    self._check(connection)
                finally:
                    connection.close()
            except sqlite3.Error as error:
                raise self._explained(error) or DatabaseDamagedError(
                    f"{self.path} is damaged ({error})."
                ) from error
            self._engine = sa.create_engine(
                "sqlite://", creator=self._connect, poolclass=sa.pool.QueuePool, hide_parameters=True
            )
            sa.event.listen(self._engine, "begin", _begin)
            self._identity = identity
            return self._engine

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: a file that vanished is not created again, empty.
        connection = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode=rw",
            uri=True,
            timeout=self._busy_seconds,
            isolation_level=None,
            check_same_thread=False,
        )
        prepare(connection)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'OFF'}")
        return connection

    def _explained(self, error: BaseException | None) -> Exception | None:
        """This module's exception for an error of SQLite; None where the statement is at fault."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            return DatabaseDamagedError(f"{self.path} is damaged ({error}).")
        if code in _NOT_NOW:
            return ControlStateError(
                f"{self.path} cannot be used now ({error}). Make room on its disk, see that this user may"
                f" write there, and that no process that uses it is stopped; nothing was changed."
            )
        return None

    @contextmanager
    def _lock(self, *, shared: bool) -> Iterator[None]:
        """Hold the lock: shared for transactions, exclusive for replacing the file."""
        path = self.path.with_suffix(".lock")
        try:
            if not self.path.parent.is_dir():
                make_directory(self.path.parent)
            lock = LockFile(path)
        except OSError as error:
            raise ControlStateError(
                f"{path} cannot be opened ({error.strerror}). Give this user the right to write in"
                f" {self.path.parent}."
            ) from error
        try:
            deadline = time.monotonic() + self._busy_seconds
            while not lock.try_lock(shared=shared):
                if time.monotonic() >= deadline:
                    raise ControlStateError(
                        f"{self.path} is in use by a process that does not go on (`fuser {path}` names it)."
                        " End it; nothing was changed."
                    )
                time.sleep(_LOOK_SECONDS)
            yield
        finally:
            lock.close()

    def _close(self) -> None:
        engine, self._engine, self._identity = self._engine, None, None
        if engine is not None:
            engine.dispose()

    def forget_in_forked_child(self) -> None:
        """Forget the parent's connections: a forked child neither uses nor closes them."""
        self._guard = threading.Lock()
        engine, self._engine, self._identity = self._engine, None, None
        if engine is not None:
            engine.dispose(close=False)


_opened: weakref.WeakSet[SqliteFile] = weakref.WeakSet()


def _forget_in_forked_child() -> None:
    for file in tuple(_opened):
        file.forget_in_forked_child()


os.register_at_fork(after_in_child=_forget_in_forked_child)


def _begin(connection: sa.Connection) -> None:
    # A transaction that reads and then writes would fail where another process wrote in between.
    immediate = connection.get_execution_options().get("immediate")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def row_seal(*values: object) -> str:
    """The digest of one row's values, in their order."""
    return hashlib.blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def prepare(connection: sqlite3.Connection) -> None:
    """Teach a connection the seals: without them nothing can be written to a sealed table."""
    connection.create_function("row_seal", -1, row_seal, deterministic=True)


def create_tables(connection: sqlite3.Connection, metadata: sa.MetaData) -> None:
    """Create missing tables, and the triggers that seal rows, in the open transaction."""
    dialect = sa.create_engine("sqlite://").dialect
    for table in metadata.sorted_tables:
        connection.execute(str(sa.schema.CreateTable(table, if_not_exists=True).compile(dialect=dialect)))
        for index in table.indexes:
            create = sa.schema.CreateIndex(index, if_not_exists=True)
            connection.execute(str(create.compile(dialect=dialect)))
        names = _sealed_columns(table)
        if not names:
            continue
        sealed = ", ".join(f'NEW."{name}"' for name in names)
        own = ", ".join(f'"{name}"' for name in names)
        for event in ("INSERT", f"UPDATE OF {own}"):
            connection.execute(
                f'CREATE TRIGGER IF NOT EXISTS "{table.name}_{event[:6].lower()}"'  # noqa: S608
                f' AFTER {event} ON "{table.name}" BEGIN'
                f' UPDATE "{table.name}" SET seal = row_seal({sealed}) WHERE rowid = NEW.rowid; END'
            )


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Check the structure of all pages. Raises DatabaseDamagedError, sqlite3.Error."""
    verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        raise DatabaseDamagedError(f"{path} is damaged ({verdict}).")


def check_seals(connection: sqlite3.Connection, metadata: sa.MetaData, path: Path) -> None:
    """Compare every row with its seal. Raises DatabaseDamagedError, sqlite3.Error."""
    for table in metadata.sorted_tables:
        names = ", ".join(f'"{name}"' for name in _sealed_columns(table))
        if not names:
            continue
        query = f'SELECT count(*) FROM "{table.name}" WHERE seal IS NOT row_seal({names})'  # noqa: S608
        try:
            wrong = connection.execute(query).fetchone()[0]
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF in _NOT_NOW:
                raise
            raise DatabaseDamagedError(f"{path} is damaged ({table.name}: {error}).") from error
        if wrong:
            raise DatabaseDamagedError(
                f"{path} is damaged ({counted(wrong, 'rows')} of {table.name} are not what was written)."
            )


def _sealed_columns(table: sa.Table) -> list[str]:
    names = [column.name for column in table.columns]
    return [name for name in names if name != "seal"] if "seal" in names else []


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
