"""Describing properties with one engine: images and prompts in, validated answers out, in batches.

``Describing.describe`` is the door to this package. ``batches`` says which properties go together,
``worker_pool`` loads their images, and ``ladder`` decides about each property. This module has the next batch
loaded and prepared beside the model, so that the device never waits, keeps as many batches under way as the
engine takes, and counts where the time went. The descriptions do not depend on ``batches_at_once``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from vlm_engine.batches import BatchSizes, long_batch
from vlm_engine.images.images import LoadedProperty, PropertyJob
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.ladder import Described, describe_batch
from vlm_engine.protocol import Attempt, Engine, SplittingEngine, image_tokens_of

if TYPE_CHECKING:
    from vlm_engine.prompt import FurtherQuestion
    from vlm_engine.schema import DescriptionSchema

_ENDING_SECONDS: Final = 5.0
"""For all threads together. A processor under way cannot be stopped, and a run that ends has only seconds."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class DescribedBatch:
    """The results of a batch, for each question one after another.

    seconds: from its first question to its last answer. advice: a sentence where batches are too long; once.
    """

    described: list[Described]
    seconds: float
    advice: str | None = None


@dataclass
class Spent:
    """What it took so far: seconds, and what the model was asked.

    model: at least one batch was with the engine; validating: of these, the ladder's own, summed over
    batches. waiting: no batch was with the engine, because none was loaded. Beside the model, in other
    processes and threads, summed up: reading and decoding images, and preparing (processor and joining).
    longest: of a batch. images, prompt_tokens, attempts: as the answers were made from them.
    """

    model: float = 0.0
    validating: float = 0.0
    waiting: float = 0.0
    reading: float = 0.0
    decoding: float = 0.0
    preparing: float = 0.0
    longest: float = 0.0
    images: int = 0
    prompt_tokens: int = 0
    attempts: int = 0


@dataclass(frozen=True)
class _AllLoaded:
    """There are no more batches: all are loaded, or loading raised."""

    error: BaseException | None


_Event = Sequence[LoadedProperty] | _AllLoaded | DescribedBatch | BaseException


class Describing:
    """Describes properties with one engine. A context manager: leaving ends its workers and closes it.

    A thread has the next batch loaded and prepared while the engine works on another. An engine that takes
    one batch at once is asked in the caller's own thread, where interrupts reach it; an engine that takes
    more, in a thread for each batch. After an error or an interrupt nothing more is asked, and leaving waits
    for the threads.

    workers: load the images; no more of a property than fit the engine, where it says how many fit.
    max_new_tokens: of an answer's first attempt. sizes: of the batches. further: the engine's other
    questions. All are asked of a batch before the next, so that the engine can share the work on its images.
    """

    def __init__(
        self,
        engine: Engine,
        workers: WorkerPool,
        schema: DescriptionSchema,
        max_new_tokens: int,
        sizes: BatchSizes,
        *,
        further: Sequence[FurtherQuestion] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spent = Spent()
        self._engine = engine
        self._workers = workers
        self._questions = [
            (schema, max_new_tokens),
            *((more.schema, more.max_new_tokens) for more in further),
        ]
        self._to_do: list[Collection[str] | None] = [None] * len(self._questions)
        """Ids of the properties that each question is asked about; None: all."""
        self.sizes = sizes
        self._clock = clock
        self._max_images = workers.max_images  # The plan's, which is the same whatever fits the engine.
        if (image_tokens := image_tokens_of(engine)) is not None:
            workers.max_images = min(workers.max_images, image_tokens.fitting)
        self._advised = False
        self._events: SimpleQueue[_Event] = SimpleQueue()
        """Loaded batches, in order, and the outcomes of batches that other threads have asked about."""
        self._room = threading.Semaphore(1)
        """Acquired for each batch that is loaded ahead, released when the engine is asked about it."""
        self._counting = threading.Lock()
        self._asking = 0
        self._turned = clock()
        self._stopped = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        self._room.release()
        try:
            self._workers.close()
        finally:
            self._engine.close()
        deadline = time.monotonic() + _ENDING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning(
                    "Thread %s is still at work; it ends by itself, or with the process.", thread.name
                )

    def begin(self, kept: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
        """Choose the batches' size for the engine. See ``BatchSizes.begin``."""
        return self.sizes.begin(self._engine, kept)

    def describe(
        self,
        jobs: Sequence[PropertyJob],
        to_do: Collection[str] | None = None,
        *,
        further_to_do: Sequence[Collection[str]] | None = None,
    ) -> Iterator[DescribedBatch]:
        """Describe these properties, or those of them whose ids are to do, in batches as they are done.

        jobs: all properties of the work, whatever is done: they decide the plan. further_to_do: the ids for
        each further question; None: all. In the plan's order where
        the engine takes one batch at once, else each batch when it is done. May be called again once all are
        described. Raises EngineLostError, WorkerPoolError and StoreAwayError, after all batches that were
        finished before.
        """
        self._to_do = [to_do] + [None] * (len(self._questions) - 1)
        if further_to_do is not None:
            self._to_do[1:] = further_to_do
        ids = [frozenset(of_question) for of_question in self._to_do if of_question is not None]
        asked = frozenset[str]().union(*ids) if len(ids) == len(self._questions) else None
        return self.describe_batches(self.sizes.plan(jobs, asked, max_images=self._max_images))

    def describe_batches(self, batches: Iterable[Sequence[PropertyJob]]) -> Iterator[DescribedBatch]:
        """Describe batches that are planned already. See ``describe``."""
        self._start("describing-ahead", self._load_ahead, batches)
        return self._described()

    def _described(self) -> Iterator[DescribedBatch]:
        in_this_thread = self._engine.batches_at_once == 1
        loaded: deque[tuple[Sequence[LoadedProperty], bool]] = deque()
        """Parts of loaded batches that wait, each with whether it is its batch's last."""
        under_way = 0
        all_loaded: _AllLoaded | None = None
        while True:
            # How many batches the engine takes may change at any moment.
            while loaded and under_way < max(1, self._engine.batches_at_once):
                batch, is_last = loaded.popleft()
                if is_last:
                    self._room.release()
                if in_this_thread:
                    yield self._counted(self._ask(batch))
                else:
                    under_way += 1
                    self._start("describing-batch", self._ask_apart, batch)
                del batch
            if all_loaded is not None and not loaded and not under_way:
                if all_loaded.error is not None:
                    raise all_loaded.error
                self.sizes.remember()
                return
            event = self._next_event(waiting=not under_way)
            match event:
                case _AllLoaded():
                    all_loaded = event
                case DescribedBatch():
                    under_way -= 1
                    # At once: a batch that waited for a slow one would be neither committed nor counted.
                    yield self._counted(event)
                case BaseException():
                    raise event
                case _:
                    if in_this_thread or len(self._questions) == 1:
                        loaded.append((event, True))
                    else:  # A server's cache has a property's images while it is asked about nothing else.
                        loaded.extend(([apart], apart is event[-1]) for apart in event)

    def _next_event(self, *, waiting: bool) -> _Event:
        began = self._clock()
        event = self._events.get()
        if waiting:
            self.spent.waiting += self._clock() - began
        return event

    def _counted(self, batch: DescribedBatch) -> DescribedBatch:
        described, spent, advice = batch.described, self.spent, None
        images = list({answer.property_id: answer.images_seen for answer in described}.values())
        self.sizes.count(images, batch.seconds)
        # The first batch of a process pays for what is compiled and allocated once.
        if spent.longest and not self._advised:
            advice = long_batch(images, batch.seconds)
            self._advised = advice is not None
        spent.longest = max(spent.longest, batch.seconds)
        spent.images += sum(images)
        spent.prompt_tokens += sum(answer.prompt_tokens for answer in described)
        spent.attempts += sum(answer.attempts for answer in described if answer.prompt_tokens)
        return replace(batch, advice=advice)

    def _start(self, name: str, run: Callable[[_T], None], batches: _T) -> None:
        # Daemons: threads that are still at work after an interrupt must not keep the process alive.
        thread = threading.Thread(target=run, args=(batches,), name=name, daemon=True)
        self._threads = [*(started for started in self._threads if started.is_alive()), thread]
        thread.start()

    def _load_ahead(self, batches: Iterable[Sequence[PropertyJob]]) -> None:
        """Have batches loaded and prepare them, one ahead of the engine, until there are no more."""
        try:
            loaded_batches = self._workers.feed(batches)
            while self._room.acquire() and not self._stopped:
                batch = next(loaded_batches, None)
                if batch is None:
                    self._room.release()  # For a next round of batches.
                    self._events.put(_AllLoaded(None))
                    return
                self._prepare(batch)
                self.spent.reading += sum(loaded.reading_seconds for loaded in batch)
                self.spent.decoding += sum(loaded.seconds - loaded.reading_seconds for loaded in batch)
                self.spent.preparing += sum(loaded.processing_seconds for loaded in batch)
                self._events.put(batch)
                del batch  # Only the engine's side decides how long the tensors stay.
        except BaseException as error:
            self._events.put(_AllLoaded(error))

    def _prepare(self, batch: Sequence[LoadedProperty]) -> None:
        began = self._clock()
        question = next((number for number in range(len(self._questions)) if self._part(number, batch)), 0)
        part = [loaded for loaded in self._part(question, batch) if loaded.seen]
        attempt = Attempt(1, self._questions[question][1], question=question)
        # The engine raises the same error again when it describes the batch, and there the ladder decides.
        # BaseException: a panic in a tokenizer is no Exception, and this thread must go on.
        with contextlib.suppress(BaseException):
            if part:
                self._engine.prepare(part, attempt=attempt)
        self.spent.preparing += self._clock() - began

    def _ask(self, loaded: Sequence[LoadedProperty]) -> DescribedBatch:
        began = self._turn(1)
        try:
            described = [answer for part in self._parts(loaded) for answer in self._all_answers(part)]
        finally:
            ended = self._turn(-1)
        with self._counting:
            engine_seconds = sum(row.seconds for row in described)
            self.spent.validating += max(0.0, ended - began - engine_seconds)
        return DescribedBatch(described, ended - began)

    def _all_answers(self, batch: Sequence[LoadedProperty]) -> Iterator[Described]:
        for question, (schema, max_new_tokens) in enumerate(self._questions):
            if part := self._part(question, batch):
                yield from describe_batch(
                    self._engine, schema, part, max_new_tokens, question=question, clock=self._clock
                )

    def _parts(self, batch: Sequence[LoadedProperty]) -> Iterator[Sequence[LoadedProperty]]:
        """The parts of a batch that are asked all questions, one part after another.

        The engine keeps what it computed of the images of as many properties as its memory holds.
        """
        size = self._engine.largest_batch if isinstance(self._engine, SplittingEngine) else None
        if len(self._questions) == 1 or size is None:
            size = len(batch)
        for start in range(0, len(batch), size or 1):
            yield batch[start : start + (size or 1)]

    def _part(self, question: int, batch: Sequence[LoadedProperty]) -> Sequence[LoadedProperty]:
        """The properties of a batch that a question is asked about."""
        to_do = self._to_do[question]
        return batch if to_do is None else [loaded for loaded in batch if loaded.property_id in to_do]

    def _ask_apart(self, loaded: Sequence[LoadedProperty]) -> None:
        try:
            self._events.put(self._ask(loaded))
        except BaseException as error:
            self._events.put(error)

    def _turn(self, change: int) -> float:
        """Change the number of batches that are with the engine, count their time, and return the moment."""
        with self._counting:
            now = self._clock()
            if self._asking:
                self.spent.model += now - self._turned
            self._asking += change
            self._turned = now
        return now
