"""The statistics of confidences, pure: curves that calibrate, thresholds that keep a promise, samples.

Nothing here reads a file. ``confidences``: from 0 to 1, raw, as the rows have them. ``right``: whether each
answer is right, as a person or a truth file says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

GRID: Final = (
    0.0, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.825, 0.85, 0.875, 0.9, 0.91, 0.92, 0.93, 0.94,
    0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 0.9995, 0.9999,
)  # fmt: skip
"""The thresholds that are tested, fixed for ever. They also cut confidences into cells that are counted."""

FIRST_LOOK: Final = 300
"""Labels of the first look. Each later look has twice as many, and half of the risk before it."""

_START: Final = 1.25
"""The tests start at the highest threshold above which this many times the fewest labels are expected."""

BINS: Final = 10
"""Bins of a reliability diagram and of the calibration error, each with as many labels as the others."""

_FOLDS: Final = 5


def cell_counts(confidences: Floats) -> Counts:
    """How many confidences lie in each cell of the grid."""
    # The number of the cell of each: from a threshold of the grid up to the next.
    cells = np.clip(np.searchsorted(GRID, confidences, side="right") - 1, 0, None)
    return np.bincount(cells, minlength=len(GRID)).astype(np.int64)


# --- A promise ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """One look at the labels: with exactly so many, at this risk that it promises too much."""

    labels: int
    risk: float


def looks(risk: float) -> Iterator[Look]:
    """The schedule of looks at one field's labels: 300, 600, 1200 ..., whose risks sum up to ``risk``."""
    labels = FIRST_LOOK
    while True:
        risk /= 2
        yield Look(labels, risk)
        labels *= 2


def labels_needed(target: float, risk: float) -> int:
    """The fewest labels above a threshold that can show a share of at least the target: all of them right."""
    return math.ceil(math.log(risk) / math.log(target))


def next_look(labels: int, *, target: float, risk: float) -> Look:
    """The first later look that can promise the target. risk: of the field, over all looks."""
    return next(
        planned
        for planned in looks(risk)
        if planned.labels > labels and planned.labels >= labels_needed(target, planned.risk)
    )


class Certified(NamedTuple):
    """The lowest threshold that a look shows to be good. right, labels: above the threshold."""

    threshold: float
    right: int
    labels: int


def certify(
    confidences: Floats, right: Flags, population: Counts, *, target: float, risk: float
) -> Certified | None:
    """The lowest threshold above which at least the target's share of all answers is right; None if none is.

    The labels are a random sample of a population. population: the cell counts of all of its answers. They
    are known without a label, and choose the threshold at which the tests start. Each test is exact (Clopper
    and Pearson 1934) at the whole risk. They go down the grid and end at the first that fails, so the chance
    that any threshold that passes is too low is at most the risk: fixed sequence testing, as in "Learn
    then Test" (Angelopoulos et al. 2021).
    """
    from scipy.stats import binom

    # For each threshold of the grid, the labels and the right ones at or above it.
    above = np.cumsum(cell_counts(confidences)[::-1])[::-1]
    right_above = np.cumsum(cell_counts(confidences[right])[::-1])[::-1]
    expected = np.cumsum(population[::-1])[::-1] / max(1, population.sum()) * len(confidences)
    enough = np.flatnonzero(expected >= _START * labels_needed(target, risk))
    start = int(enough[-1]) if len(enough) else 0
    # The chance of so many right ones, or more, if the share were just below the target.
    chances = np.where(above > 0, binom.sf(right_above - 1, above, target), 1.0)
    certified = None
    for place in range(start, -1, -1):
        if chances[place] > risk:
            break
        certified = Certified(GRID[place], int(right_above[place]), int(above[place]))
    return certified


# --- Calibration -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """How often answers are right, over their raw confidence: straight between knots, and never falling."""

    confidences: tuple[float, ...]
    shares: tuple[float, ...]

    @classmethod
    def fit(cls, confidences: Floats, right: Flags, weights: Floats) -> Self:
        """The isotonic curve through the labels. Equal confidences count as one point."""
        from scipy.optimize import isotonic_regression

        points, of_point = np.unique(confidences, return_inverse=True)
        sizes = np.bincount(of_point, weights)
        means = np.bincount(of_point, weights * right) / sizes
        shares = isotonic_regression(means, weights=sizes).x
        # A level part needs its two ends alone.
        inner = np.zeros(len(points), bool)
        inner[1:-1] = (shares[1:-1] == shares[:-2]) & (shares[1:-1] == shares[2:])
        return cls(tuple(points[~inner].tolist()), tuple(shares[~inner].tolist()))

    def calibrated(self, confidences: Floats) -> Floats:
        """The share of right answers that belongs to each confidence."""
        return np.interp(confidences, self.confidences, self.shares)


def cross_calibrated(confidences: Floats, right: Flags, weights: Floats) -> Floats:
    """Each label's calibrated confidence, by a curve of the other labels: five folds, in their order."""
    calibrated = np.empty(len(confidences))
    fold = np.arange(len(confidences)) % _FOLDS
    for number in range(_FOLDS):
        own = fold == number
        if own.any():
            curve = Curve.fit(confidences[~own], right[~own], weights[~own])
            calibrated[own] = curve.calibrated(confidences[own])
    return calibrated


@dataclass(frozen=True)
class Bin:
    """A bar of a reliability diagram: mean confidence, share of right answers, and weight of all labels."""

    confidence: float
    share: float
    weight: float


def reliability(confidences: Floats, right: Flags, weights: Floats) -> list[Bin]:
    """Labels in bins of as many labels, by confidence. Equal confidences are never in two bins."""
    edges = np.unique(np.quantile(confidences, np.linspace(0, 1, BINS + 1)[1:-1]))
    of_bin = np.searchsorted(edges, confidences, side="left")
    bins = []
    for number in np.unique(of_bin):
        own = of_bin == number
        size = float(weights[own].sum())
        if size > 0:
            mean = float(np.average(confidences[own], weights=weights[own]))
            share = float(np.average(right[own], weights=weights[own]))
            bins.append(Bin(mean, share, size / float(weights.sum())))
    return bins


def calibration_error(bins: list[Bin]) -> float:
    """The expected calibration error: how far confidence and share of right answers are apart, on average."""
    return sum(bin_.weight * abs(bin_.confidence - bin_.share) for bin_ in bins)


# --- Samples -----------------------------------------------------------------------------------------


def label_worth(confidences: Floats, threshold: float | None) -> Floats:
    """How much the label of an answer of such a confidence teaches, from 0 to 1; NaN stays NaN.

    Near the threshold labels say whether it could be lower; without one, the unsure answers teach most.
    """
    if threshold is None:
        return 1 - confidences
    return np.exp(-np.abs(_log_odds(confidences) - _log_odds(np.array([threshold]))))


def _log_odds(confidences: Floats) -> Floats:
    inside = np.clip(confidences, 1e-6, 1 - 1e-6)
    odds: Floats = np.log(inside / (1 - inside))
    return odds


@dataclass(frozen=True)
class Draw:
    """A sample. is_random: drawn by chance alone, with the same chance for all.

    weights: what each counts for in a mean over the population; 1 where all have the same chance.
    """

    positions: Counts
    is_random: Flags
    weights: Floats


def draw_mixed(scores: Floats, *, by_chance: int, by_score: int, seed: int) -> Draw:
    """Draw some of a population by chance alone, and some with a chance that grows with their score.

    The second draw is systematic: its size is fixed, and the chance of each is known (Madow 1949). Each
    weighs what the chance that either draw takes it says, so means are unbiased (Hájek 1971).
    """
    chance = np.random.default_rng(seed)
    total = len(scores)
    by_chance = min(by_chance, total)
    random_part = chance.choice(total, by_chance, replace=False)
    chances = _inclusion_chances(scores, min(by_score, total))
    order = chance.permutation(total)
    ends = np.cumsum(chances[order])
    ticks = chance.random() + np.arange(round(float(ends[-1])) if total else 0)
    scored_part = order[np.unique(np.searchsorted(ends, ticks, side="right").clip(max=total - 1))]
    positions = np.union1d(random_part, scored_part).astype(np.int64)
    inclusion = 1 - (1 - by_chance / max(1, total)) * (1 - chances[positions])
    weights = len(positions) / max(1, total) / inclusion
    return Draw(positions, np.isin(positions, random_part), weights)


def _inclusion_chances(scores: Floats, count: int) -> Floats:
    """Chances that sum up to the count, each at most 1, else in proportion to the scores."""
    chances = np.zeros(len(scores))
    left = scores > 0
    count = min(count, int(left.sum()))
    while count:
        chances[left] = (count - np.count_nonzero(chances == 1)) * scores[left] / scores[left].sum()
        certain = left & (chances >= 1)
        if not certain.any():
            break
        chances[certain] = 1
        left &= ~certain
        if not left.any():
            break
    return chances
