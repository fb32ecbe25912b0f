"""Stopping a partition before it fills with garbage: answers that are no descriptions, vectors that are none.

What lives here: when the work on a partition is given up, while it runs, and what the person reads. What does
not: what becomes of one property (``resources/engine/ladder.py``), and the checks of a finished file
(``checks.py``). Only what the model is to blame for counts: bad images make no garbage.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from resources.devices.left_out import ImpossibleResultError
from resources.engine.ladder import Described

WINDOW = 40
"""Answers of the model that are looked at together; before so many nothing is judged."""

_SHOWN = 300


class GarbageOutputError(RuntimeError):
    """Too many of the model's last answers are no descriptions; what is committed stays."""


class UnsoundVectorsError(ImpossibleResultError):
    """Vectors that are not numbers, or zero; nothing of their batch was taken. The device is suspected."""


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
    """Refuse vectors [ids, width] of which one is not finite, or zero. Raises UnsoundVectorsError."""
    with np.errstate(all="ignore"):
        sound = np.isfinite(vectors).all(axis=1) & (np.abs(vectors).max(axis=1, initial=0.0) > 0)
    if sound.all():
        return
    first = [ids[row] for row in np.flatnonzero(~sound)[:5]]
    raise UnsoundVectorsError(
        f"{int((~sound).sum())} of {len(ids)} vectors computed on {device} are zero or not finite (first:"
        f" {', '.join(map(repr, first))}). Nothing of this batch was taken; what is committed stays. Look at"
        " the device (`nvidia-smi`, ECC errors), which comes last from now on; where another one gives the"
        " same, at the embedding model. Materialize the partition again: it goes on from here."
    )
