"""The worker pool: properties in, inputs of the engine out, whatever happens to a worker.

This module loads batches ahead in their order, replaces workers that die or hang, and finds the image that is
the cause. Their processes are in ``worker_process``, and their program in ``worker``. The output does not
depend on the number of workers or on how far they are ahead.

A thread of this process serves one worker: it sends the next properties, waits for answers, and decides what
happens after a death. torch's DataLoader ends as a whole when a worker dies, and pebble's pool neither blames
an image nor ends with a parent that is killed; both pass results through pickles.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal, Self

import numpy as np

from vlm_durable.mirror.bucket import StoreAwayError
from vlm_engine.images.fetching import Fetch, Fetcher, ImageSource
from vlm_engine.images.images import (
    PIXELS_AHEAD,
    ImageErrorKind,
    ImageFailure,
    LoadedProperty,
    Output,
    PropertyJob,
)
from vlm_engine.images.worker import Parcel, Task
from vlm_engine.images.worker_process import ENDING_SECONDS, Template, WorkerProcess

ATTEMPTS: Final = 3
"""Workers that an image may take down before it is given up."""

_AT_HAND: Final = 2
"""Properties that a worker has: one under way, and the next."""

_FAILED_STARTS: Final = 5

_log = logging.getLogger(__name__)


class WorkerPoolError(RuntimeError):
    """The workers cannot go on; the message says why and what to do."""


class WorkerPool:
    """Loads properties in worker processes, ahead of their consumer.

    A context manager; the workers start when it is entered (before the model loads is a good time) and end
    with it. A worker that dies, or is at one image for longer than ``image_seconds``, is replaced, and its
    property loaded again. An image that takes down three workers becomes a failure of kind ``kills_worker``
    or ``timed_out``, and the property goes on without it.

    Args:
        output: how each property's images are processed.
        workers: worker processes.
        prefetch_batches: batches that are loaded, or being loaded, while the consumer holds one; fewer
            where their images may have more than PIXELS_AHEAD pixels.
        max_pixels: largest width times height of an image.
        max_images: readable images of a property that are loaded, in the order of the catalogue.
        image_seconds: longest time for one image, its reading included.
        source: where the images lie, and whether they are fetched; None: their URIs are paths of files.
    """

    def __init__(
        self,
        output: Output,
        *,
        workers: int,
        prefetch_batches: int,
        max_pixels: int,
        max_images: int,
        image_seconds: float = 120.0,
        source: ImageSource | None = None,
    ) -> None:
        if workers < 1 or prefetch_batches < 0 or max_pixels < 1 or max_images < 1 or image_seconds <= 0:
            raise ValueError(
                "A worker pool needs prefetch_batches of 0 or more, and workers, max_pixels, max_images and "
                "image_seconds above 0."
            )
        self._output = output
        self._prefetch_batches = prefetch_batches
        self._max_pixels = max_pixels
        self.max_images = max_images
        """Readable images of a property that are loaded. May be lowered until properties are fed."""
        self._image_seconds = image_seconds
        guard = threading.Lock()  # of all fields below
        self._is_queued = threading.Condition(guard)
        """Notified when properties are queued, and at the end."""
        self._is_loaded = threading.Condition(guard)
        """Notified when a property is loaded, and at the end."""
        self._queue: deque[_Loading] = deque()
        """Properties for the workers; where images are fetched, their images are here."""
        self._locate = str if source is None else source.locate
        self._fetch = None if source is None else source.fetch
        self._fetcher: Fetcher | None = None
        self._living: dict[int, WorkerProcess] = {}
        self._error: Exception | None = None
        self._closed = True
        self._numbers = 0
        self._failed_starts = 0
        self._starting = threading.Lock()
        self._template: Template | None = None
        # Daemons: an interrupt that leaves close() early must not keep the process alive. They end with the
        # pool and not before, because Linux ends the template with the thread that started it.
        self._threads = [
            threading.Thread(target=self._serve, name=f"image-worker-{number}", daemon=True)
            for number in range(workers)
        ]
        self.wait_seconds = 0.0
        """Seconds that the consumer has waited so far."""

    def __enter__(self) -> Self:
        self._closed = False
        if self._fetch is not None:
            self._fetcher = Fetcher(self._fetch, ready=self._fetched, fail=self._fail)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, at work or not. A consumer that waits for properties gets a WorkerPoolError."""
        with self._is_loaded:
            if self._closed:
                return
            self._closed = True
            template = self._template
        self._fail(WorkerPoolError("The workers that load images were ended."))
        if self._fetcher is not None:
            self._fetcher.close()
        if template is not None:
            template.end()
        deadline = time.monotonic() + ENDING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if template is not None:
            template.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now."""
        with self._is_loaded:
            return tuple(self._living)

    def feed(self, batches: Iterable[Sequence[PropertyJob]]) -> Iterator[list[LoadedProperty]]:
        """Load batch after batch, each in its order.

        ``batches`` is read only as far as the prefetch reaches. Leaving the iterator early drops properties
        that were loaded ahead. Raises WorkerPoolError, and StoreAwayError where the store of the images is
        down.
        """
        if self._closed:
            raise WorkerPoolError("The workers are not running: use the pool in a with statement.")
        return self._feed(iter(batches))

    def load(
        self,
        job: PropertyJob,
        max_images: int | None = None,
        *,
        given_up: Mapping[int, tuple[ImageErrorKind, str]] = MappingProxyType({}),
    ) -> LoadedProperty:
        """Load one property, before those in the queue. given_up: images that are not opened, by number.

        Raises WorkerPoolError, StoreAwayError.
        """
        loading = self._loading(job, max_images or self.max_images, given_up)
        self._enqueue([loading], first=True)
        self._wait_for([loading])
        assert loading.loaded is not None
        return loading.loaded

    def _feed(self, source: Iterator[Sequence[PropertyJob]]) -> Iterator[list[LoadedProperty]]:
        ahead: deque[list[_Loading]] = deque()
        try:
            while True:
                self._draw(source, ahead, most=1 + self._prefetch_batches)
                if not ahead:
                    return
                self._wait_for(ahead[0])
                finished = [ahead.popleft()]
                # The workers go on while the consumer holds that batch.
                self._draw(source, ahead, most=self._prefetch_batches)
                # Popped first: only the consumer decides how long the arrays stay.
                yield [loading.loaded for loading in finished.pop() if loading.loaded is not None]
        finally:
            with self._is_queued:
                for dropped in ahead:
                    for loading in dropped:
                        loading.abandoned = True
                        self._forget_contents(loading)

    def _draw(
        self, source: Iterator[Sequence[PropertyJob]], ahead: deque[list[_Loading]], *, most: int
    ) -> None:
        """Have batches loaded until ``most`` are ahead, or memory has room for no more."""
        # An image's size is not known before it is decoded, so each counts as large as it may be.
        while len(ahead) < most and (not ahead or _most_pixels(ahead) < PIXELS_AHEAD):
            if (batch := next(source, None)) is None:
                return
            ahead.append([self._loading(job, self.max_images) for job in batch])
            self._enqueue(ahead[-1])

    def _enqueue(self, loadings: Sequence[_Loading], *, first: bool = False) -> None:
        """Queue properties at the end or the beginning. Where images are fetched, the fetcher queues them."""
        if self._fetcher is not None:
            self._fetcher.add(loadings, first=first)
            return
        with self._is_queued:
            if first:
                self._queue.extendleft(loadings)
            else:
                self._queue.extend(loadings)
            self._is_queued.notify_all()

    def _fetched(self, loading: Fetch) -> None:
        assert isinstance(loading, _Loading)
        with self._is_queued:
            loading.give_up(loading.failed)
            self._queue.append(loading)
            self._is_queued.notify()

    def _forget_contents(self, loading: _Loading) -> None:
        if self._fetcher is not None:
            self._fetcher.forget(loading)

    def _loading(
        self,
        job: PropertyJob,
        max_images: int,
        given_up: Mapping[int, tuple[ImageErrorKind, str]] = MappingProxyType({}),
    ) -> _Loading:
        paths, failed = [], dict(given_up)
        for number, uri in enumerate(job.image_uris):
            try:
                paths.append(str(self._locate(uri)))
            except ValueError as error:  # It was inside the root when it was catalogued: a link was changed.
                paths.append("")
                failed.setdefault(number, ("denied", f"{uri} is not opened: {error}."))
        with self._is_queued:
            self._numbers += 1
            fetched = self._fetch is not None
            task = Task(self._numbers, tuple(paths), self._max_pixels, max_images, fetched=fetched)
        loading = _Loading(paths, max_images, failed=failed, job=job, task=task)  # Not fetched either.
        loading.give_up(failed)
        return loading

    def _wait_for(self, batch: Sequence[_Loading]) -> None:
        started = time.monotonic()
        with self._is_loaded:
            self._is_loaded.wait_for(
                lambda: self._error or all(loading.loaded is not None for loading in batch)
            )
            self.wait_seconds += time.monotonic() - started
            if isinstance(self._error, StoreAwayError):
                raise StoreAwayError(str(self._error)) from self._error
            if self._error is not None:
                raise WorkerPoolError(str(self._error)) from self._error

    def _serve(self) -> None:
        """Keep one worker alive and busy until the pool is closed."""
        worker: WorkerProcess | None = None
        at_hand: deque[_Loading] = deque()  # Sent to the worker, or next to be sent; the first is under way.
        try:
            while not self._closed:
                worker = worker or self._start_worker()
                if (new := self._next_for_worker(at_hand)) is None:
                    return
                if death := self._work(worker, at_hand, new):
                    self._bury(worker, at_hand, death)
                    worker = None
                    at_hand.clear()
        except Exception as error:
            self._fail(error)
        finally:
            if worker is not None:
                self._forget(worker)

    def _fail(self, error: Exception) -> None:
        with self._is_loaded:
            self._error = self._error or error
            self._is_loaded.notify_all()
            self._is_queued.notify_all()

    def _forget(self, worker: WorkerProcess) -> None:
        with self._is_loaded:
            self._living.pop(worker.pid, None)
        worker.close()

    def _start_worker(self) -> WorkerProcess:
        with self._starting:
            while True:
                template = self._template or Template(self._output)
                with self._is_loaded:
                    self._template = template
                    if self._closed:
                        break
                try:
                    worker = template.fork()
                except OSError as error:
                    story = template.story(error)
                    template.end()
                    self._template = None
                    self._failed_starts += 1
                    if not template.ready or self._failed_starts >= _FAILED_STARTS:
                        raise _cannot_start(story, template) from error
                else:
                    with self._is_loaded:
                        self._living[worker.pid] = worker
                    return worker
        template.end()
        raise WorkerPoolError("The workers that load images were ended.")

    def _next_for_worker(self, at_hand: deque[_Loading]) -> list[_Loading] | None:
        """Move properties from the queue to ``at_hand`` and return them; None at the pool's end. May wait."""
        new: list[_Loading] = []
        with self._is_queued:
            while not self._closed and len(at_hand) < _AT_HAND:
                if (loading := self._next()) is not None:
                    at_hand.append(loading)
                    new.append(loading)
                elif at_hand:
                    break
                else:
                    self._is_queued.wait()
            return None if self._closed else new

    def _work(
        self, worker: WorkerProcess, at_hand: deque[_Loading], new: Sequence[_Loading]
    ) -> Literal["", "kills_worker", "timed_out"]:
        """Send new properties to a worker and receive its next answer. How it ended; "" where it goes on."""
        try:
            worker.give([loading.parcel() for loading in new])
            parcel = worker.answer(self._image_seconds)
            if parcel is None:
                return "kills_worker"
            loaded = at_hand[0].loaded_from(parcel, self.load)
        except TimeoutError:
            return "timed_out"
        except Exception:  # A worker whose message is no answer is not asked again.
            return "kills_worker"
        loading = at_hand.popleft()
        if self._fetcher is not None and loading.needs_more(loaded):
            self._fetcher.add([loading], first=True)
            return ""
        self._forget_contents(loading)
        with self._is_loaded:
            loading.loaded = loaded
            self._failed_starts = 0
            self._is_loaded.notify_all()
        return ""

    def _next(self) -> _Loading | None:
        while self._queue:
            loading = self._queue.popleft()
            if not loading.abandoned:
                return loading
        return None

    def _bury(
        self, worker: WorkerProcess, at_hand: Sequence[_Loading], kind: Literal["kills_worker", "timed_out"]
    ) -> None:
        """Remove a worker that died or hangs, and decide about its properties."""
        task, image = worker.position()
        culprit = next((loading for loading in at_hand if loading.task.number == task), None)
        self._forget(worker)
        if self._closed:
            return
        if kind == "timed_out":
            story = f"gave no answer for {self._image_seconds:g} s"
            worker.kill()  # Without a wait: blocked storage can delay even a SIGKILL.
        else:
            story = worker.template.end_of(worker)
        if culprit is None or worker.template.has_ended():
            self._failed_starts += 1
            _log.warning("Worker %d %s between two images; another takes its place.", worker.pid, story)
            if self._failed_starts >= _FAILED_STARTS:
                raise _cannot_start(story, worker.template)
        else:
            self._blame(culprit, image, kind, worker.pid, story)
        with self._is_queued:
            self._queue.extendleft(reversed(at_hand))
            self._is_queued.notify_all()

    def _blame(self, loading: _Loading, image: int, kind: ImageErrorKind, pid: int, story: str) -> None:
        loading.deaths[image] += 1
        attempts = loading.deaths[image]
        cause = "the processor" if image == len(loading.task.paths) else loading.task.paths[image]
        _log.warning(
            "Worker %d %s at %s of property %s (attempt %d of %d); another takes its place.",
            pid,
            story,
            cause,
            loading.job.property_id,
            attempts,
            ATTEMPTS,
        )
        if attempts < ATTEMPTS:
            return
        sentence = f"{cause} was given up after {ATTEMPTS} workers; the last one {story}."
        given_up = range(len(loading.task.paths)) if image == len(loading.task.paths) else (image,)
        loading.give_up(dict.fromkeys(given_up, (kind, sentence)))


def _most_pixels(batches: Iterable[Sequence[_Loading]]) -> int:
    tasks = [loading.task for batch in batches for loading in batch]
    return sum(task.max_pixels * min(task.max_images, len(task.paths)) for task in tasks)


def _cannot_start(story: str, template: Template) -> WorkerPoolError:
    last_line = template.last_line()
    output = f": {last_line}" if last_line else ""
    return WorkerPoolError(
        f"The workers that load images do not start: the last one {story}{output}. Try"
        f" `{sys.executable} -c 'import vlm_engine.images.worker'`."
    )


@dataclass(eq=False, kw_only=True)
class _Loading(Fetch):
    """A property on its way through the workers."""

    job: PropertyJob
    task: Task
    abandoned: bool = False
    loaded: LoadedProperty | None = None
    deaths: Counter[int] = field(default_factory=Counter)
    """Workers that ended at an image, by its number."""
    given_up: dict[int, tuple[ImageErrorKind, str]] = field(default_factory=dict)

    def parcel(self) -> Parcel:
        """The message to a worker."""
        contents = dict(self.contents)  # A copy: another thread forgets them where the property is abandoned.
        arrays = {str(number): np.frombuffer(content, np.uint8) for number, content in contents.items()}
        return Parcel(arrays, vars(self.task))

    def give_up(self, images: Mapping[int, tuple[ImageErrorKind, str]]) -> None:
        """Have no worker open these images again."""
        self.given_up = {**images, **self.given_up}
        self.task = replace(self.task, given_up=tuple(self.given_up))

    def needs_more(self, loaded: LoadedProperty) -> bool:
        """Whether images that were fetched cannot be shown, and others can be fetched in their place."""
        self.most = len(self.contents) + self.task.max_images - loaded.seen
        return not self.is_done

    def loaded_from(self, parcel: Parcel, load: Any) -> LoadedProperty:
        """The property in a worker's answer. Raises ValueError where it is no answer to this task."""
        note = parcel.note
        if note["number"] != self.task.number:
            raise ValueError("an answer to another task")
        failed: dict[int, tuple[ImageErrorKind, str]] = {
            number: (kind, text) for number, kind, text in note["failed"]
        }
        failed |= self.given_up
        seconds = note["seconds"]
        return LoadedProperty(
            self.job.property_id,
            self.job.ordinal,
            [parcel.arrays[f"image {index}"] for index in range(note["images"])],
            note["seen"],
            tuple(ImageFailure(self.job.image_uris[number], *failed[number]) for number in sorted(failed)),
            seconds["reading"] + seconds["decoding"],
            seconds["reading"],
            seconds["processing"],
            {name: (parcel.arrays[name], join) for name, join in note["tensors"].items()},
            note["refusal"],
            # An image that failed once is not shown later either: the row lists it as failed.
            partial(load, self.job, given_up=failed),
        )
