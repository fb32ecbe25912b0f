"""Feeding an engine: loaded batches in, described batches out, the device never waiting.

What lives here: preparing the next batch beside the model, keeping as many batches under way as the engine
takes, and where the time went. What does not: reading and decoding images (``decode_workers``), what becomes
of one property (``ladder``), the model (the engines). What comes out does not depend on ``batches_at_once``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from resources.engine.ladder import Described, LadderSettings, describe_batch
from resources.engine.protocol import Engine
from resources.images.images import PIXELS_AHEAD, LoadedProperty

if TYPE_CHECKING:
    from resources.engine.schema import DescriptionSchema

_ENDING_SECONDS: Final = 5.0
"""For all threads together. A processor under way cannot be stopped, and a run that is ended has seconds."""

_PIXELS_PREPARED: Final = 64_000_000
"""Pixels of a batch on whose preparation it does not wait for others: that of 64 images of a megapixel."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DescribedBatch:
    """What became of a batch. seconds: from its first question to its last answer."""

    described: list[Described]
    seconds: float


@dataclass
class TimeSpent:
    """Seconds of a feeding so far.

    model: a batch, at least, was with the engine; of these seconds the ladder took validating, summed over
    batches. While none was: waiting_decode, waiting_preparation. Beside the model, in other processes and
    threads, summed up: reading and decoding images, preparing.
    """

    model: float = 0.0
    validating: float = 0.0
    waiting_decode: float = 0.0
    waiting_preparation: float = 0.0
    reading: float = 0.0
    decoding: float = 0.0
    preparing: float = 0.0


class Feeding:
    """Feeds one engine from one iterator of loaded batches. A context manager: leaving closes the engine.

    Threads draw from the iterator and have the next batches prepared beside the model: as many as the engine
    prepares at once and one more, and no more pixels ahead than fit. An engine that takes one batch at once
    is asked in the caller's own thread, where interrupts reach it; one that takes more, in a thread for each
    batch. After an error or an interrupt nothing more is asked, and leaving waits for the threads.

    end_batches: makes the iterator end, or raise, where it waits in another thread.
    """

    def __init__(
        self,
        engine: Engine,
        schema: DescriptionSchema,
        settings: LadderSettings,
        *,
        end_batches: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spent = TimeSpent()
        """Where the time went so far."""
        self._engine = engine
        self._schema = schema
        self._settings = settings
        self._end_batches = end_batches
        self._clock = clock
        self._drawing = threading.Lock()
        # Guards all that follows; notified whenever any of it changes.
        self._changed = threading.Condition()
        self._prepared: dict[int, _Prepared] = {}
        self._drawn = self._taken = 0
        self._pixels_ahead = 0
        self._all_drawn = False
        self._draw_error: BaseException | None = None
        self._asking = 0
        self._turned = clock()
        self._stopped = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
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
        """Describe batch after batch: in their order where one is asked at once, else each when it is done.

        Raises EngineLostError, and what ``batches`` raises, after all that was finished before.
        """
        source = iter(batches)
        for _ in range(self._engine.prepares_at_once):
            self._start("feeding-ahead", lambda: self._prepare_ahead(source))
        return self._one_at_a_time() if self._engine.batches_at_once == 1 else self._several_at_once()

    def _one_at_a_time(self) -> Iterator[DescribedBatch]:
        while True:
            began = self._clock()
            with self._changed:
                self._changed.wait_for(lambda: self._is_ready or self._all_is_taken)
            if not self._is_ready:
                return self._raise_draw_error()
            yield self._ask(self._take(began))

    def _several_at_once(self) -> Iterator[DescribedBatch]:
        under_way: list[_UnderWay] = []
        while True:
            began = self._clock()
            with self._changed:
                self._changed.wait_for(partial(self._can_go_on, under_way))
            # How many batches the engine takes may have changed since: what may be done is asked anew.
            ended = [one for one in under_way if one.has_ended]
            under_way = [one for one in under_way if one not in ended]
            if ended:
                # At once: a batch that waits for a slow one is neither committed nor seen by anybody.
                yield from (one.outcome for one in ended if one.outcome is not None)
                for one in ended:
                    if one.error is not None:
                        raise one.error
            elif self._can_ask(under_way):
                under_way.append(_UnderWay())
                self._start("feeding-batch", partial(self._ask_apart, under_way[-1], self._take(began)))
            elif self._all_is_taken and not under_way:
                return self._raise_draw_error()

    def _can_go_on(self, under_way: Sequence[_UnderWay]) -> bool:
        all_is_done = self._all_is_taken and not under_way
        return any(one.has_ended for one in under_way) or self._can_ask(under_way) or all_is_done

    def _can_ask(self, under_way: Sequence[_UnderWay]) -> bool:
        return len(under_way) < max(1, self._engine.batches_at_once) and self._is_ready

    @property
    def _is_ready(self) -> bool:
        """Whether the next batch in order can be asked about."""
        return self._taken in self._prepared

    @property
    def _all_is_taken(self) -> bool:
        return self._all_drawn and self._taken == self._drawn

    def _start(self, name: str, run: Callable[[], None]) -> None:
        # Daemons: an interrupt while they are waited for must not keep the process from ending.
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _prepare_ahead(self, source: Iterator[Sequence[LoadedProperty]]) -> None:
        """Draw batches and prepare them, beside other threads that do, until there are no more."""
        while (drawn := self._draw(source)) is not None:
            number, loaded = drawn
            del drawn  # Who takes a batch alone decides how long its pixels stay.
            began = self._clock()
            shown = [one for one in loaded if one.images]
            # What is wrong with a batch shows again when it is asked, where the ladder decides about it. All
            # of it: a panic in a tokenizer is no Exception, and its batch would be waited for for ever.
            with contextlib.suppress(BaseException):
                if shown:
                    self._engine.prepare(shown, attempt=self._settings.first_attempt)
            del shown
            with self._changed:
                reading = sum(one.reading_seconds for one in loaded)
                self.spent.reading += reading
                self.spent.decoding += sum(one.seconds for one in loaded) - reading
                self.spent.preparing += self._clock() - began
                self._prepared[number] = _Prepared(loaded, began)
                del loaded
                self._changed.notify_all()

    def _draw(
        self, source: Iterator[Sequence[LoadedProperty]]
    ) -> tuple[int, Sequence[LoadedProperty]] | None:
        """The next batch with its number, when there is room for it; None where there is none."""
        with self._drawing:
            with self._changed:
                self._changed.wait_for(self._has_room_ahead)
                if self._stopped or self._all_drawn:
                    return None
            loaded: Sequence[LoadedProperty] | None = None
            error: BaseException | None = None
            try:
                loaded = next(source, None)
            except BaseException as raised:
                error = raised
            with self._changed:
                if loaded is None:
                    self._all_drawn, self._draw_error = True, error
                    self._changed.notify_all()
                    return None
                number = self._drawn
                self._drawn += 1
                self._pixels_ahead += _pixels(loaded)
                return number, loaded

    def _has_room_ahead(self) -> bool:
        ahead = self._drawn - self._taken
        # One more than is under way: while it waits, the next ones go on.
        at_once = self._engine.prepares_at_once
        fits = ahead <= at_once and self._pixels_ahead < max(PIXELS_AHEAD, at_once * _PIXELS_PREPARED)
        return self._stopped or self._all_drawn or not ahead or fits

    def _raise_draw_error(self) -> None:
        if self._draw_error is not None:
            raise self._draw_error

    def _take(self, began: float) -> Sequence[LoadedProperty]:
        """The batch that is ready, for which the caller has waited since ``began``."""
        with self._changed:
            ready = self._prepared.pop(self._taken)
            self._taken += 1
            self._pixels_ahead -= _pixels(ready.loaded)
            if not self._asking:
                since, now = max(began, self._turned), self._clock()
                decode = min(max(ready.drawn_at - since, 0.0), now - since)
                self.spent.waiting_decode += decode
                self.spent.waiting_preparation += now - since - decode
            self._changed.notify_all()
        return ready.loaded

    def _ask(self, loaded: Sequence[LoadedProperty]) -> DescribedBatch:
        began = self._turn(1)
        try:
            described = describe_batch(self._engine, self._schema, loaded, self._settings, clock=self._clock)
        finally:
            ended = self._turn(-1)
        with self._changed:
            self.spent.validating += max(0.0, ended - began - sum(one.seconds for one in described))
        return DescribedBatch(described, ended - began)

    def _turn(self, change: int) -> float:
        """Count who asks the engine, and the time in which anybody does; the moment of the change."""
        with self._changed:
            now = self._clock()
            if self._asking:
                self.spent.model += now - self._turned
            self._asking += change
            self._turned = now
        return now

    def _ask_apart(self, one: _UnderWay, loaded: Sequence[LoadedProperty]) -> None:
        """Ask in a thread of its own."""
        try:
            outcome = self._ask(loaded)
        except BaseException as error:
            one.error = error
        else:
            one.outcome = outcome
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True)
class _Prepared:
    """A batch that may be asked about. drawn_at: when its images were decoded."""

    loaded: Sequence[LoadedProperty]
    drawn_at: float


@dataclass(eq=False)
class _UnderWay:
    """A batch that a thread asks about, or has asked about."""

    outcome: DescribedBatch | None = None
    error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is anything to hand out."""
        return self.outcome is not None or self.error is not None


def _pixels(loaded: Sequence[LoadedProperty]) -> int:
    return sum(image.shape[0] * image.shape[1] for one in loaded for image in one.images)
