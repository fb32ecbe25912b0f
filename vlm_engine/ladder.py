"""The retry ladder: from a batch of loaded properties to one terminal result for each.

This module decides which answer counts, how a property is asked again, when it has failed, which failures
another try may cure, and when a partition must stop before it fills with garbage. All but the last decide
about one property; its neighbours in the batch do not matter. schema.py says whether a text is a description,
and ``vlm_assets/assets/partition.py`` how often a failed row is tried again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from vlm_durable.commands import command
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_durable.wording import counted
from vlm_engine.confidence import Confidence, confidence_of
from vlm_engine.devices.left_out import ImpossibleResultError
from vlm_engine.images.images import TRANSIENT_IMAGE_KINDS, ImageFailure, LoadedProperty
from vlm_engine.protocol import (
    Answer,
    Attempt,
    Engine,
    EngineError,
    EngineLostError,
    ImpossibleScoresError,
    InvalidDescription,
    RequestTooLargeError,
)

if TYPE_CHECKING:
    from vlm_engine.schema import DescriptionSchema

RAW_TEXT_LIMIT = 4000
"""Characters of a refused answer that are kept in the row."""

TRANSIENT_KINDS: Final[frozenset[str]] = TRANSIENT_IMAGE_KINDS | {
    "engine_error",
    "impossible_scores",
    "out_of_memory",
}
"""Kinds of failed rows that another try may cure: their cause was the moment, the device or the disk.

All others need a person. After the whole ladder an answer (``truncated``, ``repetition``, ``invalid_json``,
``schema_mismatch``) would come out the same again: seeds derive from the property and the attempt. Another
prompt or limit may help, and a person chooses those.
"""

_TEMPERATURE: Final = 0.7
"""Temperature of the attempt that is not greedy."""

_ERROR_LIMIT = 500
_REPEATED_UNIT = 100
_REPEATED_TAIL = 48
_REPEATS = 4

WINDOW = 40
"""Answers of the model that are judged together; fewer are not judged."""

_SHOWN = 300


@dataclass(frozen=True)
class Described:
    """The terminal result for one property.

    error_kind: ``invalid_json``, ``schema_mismatch``, ``truncated``, ``repetition``, ``prompt_too_long``,
    ``out_of_memory``, ``impossible_scores``, ``engine_error``; without any readable image ``no_images`` or
    the commonest kind of image failure. raw_text: the last answer, where it failed. images_seen: images in
    the last attempt. fewer_images: why the last attempt had fewer images than could be read; None: it had
    all. prompt_tokens, output_tokens: over all attempts. seconds: this property's share of the engine's time.
    confidence: of each field of the description, where the engine knows it. question: of those that the
    engine was made for, by its place.
    """

    property_id: str
    ordinal: int
    status: Literal["ok", "failed"]
    error_kind: str | None
    error: str | None
    description: dict[str, Any] | None
    raw_text: str | None
    attempts: int
    images_seen: int
    images_failed: tuple[ImageFailure, ...]
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None
    seconds: float
    fewer_images: str | None = None
    confidence: Confidence | None = field(default=None, compare=False)
    question: int = 0


def describe_batch(
    engine: Engine,
    schema: DescriptionSchema,
    batch: Sequence[LoadedProperty],
    max_new_tokens: int,
    *,
    question: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> list[Described]:
    """One terminal result a property, in order. Raises EngineLostError, and nothing else for any content.

    max_new_tokens: of the first attempt; a truncated answer gets twice as many. question: see Attempt.
    """
    climbs = [_Climb(loaded, Attempt(1, max_new_tokens, question=question)) for loaded in batch]
    for climb in climbs:
        if not climb.loaded.seen:
            climb.result = _without_images(climb.loaded, question)
    while waiting := [climb for climb in climbs if climb.result is None]:
        attempt = waiting[0].attempt
        together = [climb for climb in waiting if climb.attempt == attempt]
        for climb, outcome in zip(together, _ask(engine, together, attempt, clock), strict=True):
            climb.go_on(outcome, schema, max_new_tokens)
    return [climb.result for climb in climbs if climb.result is not None]


@dataclass
class _Climb:
    """One property on its way up the ladder."""

    loaded: LoadedProperty
    attempt: Attempt
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    fewer_images: str | None = None
    result: Described | None = field(default=None)

    def go_on(self, outcome: _Outcome, schema: DescriptionSchema, max_new_tokens: int) -> None:
        """Go on after an attempt, to the result or the next attempt."""
        self.seconds += outcome.seconds
        answer = outcome.answer
        if answer is None:
            self._climb_or_fail(outcome.kind, outcome.error, None, max_new_tokens, fitting=outcome.images)
            return
        self.prompt_tokens += answer.prompt_tokens
        self.output_tokens += answer.output_tokens
        try:
            description = schema.parse(answer.text)
        except InvalidDescription as verdict:
            kind, error = _kind_of(answer, verdict)
            self._climb_or_fail(kind, error, answer, max_new_tokens)
        else:
            confidence = confidence_of(schema.fields, answer.text, answer.tokens)
            self._end("ok", None, None, description, answer, confidence)

    def _climb_or_fail(
        self,
        kind: str,
        error: str,
        answer: Answer | None,
        max_new_tokens: int,
        fitting: int | None = None,
    ) -> None:
        following = next_attempt(kind, self.attempt, self.loaded.seen, max_new_tokens, fitting)
        if following is None:
            self._end("failed", kind, error[:_ERROR_LIMIT], None, answer)
            return
        if following.images != self.attempt.images:
            self.fewer_images = f"{kind}: {error}"[:_ERROR_LIMIT]
        self.attempt = following

    def _end(
        self,
        status: Literal["ok", "failed"],
        kind: str | None,
        error: str | None,
        description: dict[str, Any] | None,
        answer: Answer | None,
        confidence: Confidence | None = None,
    ) -> None:
        self.result = Described(
            property_id=self.loaded.property_id,
            ordinal=self.loaded.ordinal,
            status=status,
            error_kind=kind,
            error=error,
            description=description,
            raw_text=answer.text[:RAW_TEXT_LIMIT] if answer is not None and status == "failed" else None,
            attempts=self.attempt.number,
            images_seen=min(self.loaded.seen, self.attempt.images or self.loaded.seen),
            images_failed=self.loaded.failed,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            finish_reason=answer.finish_reason if answer is not None else None,
            seconds=self.seconds,
            fewer_images=self.fewer_images,
            confidence=confidence,
            question=self.attempt.question,
        )


def next_attempt(
    kind: str, attempt: Attempt, images: int, max_new_tokens: int, fitting: int | None = None
) -> Attempt | None:
    """The next rung for a property with so many images whose attempt failed with this kind; None: give up.

    More tokens, only where tokens ran out; then another temperature; then half of the images, greedily. A
    request that is too large gets ``fitting`` images, where that is known, or else half as many, down to one.
    Rungs that could change nothing are left out.
    """
    shown = images if attempt.images is None else min(images, attempt.images)
    fewer = replace(attempt, number=attempt.number + 1, temperature=0.0, images=(shown + 1) // 2)
    if kind in ("prompt_too_long", "out_of_memory"):
        if fitting is not None:
            fewer = replace(fewer, images=max(1, min(fitting, shown - 1)))
        return fewer if shown > 1 else None
    if kind in ("engine_error", "impossible_scores") or attempt.images is not None:
        return None
    more_tokens = 2 * max_new_tokens
    if kind == "truncated" and attempt.max_new_tokens < more_tokens:
        return replace(attempt, number=attempt.number + 1, max_new_tokens=more_tokens)
    if attempt.temperature == 0:
        return replace(attempt, number=attempt.number + 1, temperature=_TEMPERATURE)
    return fewer if shown > 1 else None


@dataclass(frozen=True)
class _Outcome:
    """One attempt for one property: an answer, or a kind of error, its text, and how many images fit."""

    seconds: float
    answer: Answer | None = None
    kind: str = ""
    error: str = ""
    images: int | None = None


def _ask(
    engine: Engine, climbs: Sequence[_Climb], attempt: Attempt, clock: Callable[[], float]
) -> list[_Outcome]:
    """Ask for all at once; where that raises, one by one, so that only the culprit fails."""
    began = clock()
    answers: Sequence[Answer | Exception]
    try:
        answers = engine.describe([climb.loaded for climb in climbs], attempt=attempt)
        if len(answers) != len(climbs):
            raise RuntimeError(
                f"the engine gave {counted(len(answers), 'answers')} for {counted(len(climbs), 'properties')}"
            )
    except (EngineLostError, StoreAwayError):  # An attempt with fewer images fetches these again.
        raise
    except MemoryError as error:
        raise EngineLostError("this process ran out of memory while describing; end it") from error
    except Exception as error:  # A model's code may raise anything for one property. The others go on.
        if len(climbs) > 1:
            return [outcome for climb in climbs for outcome in _ask(engine, [climb], attempt, clock)]
        answers = [error]
    share = (clock() - began) / len(climbs)
    return [_outcome(answer, share) for answer in answers]


def _outcome(answer: Answer | Exception, seconds: float) -> _Outcome:
    if isinstance(answer, Answer):
        return _Outcome(seconds, answer=answer)
    if isinstance(answer, RequestTooLargeError):
        return _Outcome(seconds, kind=answer.kind, error=str(answer), images=answer.images)
    if isinstance(answer, ImpossibleScoresError):
        return _Outcome(seconds, kind="impossible_scores", error=str(answer))
    # An engine's own message about one property needs no class name before it.
    message = str(answer) if type(answer) is EngineError else f"{type(answer).__name__}: {answer}"
    return _Outcome(seconds, kind="engine_error", error=message)


def _kind_of(answer: Answer, verdict: InvalidDescription) -> tuple[str, str]:
    """The kind and text of a refused answer. A cut explains more than the parser's error after it."""
    if answer.finish_reason == "stop":
        return verdict.kind, verdict.message
    if (unit := repeated_tail(answer.text)) is not None:
        return (
            "repetition",
            f"went on repeating {unit[:60]!r} until {counted(answer.output_tokens, 'tokens')} were spent",
        )
    return "truncated", f"not finished after {counted(answer.output_tokens, 'tokens')}"


def repeated_tail(text: str) -> str | None:
    """The unit that a text's end repeats, at least four times and for 48 characters, or None."""
    for width in range(1, min(_REPEATED_UNIT, len(text) // _REPEATS) + 1):
        length = max(_REPEATED_TAIL, width * _REPEATS)
        tail = text[-length:]
        if len(tail) == length and tail[width:] == tail[:-width]:
            return tail[-width:]
    return None


def _without_images(loaded: LoadedProperty, question: int) -> Described:
    kind, error = "no_images", "the catalogue lists no image of this property"
    if loaded.failed:
        kind = Counter(failure.kind for failure in loaded.failed).most_common(1)[0][0]
        example = next(failure for failure in loaded.failed if failure.kind == kind)
        shown = counted(len(loaded.failed), "images")
        error = f"none of {shown} can be shown; {example.uri}: {example.error}"
    return Described(
        property_id=loaded.property_id,
        ordinal=loaded.ordinal,
        status="failed",
        error_kind=kind,
        error=error[:_ERROR_LIMIT],
        description=None,
        raw_text=None,
        attempts=0,
        images_seen=0,
        images_failed=loaded.failed,
        prompt_tokens=0,
        output_tokens=0,
        finish_reason=None,
        seconds=0.0,
        question=question,
    )


class GarbageOutputError(RuntimeError):
    """Too many of the model's last answers are no descriptions; what is committed stays."""


class AnswerGuard:
    """Watches the model's answers in one run. most: the share of the last WINDOW that may be refused."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._last: deque[Described] = deque(maxlen=WINDOW)

    def count(self, described: Sequence[Described]) -> None:
        """Count the answers of a batch. Raises GarbageOutputError.

        A property without a readable image never reached the model (it has no attempt) and does not count.
        Where most were refused for impossible scores, the cause is an ImpossibleResultError, which is noted
        against the device.
        """
        self._last.extend(row for row in described if row.attempts)
        refused = [row for row in self._last if row.status == "failed"]
        if len(self._last) < WINDOW or len(refused) <= self._most * WINDOW:
            return
        counts = Counter(str(row.error_kind) for row in refused)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        impossible = counts["impossible_scores"]
        cause = ImpossibleResultError(
            f"The model computed NaN or infinity for {impossible} of the last {counted(WINDOW, 'properties')}"
        )
        example = refused[-1]
        raise GarbageOutputError(
            f"{len(refused)} of the model's last {counted(WINDOW, 'answers')} are no descriptions"
            f" ({kinds}), so this"
            f" partition was stopped before it fills with failed rows. The last one, {example.property_id!r}:"
            f" {example.error} It said: {(example.raw_text or 'nothing')[:_SHOWN]!r}. What is committed"
            f" stays. Look at the device ({command('devices')}, `nvidia-smi`), and at the model, its"
            " revision,"
            f" the prompt and the schema with {command('compare')}; then materialize the partition with"
            " `retry_failed: true`. If such answers are to be expected: VLM_ASSETS_FAILED_SHARE=1."
        ) from (cause if 2 * impossible > len(refused) else None)
