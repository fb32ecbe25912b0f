"""Decode workers ahead of the model: batches of properties in, their images as pixels out, in order.

What lives here: the images of a property put together, batches prefetched and handed over in their order.
What does not: worker processes (``decode_pool``), decoding one image (``images``), and which properties make
a batch (``batch_plan``). What comes out does not depend on the number of workers or the prefetch depth.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from resources.images.decode_pool import DecodePool, DecodeWorkersError
from resources.images.decode_worker import StopWatch
from resources.images.images import (
    PIXELS_AHEAD,
    ImageError,
    ImageFailure,
    LoadedProperty,
    PropertyJob,
    load_image,
)
from resources.images.worker_process import DecodeTask, Pixels, Seconds


class DecodeWorkers:
    """Loads batches of properties in worker processes, ahead of who consumes them.

    A context manager; the workers start when it is entered (before the model loads is a good time) and end
    with it. With ``workers=0`` images are decoded in this process, when asked for.

    A worker that dies, or gives no answer for ``image_seconds``, is replaced and its image tried again; an
    image that takes down three workers becomes a failure of kind ``kills_worker`` or ``timed_out``.

    Args:
        workers: worker processes.
        prefetch_batches: batches that are decoded, or being decoded, while the consumer holds one; fewer
            where their images may have more than PIXELS_AHEAD pixels.
        max_pixels: largest width times height handed over.
        max_images: readable images taken of a property, in the order of the catalogue.
        image_seconds: longest time for one image, its reading included.
    """

    def __init__(
        self,
        *,
        workers: int,
        prefetch_batches: int,
        max_pixels: int,
        max_images: int,
        image_seconds: float = 120.0,
    ) -> None:
        if workers < 0 or prefetch_batches < 0 or max_pixels < 1 or max_images < 1 or image_seconds <= 0:
            raise ValueError(
                "Decode workers need workers and prefetch_batches of 0 or more, and max_pixels, max_images "
                "and image_seconds above 0."
            )
        self._workers = workers
        self._prefetch_batches = prefetch_batches
        self._max_pixels = max_pixels
        self._max_images = max_images
        self._image_seconds = image_seconds
        self._pool: DecodePool | None = None
        self._closed = False
        self.wait_seconds = 0.0
        """Seconds that the consumer has waited for images so far."""

    def __enter__(self) -> Self:
        if self._workers:
            self._pool = DecodePool(
                workers=self._workers, max_pixels=self._max_pixels, image_seconds=self._image_seconds
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. Who waits for a batch in another thread gets a DecodeWorkersError."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now."""
        return self._pool.pids if self._pool is not None else ()

    def feed(self, batches: Iterable[Sequence[PropertyJob]]) -> Iterator[list[LoadedProperty]]:
        """Load batch after batch, each in the order in which it was given.

        ``batches`` is drawn from only as far as the prefetch reaches. Leaving the iterator early drops what
        was prefetched.

        Raises:
            DecodeWorkersError: no worker can be started, or this was not entered as a context manager.
        """
        if not self._workers:
            return self._feed_here(batches)
        if self._pool is None:
            raise DecodeWorkersError("Decode workers are not running: use them in a with statement.")
        return self._feed_ahead(batches, self._pool)

    def _feed_ahead(
        self, batches: Iterable[Sequence[PropertyJob]], pool: DecodePool
    ) -> Iterator[list[LoadedProperty]]:
        abandoned = threading.Event()
        source = iter(batches)
        ahead: deque[list[_PropertyImages]] = deque()
        try:
            while True:
                while self._has_room(ahead) and (batch := next(source, None)) is not None:
                    ahead.append([_PropertyImages(job, self._max_images, abandoned) for job in batch])
                    pool.submit(task for images in ahead[-1] for task in images.first_tasks())
                if not ahead:
                    return
                self._wait_for(ahead[0], pool)
                # Popped before it is handed over: the consumer alone decides how long the pixels stay.
                yield [images.loaded() for images in ahead.popleft()]
        finally:
            abandoned.set()

    def _has_room(self, ahead: Sequence[Sequence[_PropertyImages]]) -> bool:
        # How large an image will be is not known before it is decoded: as large as it may be.
        pixels = sum(images.first for batch in ahead for images in batch) * self._max_pixels
        return not ahead or (len(ahead) <= self._prefetch_batches and pixels < PIXELS_AHEAD)

    def _wait_for(self, batch: Sequence[_PropertyImages], pool: DecodePool) -> None:
        started = time.monotonic()
        with pool.changed:
            pool.changed.wait_for(lambda: pool.error or all(images.complete for images in batch))
        self.wait_seconds += time.monotonic() - started
        if pool.error is not None:
            raise DecodeWorkersError(str(pool.error)) from pool.error

    def _feed_here(self, batches: Iterable[Sequence[PropertyJob]]) -> Iterator[list[LoadedProperty]]:
        for batch in batches:
            started = time.monotonic()
            loaded = [self._load_here(job) for job in batch]
            self.wait_seconds += time.monotonic() - started
            yield loaded
            del loaded

    def _load_here(self, job: PropertyJob) -> LoadedProperty:
        if self._closed:
            raise DecodeWorkersError("Decoding was ended.")
        images = _PropertyImages(job, self._max_images, threading.Event())
        tasks = deque(images.first_tasks())
        while tasks:
            task = tasks.popleft()
            watch = StopWatch()
            outcome: Pixels | ImageError
            try:
                image = load_image(Path(task.path), max_pixels=self._max_pixels, when_read=watch.read)
                outcome = np.array(image)
            except ImageError as error:
                outcome = error
            further = task.done(outcome, watch.seconds())
            if further is not None:
                tasks.append(further)
        return images.loaded()


class _PropertyImages:
    """The images of one property while they come in, in any order.

    Asked for are the first ``max_images``, and one more for each that fails: so what is shown are the first
    ``max_images`` readable ones, whichever of them was decoded first.
    """

    def __init__(self, job: PropertyJob, max_images: int, abandoned: threading.Event) -> None:
        self._job = job
        self._abandoned = abandoned
        self._asked = 0
        self.first = min(max_images, len(job.image_paths))
        """Images that are decoded at least."""
        self._outcomes: dict[int, Pixels | ImageError] = {}
        self._reading = self._decoding = 0.0

    @property
    def complete(self) -> bool:
        return len(self._outcomes) == self._asked

    def first_tasks(self) -> list[DecodeTask]:
        return [self._ask() for _ in range(self.first)]

    def loaded(self) -> LoadedProperty:
        outcomes = [(index, self._outcomes[index]) for index in range(self._asked)]
        images = [outcome for _, outcome in outcomes if not isinstance(outcome, ImageError)]
        failed = tuple(
            ImageFailure(self._job.uri(index), outcome.kind, str(outcome))
            for index, outcome in outcomes
            if isinstance(outcome, ImageError)
        )
        return LoadedProperty(
            self._job.property_id,
            self._job.ordinal,
            images,
            len(images),
            failed,
            self._reading + self._decoding,
            self._reading,
        )

    def _ask(self) -> DecodeTask:
        index = self._asked
        self._asked += 1

        def done(outcome: Pixels | ImageError, seconds: Seconds) -> DecodeTask | None:
            self._outcomes[index] = outcome
            self._reading += seconds[0]
            self._decoding += seconds[1]
            more = isinstance(outcome, ImageError) and self._asked < len(self._job.image_paths)
            return self._ask() if more else None

        return DecodeTask(self._job.image_paths[index], done, self._abandoned)
