"""A real Postgres, set up with the files of ``deploy/postgres``: for the tests and the cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from faults.s3_server import free_ports

DEPLOY = Path(__file__).resolve().parent.parent / "deploy" / "postgres"


def programs() -> Path | None:
    """The folder of Postgres' programs; None where it is not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    pg_ctl = shutil.which("pg_ctl")
    return folders[-1] if folders else Path(pg_ctl).parent if pg_ctl else None


class PostgresServer:
    """A server that ends with the context. Started again it has the same port and rows.

    address: where it listens; who has an address near it may ask, with the password.
    """

    def __init__(self, *, address: str = "127.0.0.1", password: str = "a-password") -> None:
        self.address = address
        self.password = password
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        (self._port,) = free_ports(1)

    @property
    def url(self) -> str:
        """The address of its empty database, with user and password."""
        return f"postgresql+psycopg2://vlm_assets:{self.password}@{self.address}:{self._port}/vlm_assets"

    def __enter__(self) -> Self:
        self._folder.chmod(0o755)
        if os.geteuid() == 0 and not _is_mapped():
            shutil.chown(self._folder, "postgres")
        self._run("initdb", "-D", self._data, "-A", "trust", "-U", "postgres", "--no-sync")
        hosts = (DEPLOY / "pg_hba.conf").read_text().replace("10.0.0.0/24", f"{self.address}/24")
        (self._data / "pg_hba.conf").write_text(f"local all postgres trust\n{hosts}")
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(
                f"\n{(DEPLOY / 'postgresql.conf').read_text()}\nfsync = off\nport = {self._port}\n"
                f"listen_addresses = '{self.address}'\nunix_socket_directories = '{self._folder}'\n"
            )
        self.start()
        self._say((DEPLOY / "databases.sql").read_text())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._run("pg_ctl", "-D", self._data, "-w", "-l", self._folder / "log", "start")

    def stop(self) -> None:
        """End it as a power cut does, but for what was written."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "stop")

    def empty(self) -> None:
        """Make its database anew; whoever is connected to it is cut off."""
        self._say("DROP DATABASE vlm_assets WITH (FORCE); CREATE DATABASE vlm_assets OWNER vlm_assets;")

    def tables_with(self, texts: Sequence[str]) -> list[str]:
        """Its tables with a row that has one of these texts anywhere in it."""
        engine = sa.create_engine(self.url)
        try:
            with engine.connect() as connection:

                def count(table: str, text: str) -> int:
                    row: sa.ColumnClause[str] = sa.column("row")
                    query = sa.select(sa.func.count()).select_from(sa.table(table).alias("row"))
                    counted_rows = connection.execute(
                        query.where(sa.func.strpos(sa.cast(row, sa.Text), text) > 0)
                    )
                    return int(counted_rows.scalar_one())

                tables = sa.inspect(connection).get_table_names()
                return [table for table in tables if any(count(table, text) for text in texts)]
        finally:
            engine.dispose()

    def _say(self, statements: str) -> None:
        as_postgres = ("-h", self._folder, "-p", str(self._port), "-U", "postgres", "-v", "ON_ERROR_STOP=1")
        self._run("psql", "-q", "-X", *as_postgres, "postgres", stdin=statements)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _run(self, program: str, *arguments: str | Path, stdin: str = "") -> None:
        binaries = programs()
        assert binaries is not None, "postgresql is not installed"
        subprocess.run(
            [*_not_as_root(), binaries / program, *arguments],
            check=True,
            input=stdin,
            text=True,
            stdout=subprocess.DEVNULL,
            cwd=self._folder,
            env=os.environ | {"DATABASE_PASSWORD": self.password},
        )


def _not_as_root() -> Sequence[str]:
    """What goes before a command, for Postgres refuses to run as root."""
    if os.geteuid() != 0:
        return ()
    return ("unshare", "--user", "--map-user=1000") if _is_mapped() else ("runuser", "-u", "postgres", "--")


def _is_mapped() -> bool:
    """Whether this root is another user outside of its namespace."""
    return not re.match(r"\s*0\s+0\s", Path("/proc/self/uid_map").read_text())
