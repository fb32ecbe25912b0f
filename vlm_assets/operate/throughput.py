"""Properties described over time, device by device, for a chart.

What lives here: cutting stretches of work into bars of one width. What does not: drawing them
(``picture.py``), and where they come from (``published_rows.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from vlm_assets.assets.published_rows import Stretch

MOST_BARS = 72
_WIDTHS = (10, 60, 300, 600, 1800, 3600, 6 * 3600, 24 * 3600, 7 * 24 * 3600)


@dataclass(frozen=True)
class Throughput:
    """Bars from ``start`` (unix seconds), each of ``width`` seconds: properties of each device by its id."""

    start: float
    width: int
    bars: tuple[dict[str, float], ...]

    @property
    def devices(self) -> list[str]:
        """The devices that described anything, sorted."""
        return sorted({device for bar in self.bars for device in bar})

    @property
    def highest(self) -> float:
        """Properties in the highest bar."""
        return max((sum(bar.values()) for bar in self.bars), default=0.0)


def throughput(stretches: Iterable[Stretch]) -> Throughput:
    """Bars over all the time in which something was described, ``MOST_BARS`` at most."""
    work = [one for one in stretches if one.rows]
    if not work:
        return Throughput(0.0, _WIDTHS[0], ())
    first, last = min(one.first for one in work), max(one.last for one in work)
    width = next((one for one in _WIDTHS if (last - first) / one < MOST_BARS - 1), _WIDTHS[-1])
    start = first // width * width
    bars: list[dict[str, float]] = [{} for _ in range(int((last - start) // width) + 1)]
    for one in work:
        for number, rows in _shares(one, start, width):
            bars[number][one.device] = bars[number].get(one.device, 0.0) + rows
    return Throughput(start, width, tuple(bars))


def _shares(one: Stretch, start: float, width: int) -> Iterable[tuple[int, float]]:
    """Its rows by bar, spread evenly over its time."""
    begin, end = int((one.first - start) // width), int((one.last - start) // width)
    if begin == end:
        return [(begin, float(one.rows))]
    rate = one.rows / (one.last - one.first)
    edges = [one.first, *(start + width * number for number in range(begin + 1, end + 1)), one.last]
    return [(begin + number, rate * (right - left)) for number, (left, right) in enumerate(pairwise(edges))]
