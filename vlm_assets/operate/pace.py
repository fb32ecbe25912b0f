"""How fast devices describe, learned from what they did, and how long the rest takes.

What lives here: images a second of each device, and the time that a number of devices needs for what is left.
What does not: which partition is left with how many images (``expected_cost.py``). The time that a process
and its model need to start is not in the published rows, and not in these figures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlm_assets.assets.published_rows import PublishedRows, Stretch


@dataclass(frozen=True)
class Pace:
    """What one device, or all of them one after the other, did in a measured time.

    rows, images: all that it made. seconds: in which ``timed_rows`` and ``timed_images`` of them were made;
    the first batch of a stretch has no beginning that is known, and counts for nothing.
    """

    rows: int = 0
    images: int = 0
    seconds: float = 0.0
    timed_rows: float = 0.0
    timed_images: float = 0.0

    def with_stretch(self, stretch: Stretch) -> Pace:
        """This and a stretch together."""
        timed = (stretch.batches - 1) / stretch.batches
        return Pace(
            self.rows + stretch.rows,
            self.images + stretch.images,
            self.seconds + stretch.last - stretch.first,
            self.timed_rows + stretch.rows * timed,
            self.timed_images + stretch.images * timed,
        )

    @property
    def properties_per_second(self) -> float | None:
        """None before it was measured."""
        return self.timed_rows / self.seconds if self.seconds else None

    @property
    def seconds_per_image(self) -> float | None:
        """Of one device; None before it was measured."""
        return self.seconds / self.timed_images if self.seconds and self.timed_images else None


def learned_paces(published: Iterable[PublishedRows]) -> dict[str, Pace]:
    """The pace of each device over all that is published, by its id."""
    paces: dict[str, Pace] = {}
    for rows in published:
        for stretch in rows.stretches:
            paces[stretch.device] = paces.get(stretch.device, Pace()).with_stretch(stretch)
    return dict(sorted(paces.items()))


def together(paces: Iterable[Pace]) -> Pace:
    """Several as one: its seconds are those of one device after the other."""
    total = Pace()
    for one in paces:
        total = Pace(
            total.rows + one.rows,
            total.images + one.images,
            total.seconds + one.seconds,
            total.timed_rows + one.timed_rows,
            total.timed_images + one.timed_images,
        )
    return total


def time_left(running: Sequence[float], waiting: Iterable[float], devices: int) -> float:
    """Seconds until all is done, where each device takes the next as soon as it is free.

    running: seconds left of what is under way; waiting: of what follows, in the order in which it will run.
    """
    busy = list(running)
    free = [0.0] * max(devices - len(busy), 0 if busy else 1)
    ends = [*busy, *free]
    heapq.heapify(ends)
    for seconds in waiting:
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)
