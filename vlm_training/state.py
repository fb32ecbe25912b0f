"""The progress of a training, and whether a step may be taken: all that a checkpoint holds beside tensors.

Whether a step may be taken depends on its loss, its gradient and these numbers alone.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

SKIPS_ALLOWED: Final = 3
"""Batches that may be skipped. At the next bad batch the training stops, and a person looks at the data."""

_WINDOW: Final = 64
_WINDOW_AT_LEAST: Final = 16
_SPIKE_TIMES, _SPIKE_PLUS = 3.0, 1.0


@dataclass
class TrainingState:
    """step: finished optimizer steps. consumed: samples of finished and of skipped batches.

    skips: the first sample number of each skipped batch, with the ids of its properties. losses, samples:
    of each finished step. epochs: what was measured at the end of each. best, best_epoch: the lowest metric
    so far. seconds: of training. starts: how often it was started. order: a digest of the order of the
    samples. count: samples of an epoch.
    """

    step: int = 0
    consumed: int = 0
    skips: dict[int, list[str]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    best: float | None = None
    best_epoch: int = 0
    seconds: float = 0.0
    starts: int = 0
    order: str = ""
    count: int = 0

    def as_json(self) -> dict[str, Any]:
        """All but the history, which a checkpoint keeps as tensors."""
        return {name: value for name, value in asdict(self).items() if name not in ("losses", "samples")}

    @classmethod
    def from_json(cls, content: dict[str, Any], losses: list[float], samples: list[int]) -> TrainingState:
        """The state from ``as_json`` and the history. Raises TypeError if a name is missing or unknown."""
        skips = {int(start): ids for start, ids in content["skips"].items()}
        if missing := {field.name for field in fields(cls)} - {*content, "losses", "samples"}:
            raise TypeError(f"the state lacks {', '.join(sorted(missing))}")
        return cls(**{**content, "skips": skips, "losses": losses, "samples": samples})

    def count_step(self, loss: float, *, consumed: int) -> None:
        """Count a finished step."""
        self.step += 1
        self.consumed = consumed
        self.losses.append(loss)
        self.samples.append(consumed)

    def note_metric(self, epoch: int, metric: float) -> bool:
        """Note the metric of an epoch; lower is better. Returns whether it is the best so far."""
        is_best = self.best is None or metric < self.best
        if is_best:
            self.best, self.best_epoch = metric, epoch
        return is_best

    def refusal(self, loss: float, norm: float) -> str | None:
        """Why a step with this loss and this norm of the gradient must not be taken; None if it may."""
        if not math.isfinite(loss):
            return f"its loss is {loss}"
        if not math.isfinite(norm):
            return f"its gradient is {norm}"
        if norm == 0.0:
            return "its gradient is dead: every number of it is zero"
        last = self.losses[-_WINDOW:]
        if len(last) >= _WINDOW_AT_LEAST:
            median = statistics.median(last)
            if loss > _SPIKE_TIMES * median + _SPIKE_PLUS:
                return f"its loss is {loss:.3g} where {median:.3g} is usual (median of {len(last)} steps)"
        return None


def learning_rate(peak: float, step: int, total: int) -> float:
    """The rate at a step: linear warm-up over a fifteenth, then half a cosine down to a fiftieth."""
    warm_up = max(1, min(60, total // 15))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    along = (step - warm_up) / max(1, total - warm_up)
    return peak * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, along))) / 2)
