"""Feeding an engine: loaded batches in, described batches out, the device never waiting.

This module prepares the next batch beside the model, keeps as many batches under way as the engine takes, and
counts where the time went. ``worker_pool`` loads images, and ``ladder`` decides about each property. The
descriptions do not depend on ``batches_at_once``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from vlm_engine.images.images import LoadedProperty
from vlm_engine.ladder import Described, describe_batch
from vlm_engine.protocol import Attempt, Engine

if TYPE_CHECKING:
    from vlm_engine.schema import DescriptionSchema

_ENDING_SECONDS: Final = 5.0
"""For all threads together. A processor under way cannot be stopped, and a run that ends has only seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DescribedBatch:
    """The results of a batch. seconds: from its first question to its last answer."""

    described: list[Described]
    seconds: float


@dataclass
class TimeSpent:
    """Seconds of a feeding so far.

    model: at least one batch was with the engine; validating: of these, the ladder's own, summed over
    batches. waiting: no batch was with the engine, because none was loaded. Beside the model, in other
    processes and threads, summed up: reading and decoding images, and preparing (processor and joining).
    """

    model: float = 0.0
    validating: float = 0.0
    waiting: float = 0.0
    reading: float = 0.0
    decoding: float = 0.0
    preparing: float = 0.0


@dataclass(frozen=True)
class _AllDrawn:
    """There are no more batches: the iterator has ended, or raised."""

    error: BaseException | None


_Event = Sequence[LoadedProperty] | _AllDrawn | DescribedBatch | BaseException


class Feeding:
    """Feeds one engine from one iterator of loaded batches. A context manager: leaving closes the engine.

    A thread draws from the iterator and has the next batch prepared while the engine works on another. An
    engine that takes one batch at once is asked in the caller's own thread, where interrupts reach it; an
    engine that takes more, in a thread for each batch. After an error or an interrupt nothing more is asked,
    and leaving waits for the threads.

    end_batches: makes the iterator end, or raise, where it waits in another thread.
    """

    def __init__(
        self,
        engine: Engine,
        schema: DescriptionSchema,
        max_new_tokens: int,
        *,
        end_batches: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spent = TimeSpent()
        """Where the time went so far."""
        self._engine = engine
        self._schema = schema
        self._max_new_tokens = max_new_tokens
        self._end_batches = end_batches
        self._clock = clock
        self._events: SimpleQueue[_Event] = SimpleQueue()
        """Loaded batches, in order, and the outcomes of batches that other threads have asked about."""
        self._room = threading.Semaphore(1)
        """Acquired for each batch that is drawn, released when the engine is asked about it."""
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
            self._end_batches()
        finally:
            self._engine.close()
        deadline = time.monotonic() + _ENDING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning(
                    "Thread %s is still at work; it ends by itself, or with the process.", thread.name
                )

    def described(self, batches: Iterable[Sequence[LoadedProperty]]) -> Iterator[DescribedBatch]:
        """Describe batch after batch: in order where the engine takes one at once, else each when it is done.

        May be called again once all are described. Raises EngineLostError, and the errors of ``batches``,
        after all batches that were finished before.
        """
        source = iter(batches)
        self._start("feeding-ahead", lambda: self._draw_ahead(source))
        return self._described()

    def _described(self) -> Iterator[DescribedBatch]:
        in_this_thread = self._engine.batches_at_once == 1
        loaded: deque[Sequence[LoadedProperty]] = deque()
        under_way = 0
        all_drawn: _AllDrawn | None = None
        while True:
            # How many batches the engine takes may change at any moment.
            while loaded and under_way < max(1, self._engine.batches_at_once):
                batch = loaded.popleft()
                self._room.release()
                if in_this_thread:
                    yield self._ask(batch)
                else:
                    under_way += 1
                    self._start("feeding-batch", lambda batch=batch: self._ask_apart(batch))  # type: ignore[misc]
                del batch
            if all_drawn is not None and not loaded and not under_way:
                if all_drawn.error is not None:
                    raise all_drawn.error
                return
            event = self._next_event(waiting=not under_way)
            match event:
                case _AllDrawn():
                    all_drawn = event
                case DescribedBatch():
                    under_way -= 1
                    # At once: a batch that waited for a slow one would be neither committed nor counted.
                    yield event
                case BaseException():
                    raise event
                case _:
                    loaded.append(event)

    def _next_event(self, *, waiting: bool) -> _Event:
        began = self._clock()
        event = self._events.get()
        if waiting:
            self.spent.waiting += self._clock() - began
        return event

    def _start(self, name: str, run: Callable[[], None]) -> None:
        # Daemons: threads that are still at work after an interrupt must not keep the process alive.
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads = [*(started for started in self._threads if started.is_alive()), thread]
        thread.start()

    def _draw_ahead(self, source: Iterator[Sequence[LoadedProperty]]) -> None:
        """Draw batches and prepare them, one ahead of the engine, until there are no more."""
        try:
            while self._room.acquire() and not self._stopped:
                batch = next(source, None)
                if batch is None:
                    self._room.release()  # For a next round of batches.
                    self._events.put(_AllDrawn(None))
                    return
                self._prepare([loaded for loaded in batch if loaded.seen])
                self.spent.reading += sum(loaded.reading_seconds for loaded in batch)
                self.spent.decoding += sum(loaded.seconds - loaded.reading_seconds for loaded in batch)
                self.spent.preparing += sum(loaded.processing_seconds for loaded in batch)
                self._events.put(batch)
                del batch  # Only the engine's side decides how long the tensors stay.
        except BaseException as error:
            self._events.put(_AllDrawn(error))

    def _prepare(self, batch: Sequence[LoadedProperty]) -> None:
        began = self._clock()
        # The engine raises the same error again when it describes the batch, and there the ladder decides.
        # BaseException: a panic in a tokenizer is no Exception, and this thread must go on.
        with contextlib.suppress(BaseException):
            if batch:
                self._engine.prepare(batch, attempt=Attempt(1, self._max_new_tokens))
        self.spent.preparing += self._clock() - began

    def _ask(self, loaded: Sequence[LoadedProperty]) -> DescribedBatch:
        began = self._turn(1)
        try:
            described = describe_batch(
                self._engine, self._schema, loaded, self._max_new_tokens, clock=self._clock
            )
        finally:
            ended = self._turn(-1)
        with self._counting:
            engine_seconds = sum(row.seconds for row in described)
            self.spent.validating += max(0.0, ended - began - engine_seconds)
        return DescribedBatch(described, ended - began)

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
