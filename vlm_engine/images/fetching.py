"""Fetching the images of properties from a store ahead of the workers that decode them.

This module decides how many images are fetched at once, how far ahead, and in which order. Nothing touches
the disk. The credentials stay in this process: workers, which decode untrusted files, get bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from vlm_durable.mirror.bucket import (
    NoObjectError,
    ObjectDamagedError,
    ObjectDeniedError,
    ObjectTooLargeError,
    S3Folder,
    StoreError,
)
from vlm_durable.mirror.quick_bucket import get_quickly
from vlm_engine.images.images import ImageError, ImageErrorKind

THREADS: Final = 16
"""Properties fetched at once, one image of each at a time: 500 images/s where an answer takes 30 ms."""

BYTES_AHEAD: Final = 256 << 20
"""Fetched bytes that wait for a worker. With more, only the first property in line is fetched."""

MAX_OBJECT_BYTES: Final = 64 << 20

_KINDS: Final[dict[type[StoreError], ImageErrorKind]] = {
    NoObjectError: "missing",
    ObjectDeniedError: "denied",
    ObjectTooLargeError: "too_large",
    ObjectDamagedError: "io_error",
}


Get = Callable[[str], bytes]
"""Reads an image by its path. Raises ImageError for a fault of that image; any other error ends the work."""


class ImageSource(Protocol):
    """Where the images of properties lie."""

    @property
    def fetch(self) -> Get | None:
        """Reads an image by the path that ``locate`` gave; None: the path is that of a file."""

    def locate(self, uri: str) -> Path | str:
        """The path of an image. Raises ValueError where it may not be opened."""


def image_of(folder: S3Folder, name: str) -> bytes:
    """Fetch one image. Raises ImageError for its own fault, StoreAwayError for an outage."""
    try:
        content = get_quickly(folder, name, most=MAX_OBJECT_BYTES)
    except tuple(_KINDS) as error:
        raise ImageError(_KINDS[type(error)], f"{error}.") from error
    if not content:
        raise ImageError("empty", f"{folder.address(name)} has no bytes in it.")
    return content


@dataclass(eq=False)
class Fetch:
    """The images of one property: fetched in their order until there are ``most``."""

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
    """Fetches for many properties at once. ready: called with each that is done. fail: called with a fatal
    error.

    Both are called in the fetcher's threads. At most BYTES_AHEAD and an object for each thread are held.
    """

    def __init__(
        self, get: Get, *, ready: Callable[[Fetch], None], fail: Callable[[Exception], None]
    ) -> None:
        self._get = get
        self._ready = ready
        self._fail = fail
        self._changed = threading.Condition()
        self._queue: deque[Fetch] = deque()
        self._begun: list[Fetch] = []
        """In the order in which they began, until they are forgotten."""
        self._closed = False
        for number in range(THREADS):
            # Daemons: a request under way cannot be stopped, and a run that ends does not wait for it.
            threading.Thread(target=self._run, name=f"fetch-{number}", daemon=True).start()

    def add(self, fetches: Iterable[Fetch], *, first: bool = False) -> None:
        """Queue these, at the end or the beginning."""
        with self._changed:
            if first:
                self._queue.extendleft(fetches)
            else:
                self._queue.extend(fetches)
            self._changed.notify_all()

    def forget(self, fetch: Fetch) -> None:
        """Drop its bytes."""
        with self._changed:
            fetch.forgotten = True
            if fetch in self._begun:
                self._begun.remove(fetch)
            fetch.contents.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Begin nothing more; requests under way end by themselves."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (fetch := self._next()) is not None:
            try:
                self._fetch(fetch)
            except Exception as error:
                self._fail(error)
                return

    def _next(self) -> Fetch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue)
            if self._closed:
                return None
            fetch = self._queue.popleft()
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
        # The first in line always goes on: otherwise each might hold a part of its images, and none be done.
        held = sum(len(content) for begun in self._begun for content in begun.contents.values())
        return self._begun[0] is fetch or held < BYTES_AHEAD
