"""What stops the work on a partition while it runs: images that are away, answers that are no descriptions.

What lives here: telling a few images that are gone from a disk or a store that is away, which would make a
failed row of every property; and giving up before a partition fills with garbage. What does not: why one
image cannot be shown (``resources/images``), what becomes of one property (``resources/engine/ladder.py``),
the wait for a disk that comes back (``materialize.py``), and the checks of a finished file (``checks.py``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from resources.devices.left_out import ImpossibleResultError
from resources.engine.ladder import Described
from resources.store.bucket import StoreAwayError
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ranges import PropertyRange

PROBES = 2000
"""Images of a range that are tried, evenly spread, until one can be read."""

WHOLE_RANGE = 40
"""Properties of a range from which on all of them without an image are no deletion that goes unasked."""

_OTHER_RANGES = 16
_LOST = frozenset({"missing", "denied", "io_error"})
_LOST_FOR_NOW = frozenset({"missing", "denied"})
"""Kinds of which a file that can be opened now says that it has come back; a bad sector stays one."""

WINDOW = 40
"""Answers of the model that are looked at together; before so many nothing is judged."""

_SHOWN = 300


class ImagesAwayError(RuntimeError):
    """The images are away, as those of a disk that is not mounted: no property has failed for that."""


@dataclass
class ImagesWatch:
    """Watches the images of one range. properties: the catalogue's rows of it, in order.

    range_may_be_gone: a person lets a partition of failed rows alone be published, so a range whose images
    are all gone counts as deleted while other ranges have theirs.
    """

    catalog: Catalog
    wanted: PropertyRange
    properties: pa.Table
    range_may_be_gone: bool
    _known: str | None = field(default=None, init=False)

    def look(self) -> None:
        """Return where an image of the range can be read, or none could be at ingest.

        Raises ImagesAwayError.
        """
        try:
            if not self._are_away():
                return
        except StoreAwayError as error:
            raise ImagesAwayError(f"The images are away: {error}") from error
        uri = next(_spread(self.properties))
        raise ImagesAwayError(
            f"The images are away: none of those of {self.wanted.key} that could be read when they were"
            f" catalogued can be read now, such as {uri} ({self._why_not(uri)}). No property has failed for"
            f" that, and what is committed stays. {self.catalog.images.advice} Once they are back, the"
            " partition goes on by itself. If these images are gone for good, take them out of the catalogue:"
            " `vlm-assets ingest SOURCE --update`."
        )

    def take(self, described: Sequence[Described]) -> None:
        """Judge a batch before its rows are taken. Raises ImagesAwayError, and then none of them may be."""
        lost = [
            (failure.uri, failure.kind)
            for one in described
            for failure in one.images_failed
            if failure.kind in _LOST and self._was_readable(one.ordinal, failure.uri)
        ]
        if not lost:
            return
        self.look()
        back = next((uri for uri, kind in lost if kind in _LOST_FOR_NOW and not self._why_not(uri)), None)
        if back is not None:
            raise ImagesAwayError(
                f"The images were away for a moment: {back} could not be read, and can be now. Nothing of"
                " this batch was taken, no property has failed for that, and what is committed stays. The"
                f" partition goes on by itself. If that repeats, look at {self.catalog.image_root}."
            )

    def _are_away(self) -> bool:
        if self._known is not None and self._why_not(self._known) is None:
            return False
        none_was_there = True
        for uri in _spread(self.properties):
            none_was_there = False
            if self._why_not(uri) is None:
                self._known = uri
                return False
        if none_was_there:
            return False
        had_images = pc.sum(pc.greater(pc.list_value_length(self.properties["image_uris"]), 0)).as_py()
        if had_images >= WHOLE_RANGE and not self.range_may_be_gone:
            return True
        return not any(self._why_not(uri) is None for uri in self._of_other_ranges())

    def _of_other_ranges(self) -> Iterator[str]:
        """An image each of some of the other ranges: a small range may well be deleted as a whole."""
        others = [one for one in self.catalog.ranges if one != self.wanted]
        for at in _evenly(len(others), _OTHER_RANGES):
            uri = next(_spread(self.catalog.slice(others[at])), None)
            if uri is not None:
                yield uri

    def _was_readable(self, ordinal: int, uri: str) -> bool:
        row = ordinal - self.wanted.start
        uris, sizes = (self.properties[name][row].as_py() for name in ("image_uris", "image_bytes"))
        return any(one == uri and size is not None for one, size in zip(uris, sizes, strict=True))

    def _why_not(self, uri: str) -> str | None:
        return self.catalog.images.why_not(uri)


def _spread(properties: pa.Table) -> Iterator[str]:
    """Up to PROBES images that could be read at ingest, evenly spread."""
    uris = pc.list_flatten(properties["image_uris"])
    readable = np.flatnonzero(pc.is_valid(pc.list_flatten(properties["image_bytes"])).to_numpy())
    for at in _evenly(len(readable), PROBES):
        yield uris[int(readable[at])].as_py()


def _evenly(count: int, most: int) -> Iterator[int]:
    picked = min(count, most)
    return (number * count // picked for number in range(picked))


class GarbageOutputError(RuntimeError):
    """Too many of the model's last answers are no descriptions; what is committed stays."""


class AnswerGuard:
    """Watches the model's answers in one run. most: share of the last WINDOW that may be refused."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._last: deque[Described] = deque(maxlen=WINDOW)

    def take(self, described: Sequence[Described]) -> None:
        """Count the answers of a batch. Raises GarbageOutputError.

        A property without a readable image never reached the model (it has no attempt) and does not count.
        """
        self._last.extend(one for one in described if one.attempts)
        refused = [one for one in self._last if one.status == "failed"]
        if len(self._last) < WINDOW or len(refused) <= self._most * WINDOW:
            return
        kinds = ", ".join(
            f"{count} {kind}" for kind, count in Counter(str(one.error_kind) for one in refused).most_common()
        )
        example = refused[-1]
        raise GarbageOutputError(
            f"{len(refused)} of the model's last {WINDOW} answers are no descriptions ({kinds}), so this"
            f" partition was stopped before it fills with failed rows. The last one, {example.property_id!r}:"
            f" {example.error} It said: {(example.raw_text or 'nothing')[:_SHOWN]!r}. What is committed"
            " stays. Look at the device (`vlm-assets devices`, `nvidia-smi`), and at the model, its revision,"
            " the prompt and the schema with `vlm-assets try`; then materialize the partition with"
            " `retry_failed: true`. If such answers are to be expected: VLM_ASSETS_INVALID_SHARE_STOP=1."
        )


def refuse_unsound(ids: Sequence[str], vectors: npt.NDArray[np.float32], device: str) -> None:
    """Refuse vectors [ids, width] of which one is not finite, or zero. Raises ImpossibleResultError."""
    with np.errstate(all="ignore"):
        sound = np.isfinite(vectors).all(axis=1) & (np.abs(vectors).max(axis=1, initial=0.0) > 0)
    if sound.all():
        return
    first = [ids[row] for row in np.flatnonzero(~sound)[:5]]
    raise ImpossibleResultError(
        f"{int((~sound).sum())} of {len(ids)} vectors computed on {device} are zero or not finite (first:"
        f" {', '.join(map(repr, first))}). Nothing of this batch was taken; what is committed stays. Look at"
        " the device (`nvidia-smi`, ECC errors), which comes last from now on; where another one gives the"
        " same, at the embedding model. Materialize the partition again: it goes on from here."
    )
