"""Shares and differences of shares with their 95% intervals.

Every interval that the product shows is computed here. A share has Wilson's interval (1927). A difference
between two contenders, asked about the same properties, has Tango's interval (Statistics in Medicine 1998,
17:891-908).
Both are score intervals: with no error, or no disagreement, they still say how much may be hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_Z: Final = 1.959964
"""The quantile of the normal distribution for a 95% interval."""

_ADDED: Final = _Z * _Z / 2
"""Imagined properties at each end of the scale, for the design effect (Agresti and Coull 1998)."""

_HALVINGS: Final = 60


@dataclass(frozen=True)
class Share:
    """A share with its 95% interval. total: the number of properties behind it."""

    share: float
    low: float
    high: float
    total: int

    def sentence(self) -> str:
        """The figures as a sentence for people."""
        return f"{self.share:.0%} ({self.low:.0%} to {self.high:.0%})" if self.total else "none"


@dataclass(frozen=True)
class Difference:
    """How much better the first of two contenders is, with its 95% interval.

    total: properties that both were asked about. differing: how many of them one answered better.
    """

    by: float
    low: float
    high: float
    total: int
    differing: int

    def sentence(self) -> str:
        """The figures as a sentence for people."""
        if not self.total:
            return ""
        band = f"({self.low:+.1%} to {self.high:+.1%})"
        return f"{self.by:+.1%} {band}" if self.differing else f"no difference seen {band}"


def wilson(count: int, total: int) -> Share:
    """The share of ``count`` in ``total``."""
    if not total:
        return Share(0.0, 0.0, 1.0, 0)
    return Share(count / total, *_wilson_limits(count / total, total), total)


def weighted_share(yes: Sequence[bool], weights: Sequence[float]) -> Share:
    """The share of "yes" in a population, from a sample whose members were drawn with unequal chances.

    weights: proportional to one divided by each one's chance. Unequal weights make the sample count for fewer
    (Kish 1965); with equal ones the result is that of ``wilson``. A weight of 0 says nothing of others.
    """
    sizes = np.asarray(weights, dtype=float)
    if not sizes.sum() > 0:
        return Share(0.0, 0.0, 1.0, 0)
    share = float(np.average(np.asarray(yes, dtype=float), weights=sizes))
    effective = float(sizes.sum() ** 2 / (sizes**2).sum())
    return Share(share, *_wilson_limits(share, effective), int(np.count_nonzero(sizes)))


def mean_share(shares: Sequence[float]) -> Share:
    """The mean of the shares of properties, each from 0 to 1, such as the share of right fields.

    With yes or no for each property the result is that of ``wilson``. The fields of a property are not
    independent, so the size of the sample is the number of properties divided by their design effect.
    """
    if not shares:
        return Share(0.0, 0.0, 1.0, 0)
    values = np.asarray(shares, dtype=float)
    mean = float(values.mean())
    return Share(mean, *_wilson_limits(mean, len(values) / _design_effect(values, lowest=0.0)), len(values))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """How much better the first is. first, second: shares of the same properties, each from 0 to 1.

    With yes or no for each property the interval is Tango's. With shares it is Tango's for a sample of
    another size, as in ``mean_share``.
    """
    if not first:
        return Difference(0.0, -1.0, 1.0, 0, 0)
    values = np.subtract(first, second).round(12)
    pairs = len(values) / _design_effect(values, lowest=-1.0)
    better, worse = (float(np.clip(sign * values, 0.0, None).mean()) * pairs for sign in (1, -1))
    low, high = _tango_limits(better, worse, pairs)
    return Difference(float(values.mean()), low, high, len(values), int(np.count_nonzero(values)))


def _design_effect(values: npt.NDArray[np.float64], *, lowest: float) -> float:
    """The variance of the values divided by that of values which are ``lowest``, 0 or 1: from 0 to 1.

    A few properties say little about the variance, so imagined properties keep it from being too small.
    With them one more error never raises a limit, and a sample without errors has the size of its number of
    properties.
    """
    all_values = np.append(values, (lowest, 1.0))
    weights = np.append(np.ones(len(values)), (_ADDED, _ADDED))
    mean = np.average(all_values, weights=weights)
    squares = np.average(all_values**2, weights=weights)
    sizes = np.average(np.abs(all_values), weights=weights)
    return float((squares - mean**2) / (sizes - mean**2))


def _wilson_limits(share: float, size: float) -> tuple[float, float]:
    z2 = _Z * _Z
    middle = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = _Z * math.sqrt(share * (1 - share) / size + z2 / (4 * size * size)) / (1 + z2 / size)
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def _tango_limits(better: float, worse: float, pairs: float) -> tuple[float, float]:
    """The differences that a score test at 5% does not reject. better, worse: how many of the pairs are."""

    def score(difference: float) -> float:
        # The chance of "worse" that is most likely under this difference.
        linear = (2 * pairs - better + worse) * difference - better - worse
        root = math.sqrt(max(0.0, linear**2 + 8 * pairs * worse * difference * (1 - difference)))
        variance = pairs * ((root - linear) / (2 * pairs) + difference * (1 - difference))
        above = better - worse - pairs * difference
        return above / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, above)

    def limit(goal: float, low: float, high: float) -> float:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if score(middle) > goal else (low, middle)
        return (low + high) / 2

    estimate = (better - worse) / pairs
    return limit(_Z, -1.0, estimate), limit(-_Z, estimate, 1.0)
