"""Fetching the images of properties from a store ahead of the workers that decode them.

What lives here: how many are fetched at once, how far ahead, and in which order; and a way to read an object
at a sixth of boto3's cost: it is done hundreds of times a second, in the process that feeds the model. What
that way does not get, or cannot prove, is read the ordinary way (``S3Folder.get``), which says what is wrong.
Nothing touches the disk. The credentials stay in this process: workers, which decode what nobody trusts, are
handed bytes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, Final

from vlm_durable.mirror.bucket import (
    CONNECT_SECONDS,
    NoObjectError,
    ObjectDamagedError,
    ObjectDeniedError,
    ObjectTooLargeError,
    S3Folder,
    StoreError,
    client,
    endpoint,
)
from vlm_engine.images.images import ImageError, ImageErrorKind

THREADS: Final = 16
"""Properties fetched at once, an image at a time each: 500 images/s where an answer takes 30 ms."""

BYTES_AHEAD: Final = 256 << 20
"""Fetched bytes that wait for a worker, from which on only the first property in line is gone on with."""

MAX_OBJECT_BYTES: Final = 64 << 20

MOST_DOUBTS: Final = 20
"""Objects in a row that only the ordinary way got: from then on it is the only way. In such a bucket an ETag
is no MD5 (KMS keys, parts), or the store wants what only boto3 knows (a proxy, a certificate, a redirect)."""

_SECONDS: Final = 10.0
_CREDENTIALS_SECONDS: Final = 300.0
"""botocore hands out none that expire sooner."""

_log = logging.getLogger(__name__)

_KINDS: Final[dict[type[StoreError], ImageErrorKind]] = {
    NoObjectError: "missing",
    ObjectDeniedError: "denied",
    ObjectTooLargeError: "too_large",
    ObjectDamagedError: "io_error",
}


Get = Callable[[str], bytes]
"""The bytes of an image by its path. Raises ImageError for a fault of that image; all else ends the work."""


def image_of(folder: S3Folder, name: str) -> bytes:
    """Fetch one image. Raises ImageError for its own fault, StoreAwayError for an outage."""
    try:
        content = get_quickly(folder, name)
    except tuple(_KINDS) as error:
        raise ImageError(_KINDS[type(error)], f"{error}.") from error
    if not content:
        raise ImageError("empty", f"{folder.address(name)} has no bytes in it.")
    return content


@dataclass(eq=False)
class Fetch:
    """The images of one property: fetched in their order until ``most`` of them are there."""

    paths: Sequence[str]
    most: int
    contents: dict[int, bytes] = field(default_factory=dict)
    """By the image's number among the paths."""
    failed: dict[int, tuple[ImageErrorKind, str]] = field(default_factory=dict)
    forgotten: bool = False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to fetch."""
        return len(self.contents) >= self.most or len(self.contents) + len(self.failed) == len(self.paths)


class Fetcher:
    """Fetches for many properties at once. ready: told of each that is done. fail: told why nobody goes on.

    Both are called in the fetcher's threads. At most BYTES_AHEAD and an object for each thread are held.
    """

    def __init__(
        self, get: Get, *, ready: Callable[[Fetch], None], fail: Callable[[Exception], None]
    ) -> None:
        self._get = get
        self._ready = ready
        self._fail = fail
        self._changed = threading.Condition()
        self._wanted: deque[Fetch] = deque()
        self._begun: list[Fetch] = []
        """In the order of their begin, until they are forgotten."""
        self._closed = False
        for number in range(THREADS):
            # Daemons: a request under way cannot be stopped, and a run that is ended does not wait for it.
            threading.Thread(target=self._run, name=f"fetch-{number}", daemon=True).start()

    def add(self, fetches: Iterable[Fetch], *, first: bool = False) -> None:
        """Fetch these after, or before, those that wait."""
        with self._changed:
            if first:
                self._wanted.extendleft(fetches)
            else:
                self._wanted.extend(fetches)
            self._changed.notify_all()

    def forget(self, fetch: Fetch) -> None:
        """Its bytes are needed no more."""
        with self._changed:
            fetch.forgotten = True
            if fetch in self._begun:
                self._begun.remove(fetch)
            fetch.contents.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Begin nothing more; what is under way ends by itself."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (fetch := self._take()) is not None:
            try:
                self._fetch(fetch)
            except Exception as error:
                self._fail(error)
                return

    def _take(self) -> Fetch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted)
            if self._closed:
                return None
            fetch = self._wanted.popleft()
            if fetch not in self._begun:
                self._begun.append(fetch)
            return fetch

    def _fetch(self, fetch: Fetch) -> None:
        for number, path in enumerate(fetch.paths):
            if number in fetch.contents or number in fetch.failed:
                continue
            if fetch.is_done:
                break
            with self._changed:
                self._changed.wait_for(lambda: self._closed or fetch.forgotten or self._has_room(fetch))
                if self._closed or fetch.forgotten:
                    return
            try:
                content = self._get(path)
            except ImageError as error:
                fetch.failed[number] = (error.kind, str(error))
            else:
                with self._changed:
                    fetch.contents[number] = content
        self._ready(fetch)

    def _has_room(self, fetch: Fetch) -> bool:
        # The first in line always goes on: else each might hold a part of its images, and none be done.
        held = sum(len(content) for one in self._begun for content in one.contents.values())
        return self._begun[0] is fetch or held < BYTES_AHEAD


def get_quickly(folder: S3Folder, name: str) -> bytes:
    """The bytes of an object, verified. Raises what ``S3Folder.get`` does."""
    quick = _quick_bucket(client(), folder.bucket)
    content = quick.get(folder.prefix + name)
    if content is None:
        content = folder.get(name, most=MAX_OBJECT_BYTES)
        quick.doubt(folder.address(name))
    else:
        quick.doubts = 0
    return content


class _QuickBucket:
    """A bucket by obstore. doubts: objects in a row that it did not get, and that were there."""

    def __init__(self, bucket: str) -> None:
        self.doubts = 0
        self._why = ""
        self._bucket = bucket
        self._store = self._opened()

    def get(self, key: str) -> bytes | None:
        """The bytes, where their MD5 is the object's ETag; None for whatever else there may be."""
        if self._store is None or self.doubts >= MOST_DOUBTS:
            return None
        try:
            answer = self._store.get(key)
            if answer.meta["size"] > MAX_OBJECT_BYTES:
                return None
            content = bytes(answer.bytes())
            etag = str(answer.meta["e_tag"]).strip('"')
        except Exception as error:  # whatever it is: the ordinary way says what is wrong with the object
            # Its text may quote a session's token.
            self._why = type(error).__name__
            return None
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != etag:
            self._why = "its ETag is not its MD5"
            return None
        return content

    def doubt(self, where: str) -> None:
        """Count an object that was there after all; say once that this way is given up."""
        self.doubts += 1
        if self.doubts == MOST_DOUBTS:
            _log.warning("S3 images are read by boto3 alone from now on, slower: %s: %s", where, self._why)

    def _opened(self) -> Any:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        session, at = boto3.session.Session(), endpoint()
        try:
            return S3Store(
                self._bucket,
                endpoint=at,
                region=session.region_name or "us-east-1",
                credential_provider=Boto3CredentialProvider(
                    session, ttl=timedelta(seconds=_CREDENTIALS_SECONDS)
                ),
                client_options={
                    "allow_http": (at or "").startswith("http://"),
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=_SECONDS),
                },
                retry_config={"max_retries": 0},
            )
        except (ValueError, BaseError) as error:  # no credentials, or an address that only boto3 takes
            self._why = type(error).__name__
            return None


@cache
def _quick_bucket(client: Any, bucket: str) -> _QuickBucket:
    # One for each client: a new one was made because the environment is another one.
    return _QuickBucket(bucket)
