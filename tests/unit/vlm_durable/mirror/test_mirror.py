"""A home without a store: it publishes and commits as ever, and nobody asks whether there is a store."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.http_stub import Request, serving
from tests.support.journals import open_journal, plain_rows
from vlm_durable.files.layout import Home
from vlm_durable.mirror.bucket import NoObjectError, S3Folder, StoreAwayError, client
from vlm_durable.mirror.mirror import NO_MIRROR
from vlm_durable.mirror.stored_journal import Copying, StoredJournal, pull_others, stored_generations
from vlm_durable.versions.stored import StoredPartitions

KEY, GENERATION = "000000000-000000009", "generation"


def bytes_of(home: Home) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in home.root.rglob("*") if path.is_file()}


def test_what_is_put_there_is_not_kept():
    """Nobody takes it for a store that has something."""
    stored = NO_MIRROR.put("name", b"content", over=None)
    NO_MIRROR.put("name", b"newer", over=stored)
    assert NO_MIRROR.head("name") is None
    assert not [*NO_MIRROR.names(), *NO_MIRROR.below("folder").listed()]
    with pytest.raises(NoObjectError):
        NO_MIRROR.get("name", most=9)


def test_a_publication_ends_here(partitions: Any):
    """Nothing is read or noted for the store that there is not: a store that is set later is a new one."""
    stored = StoredPartitions(partitions.asset, NO_MIRROR)
    partitions.publish_text("a")
    record = partitions.publish_text("b").record
    partitions.files.published.write_bytes(b"damaged, so that a copy of it would be refused")
    before = bytes_of(partitions.asset.home)
    stored.push(record.key)
    assert (stored.pull(record.key), stored.forget_earlier(record.key)) == ((), ())
    assert (stored.content_of(record), stored.has(record), stored.published(record.key)) == (
        None,
        False,
        None,
    )
    assert bytes_of(partitions.asset.home) == before
    assert partitions.files.mark.last_store() is None


def test_committed_rows_wait_for_no_copy(tmp_path):
    """The work goes on without a thread, an object or a sentence about copies."""
    paths = Home(tmp_path).asset("property_descriptions").partition(KEY)
    for ordinal in range(2):
        stored = StoredJournal(paths, GENERATION, NO_MIRROR)
        assert stored.pull() == ()
        journal = open_journal(paths, GENERATION, ["p0", "p1"])
        with Copying(stored, most_bytes=0) as copying, journal:
            copying.begin(journal)
            journal.submit(plain_rows([f"p{ordinal}"], ordinal))
            journal.flush()
            copying.flush()
            copying.check()
            assert copying.lag().segments == 0
            assert not [thread for thread in threading.enumerate() if thread.name == "journal-copies"]
            copying.retire()
    assert [*pull_others(paths, "another", NO_MIRROR), *stored_generations(paths, NO_MIRROR)] == []


def test_others_read_a_file_in_the_store_where_there_is_one(tmp_path):
    """Dagster's page of a file gives the place that other machines can open."""
    path = tmp_path / "asset" / "KEY.parquet"
    assert S3Folder("bucket", "home/").uri_of(path, tmp_path) == "s3://bucket/home/asset/KEY.parquet"
    assert NO_MIRROR.uri_of(path, tmp_path) == f"file://{path}"


def redirect(request: Request) -> None:
    """Answer with a redirection to the same place."""
    request.content()
    request.respond(307, Location=request.path)


def test_a_store_that_redirects_for_ever_is_away(monkeypatch: pytest.MonkeyPatch):
    """The error is one sentence that says what the store does, whatever is asked of it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    client.cache_clear()
    folder = S3Folder.parse("s3://bucket/folder")
    with serving(redirect) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for ask in (
            lambda: folder.get("name", most=9),
            lambda: folder.head("name"),
            lambda: folder.put("name", b"content", over=None),
            lambda: list(folder.names()),
        ):
            with pytest.raises(StoreAwayError, match="redirects each request"):
                ask()
    client.cache_clear()
