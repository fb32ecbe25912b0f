"""The worker pool: properties in, what the engine asks for out, whatever happens to a worker.

What lives here: batches loaded ahead in their order, workers replaced when they die or hang, and finding the
image that does it. What does not: their processes (``worker_process``) and the program that these run
(``worker``). What comes out does not depend on the number of workers or on how far they are ahead.

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
from vlm_engine.images.fetching import Fetch, Fetcher, Get
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
"""Properties that a worker has: one under way, one to go on with at once."""

_FAILED_STARTS: Final = 5

_log = logging.getLogger(__name__)


class WorkerPoolError(RuntimeError):
    """The workers cannot go on; the message says why and what to do."""


class WorkerPool:
    """Loads properties in worker processes, ahead of who consumes them.

    A context manager; the workers start when it is entered (before the model loads is a good time) and end
    with it. A worker that dies, or is at one image for longer than ``image_seconds``, is replaced, and its
    property loaded again. An image that takes down three workers becomes a failure of kind ``kills_worker``
    or ``timed_out``, and the property goes on without it.

    Args:
        output: what is made of each property's images.
        workers: worker processes.
        prefetch_batches: batches that are loaded, or being loaded, while the consumer holds one; fewer
            where their images may have more than PIXELS_AHEAD pixels.
        max_pixels: largest width times height of an image.
        max_images: readable images taken of a property, in the order of the catalogue.
        image_seconds: longest time for one image, its reading included.
        fetch: where the images are no files: gives the bytes of each path.
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
        fetch: Get | None = None,
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
        """Readable images taken of a property. May be lowered until properties are fed."""
        self._image_seconds = image_seconds
        guard = threading.Lock()  # of all that follows
        self._is_wanted = threading.Condition(guard)
        """Notified when properties are wanted, and at the end."""
        self._is_loaded = threading.Condition(guard)
        """Notified when a property is loaded, and at the end."""
        self._wanted: deque[_Loading] = deque()
        """Whose files may be read, or whose images are fetched."""
        self._fetch = fetch
        self._fetcher: Fetcher | None = None
        self._living: dict[int, WorkerProcess] = {}
        self._error: Exception | None = None
        self._closed = True
        self._numbers = 0
        self._failed_starts = 0
        self._starting = threading.Lock()
        self._template: Template | None = None
        # Daemons: an interrupt that leaves close() early must not keep the process from ending. They end
        # with the pool and not before, because Linux ends the template with the thread that started it.
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
        """End the workers, at work or not. Who waits for properties gets a WorkerPoolError."""
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
        """Load batch after batch, each in the order in which it was given.

        ``batches`` is drawn from only as far as the prefetch reaches. Leaving the iterator early drops what
        was loaded ahead. Raises WorkerPoolError, and StoreAwayError where the store of the images is down.
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
        """Load one property, before those that wait. given_up: images that are not opened, by their number.

        Raises WorkerPoolError, StoreAwayError.
        """
        loading = self._loading(job, max_images or self.max_images)
        loading.failed.update(given_up)  # Nor are they fetched.
        loading.give_up(given_up)
        self._want([loading], first=True)
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
                # Popped before it is handed over: the consumer alone decides how long the arrays stay.
                yield [one.loaded for one in finished.pop() if one.loaded is not None]
        finally:
            with self._is_wanted:
                for dropped in ahead:
                    for loading in dropped:
                        loading.abandoned = True
                        self._forget_contents(loading)

    def _draw(
        self, source: Iterator[Sequence[PropertyJob]], ahead: deque[list[_Loading]], *, most: int
    ) -> None:
        """Have batches loaded until ``most`` are ahead, or memory has room for no more."""
        # How large an image will be is not known before it is decoded: as large as it may be.
        while len(ahead) < most and (not ahead or _most_pixels(ahead) < PIXELS_AHEAD):
            if (batch := next(source, None)) is None:
                return
            ahead.append([self._loading(job, self.max_images) for job in batch])
            self._want(ahead[-1])

    def _want(self, loadings: Sequence[_Loading], *, first: bool = False) -> None:
        """Have these loaded, after or before those that wait; fetched first where that is needed."""
        if self._fetcher is not None:
            self._fetcher.add(loadings, first=first)
            return
        with self._is_wanted:
            if first:
                self._wanted.extendleft(loadings)
            else:
                self._wanted.extend(loadings)
            self._is_wanted.notify_all()

    def _fetched(self, loading: Fetch) -> None:
        assert isinstance(loading, _Loading)
        with self._is_wanted:
            loading.give_up(loading.failed)
            self._wanted.append(loading)
            self._is_wanted.notify()

    def _forget_contents(self, loading: _Loading) -> None:
        if self._fetcher is not None:
            self._fetcher.forget(loading)

    def _loading(self, job: PropertyJob, max_images: int) -> _Loading:
        with self._is_wanted:
            self._numbers += 1
            fetched = self._fetch is not None
            task = Task(self._numbers, job.image_paths, self._max_pixels, max_images, fetched=fetched)
            return _Loading(job.image_paths, max_images, job=job, task=task)

    def _wait_for(self, batch: Sequence[_Loading]) -> None:
        started = time.monotonic()
        with self._is_loaded:
            self._is_loaded.wait_for(lambda: self._error or all(one.loaded is not None for one in batch))
            self.wait_seconds += time.monotonic() - started
            if isinstance(self._error, StoreAwayError):
                raise StoreAwayError(str(self._error)) from self._error
            if self._error is not None:
                raise WorkerPoolError(str(self._error)) from self._error

    def _serve(self) -> None:
        """Keep one worker alive and busy until the pool is closed."""
        worker: WorkerProcess | None = None
        at_hand: deque[_Loading] = deque()  # what it was given, or is about to be; the first is under way
        try:
            while not self._closed:
                worker = worker or self._start_worker()
                if (new := self._take(at_hand)) is None:
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
            self._is_wanted.notify_all()

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

    def _take(self, at_hand: deque[_Loading]) -> list[_Loading] | None:
        """Move what a worker can take to ``at_hand``, and return it, or None at the pool's end; may wait."""
        new: list[_Loading] = []
        with self._is_wanted:
            while not self._closed and len(at_hand) < _AT_HAND:
                if (loading := self._next()) is not None:
                    at_hand.append(loading)
                    new.append(loading)
                elif at_hand:
                    break
                else:
                    self._is_wanted.wait()
            return None if self._closed else new

    def _work(
        self, worker: WorkerProcess, at_hand: deque[_Loading], new: Sequence[_Loading]
    ) -> Literal["", "kills_worker", "timed_out"]:
        """Give a worker what is new and take its next answer; how it ended, empty where it goes on."""
        try:
            worker.give([one.parcel() for one in new])
            parcel = worker.answer(self._image_seconds)
            if parcel is None:
                return "kills_worker"
            loaded = at_hand[0].result(parcel, self.load)
        except TimeoutError:
            return "timed_out"
        except Exception:  # Whatever a worker says that is no answer, it is not asked again.
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
        while self._wanted:
            loading = self._wanted.popleft()
            if not loading.abandoned:
                return loading
        return None

    def _bury(
        self, worker: WorkerProcess, at_hand: Sequence[_Loading], kind: Literal["kills_worker", "timed_out"]
    ) -> None:
        """Take out a worker that died or hangs, and decide about what it was doing."""
        task, image = worker.at()
        culprit = next((one for one in at_hand if one.task.number == task), None)
        self._forget(worker)
        if self._closed:
            return
        if kind == "timed_out":
            story = f"gave no answer for {self._image_seconds:g} s"
            worker.kill()  # And not waited for: blocked storage can hold off even a SIGKILL.
        else:
            story = worker.template.end_of(worker)
        if culprit is None or worker.template.has_ended():
            self._failed_starts += 1
            _log.warning("Worker %d %s between two images; another takes its place.", worker.pid, story)
            if self._failed_starts >= _FAILED_STARTS:
                raise _cannot_start(story, worker.template)
        else:
            self._blame(culprit, image, kind, worker.pid, story)
        with self._is_wanted:
            self._wanted.extendleft(reversed(at_hand))
            self._is_wanted.notify_all()

    def _blame(self, loading: _Loading, image: int, kind: ImageErrorKind, pid: int, story: str) -> None:
        loading.deaths[image] += 1
        attempts = loading.deaths[image]
        place = "the processor" if image == len(loading.task.paths) else loading.task.paths[image]
        _log.warning(
            "Worker %d %s at %s of property %s (attempt %d of %d); another takes its place.",
            pid,
            story,
            place,
            loading.job.property_id,
            attempts,
            ATTEMPTS,
        )
        if attempts < ATTEMPTS:
            return
        sentence = f"{place} was given up after {ATTEMPTS} workers; the last one {story}."
        given_up = range(len(loading.task.paths)) if image == len(loading.task.paths) else (image,)
        loading.give_up(dict.fromkeys(given_up, (kind, sentence)))


def _most_pixels(batches: Iterable[Sequence[_Loading]]) -> int:
    tasks = [one.task for batch in batches for one in batch]
    return sum(one.max_pixels * min(one.max_images, len(one.paths)) for one in tasks)


def _cannot_start(story: str, template: Template) -> WorkerPoolError:
    said = template.last_line()
    return WorkerPoolError(
        f"The workers that load images do not start: the last one {story}{f': {said}' if said else ''}. Try"
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
        """The task as a worker is given it."""
        held = dict(self.contents)  # A copy: they are forgotten where the property is abandoned meanwhile.
        return Parcel({str(at): np.frombuffer(held[at], np.uint8) for at in held}, vars(self.task))

    def give_up(self, images: Mapping[int, tuple[ImageErrorKind, str]]) -> None:
        """Have no worker look at these images again."""
        self.given_up = {**images, **self.given_up}
        self.task = replace(self.task, given_up=tuple(self.given_up))

    def needs_more(self, loaded: LoadedProperty) -> bool:
        """Whether images that were fetched cannot be shown, and others can be fetched in their place."""
        self.most = len(self.contents) + self.task.max_images - loaded.seen
        return not self.is_done

    def result(self, parcel: Parcel, load: Any) -> LoadedProperty:
        """The property as a worker answered. Raises ValueError where that is no answer to this task."""
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
            [parcel.arrays[f"image {at}"] for at in range(note["images"])],
            note["seen"],
            tuple(ImageFailure(self.job.uri(number), *failed[number]) for number in sorted(failed)),
            seconds["reading"] + seconds["decoding"],
            seconds["reading"],
            seconds["processing"],
            {name: (parcel.arrays[name], join) for name, join in note["tensors"].items()},
            note["refusal"],
            # What failed once is not shown later either: the row lists it as failed.
            partial(load, self.job, given_up=failed),
        )
