"""Shares and differences of shares with their 95% intervals.

What lives here: every interval that the product shows. A share has Wilson's interval (1927). A difference
between two variants, asked about the same properties, has Tango's (Statistics in Medicine 1998, 17:891-908).
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
"""Of a 95% interval."""

_ADDED: Final = _Z * _Z / 2
"""Imagined properties at each end of the scale, for the design effect (Agresti and Coull 1998)."""

_HALVINGS: Final = 60


@dataclass(frozen=True)
class Share:
    """A share of so many, with its 95% interval."""

    share: float
    low: float
    high: float
    of: int

    def sentence(self) -> str:
        """For people."""
        return f"{self.share:.0%} ({self.low:.0%} to {self.high:.0%})" if self.of else "none"


@dataclass(frozen=True)
class Difference:
    """How much better the first of two variants is, with its 95% interval.

    of: properties that both were asked about. differing: those of them in which one was better.
    """

    by: float
    low: float
    high: float
    of: int
    differing: int

    def sentence(self) -> str:
        """For people."""
        if not self.of:
            return ""
        band = f"({self.low:+.1%} to {self.high:+.1%})"
        return f"{self.by:+.1%} {band}" if self.differing else f"no difference seen {band}"


def wilson(count: int, of: int) -> Share:
    """The share of ``count`` among ``of``."""
    if not of:
        return Share(0.0, 0.0, 1.0, 0)
    return Share(count / of, *_wilson_limits(count / of, of), of)


def mean_share(shares: Sequence[float]) -> Share:
    """The mean of the shares of properties, each from 0 to 1, such as the share of right fields.

    With yes or no for each property it is ``wilson``. The fields of one property are not independent, so
    the size of the sample is the number of properties divided by their design effect.
    """
    if not shares:
        return Share(0.0, 0.0, 1.0, 0)
    values = np.asarray(shares, dtype=float)
    mean = float(values.mean())
    return Share(mean, *_wilson_limits(mean, len(values) / _design_effect(values, lowest=0.0)), len(values))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """How much better the first is. Both: the shares of the same properties, each from 0 to 1.

    With yes or no for each property the interval is Tango's. With shares it is Tango's of a sample of
    another size, as in ``mean_share``.
    """
    if not first:
        return Difference(0.0, -1.0, 1.0, 0, 0)
    values = np.subtract(first, second).round(12)
    of = len(values) / _design_effect(values, lowest=-1.0)
    better, worse = (float(np.clip(sign * values, 0.0, None).mean()) * of for sign in (1, -1))
    low, high = _tango_limits(better, worse, of)
    return Difference(float(values.mean()), low, high, len(values), int(np.count_nonzero(values)))


def _design_effect(values: npt.NDArray[np.float64], *, lowest: float) -> float:
    """The variance of the values against that of values which are ``lowest``, 0 or 1: from 0 to 1.

    A few properties say little of the variance: the imagined ones keep it from being too small. So one more
    error never raises a limit, and a sample without errors has the size of its number of properties.
    """
    all_values = np.append(values, (lowest, 1.0))
    weights = np.append(np.ones(len(values)), (_ADDED, _ADDED))
    mean = np.average(all_values, weights=weights)
    squares = np.average(all_values**2, weights=weights)
    sizes = np.average(np.abs(all_values), weights=weights)
    return float((squares - mean**2) / (sizes - mean**2))


def _wilson_limits(share: float, of: float) -> tuple[float, float]:
    z2 = _Z * _Z
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def _tango_limits(better: float, worse: float, of: float) -> tuple[float, float]:
    """Those differences that a score test at 5% does not refuse. better, worse: of so many pairs."""

    def score(difference: float) -> float:
        # The chance of "worse" that is most likely under this difference.
        linear = (2 * of - better + worse) * difference - better - worse
        root = math.sqrt(max(0.0, linear**2 + 8 * of * worse * difference * (1 - difference)))
        variance = of * ((root - linear) / (2 * of) + difference * (1 - difference))
        above = better - worse - of * difference
        return above / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, above)

    def limit(goal: float, low: float, high: float) -> float:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if score(middle) > goal else (low, middle)
        return (low + high) / 2

    estimate = (better - worse) / of
    return limit(_Z, -1.0, estimate), limit(-_Z, estimate, 1.0)
