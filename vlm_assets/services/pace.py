"""How fast devices work through partitions, from a measurement, and which partition size is enough."""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vlm_assets.config.extensions import launcher_of
from vlm_assets.config.settings import Settings
from vlm_assets.services.measurement import Measurement, read_measurements
from vlm_assets.services.small_runs import LAUNCH_SECONDS
from vlm_catalog.listing import IngestRequest
from vlm_durable.commands import command
from vlm_durable.wording import counted

START_SHARE: Final = 0.02
"""Share of a partition's time that start-up may take at most, for the range size that is named."""


@dataclass(frozen=True)
class Pace:
    """What one device makes of partitions. base_seconds: of a run without its images, with no other at work.

    between_seconds: until the next run is launched, at the same speed. devices: that were measured at once,
    each at a share of the speed (``shared``). base_cpu, image_cpu: seconds of a core.
    """

    base_seconds: float
    image_seconds: float
    base_cpu: float
    image_cpu: float
    cores: int
    between_seconds: float = LAUNCH_SECONDS
    devices: int = 1
    shared: float = 1.0

    @classmethod
    def from_measurement(cls, measured: Measurement) -> Pace:
        """The measured pace: real runs say what a run takes, the sample's batches what is beyond it."""
        each, cpu, run = measured.seconds_an_image, measured.cpu_an_image, measured.run
        cores = len(os.sched_getaffinity(0))
        if run is None:
            base = measured.start_seconds + measured.load_seconds
            return cls(base, each, base, cpu, cores)
        base, shared = max(0.0, run.alone_seconds - run.images * each), run.alone_seconds / run.seconds
        between = run.between_seconds * shared
        return cls(base, each, base, cpu, cores, between, devices=run.devices, shared=min(1.0, shared))

    def speed(self, at_once: float) -> float:
        """The speed of each of so many devices at work, against one alone: they share the machine's cores."""
        beside = min(at_once, self.devices) - 1
        return 1.0 - (1.0 - self.shared) * beside / max(1, self.devices - 1)

    def run_seconds(self, images: float, *, first: bool) -> float:
        """The time of a run with no other at work, with the time before its launch."""
        beside = 0.0 if first else self.between_seconds
        return self.base_seconds + beside + images * self.image_seconds

    def seconds(self, images: Sequence[int], devices: int, *, machines: float = 1.0) -> float:
        """Wall time of partitions with so many images, the heaviest first, on so many devices.

        machines: like this one. Never less than what their cores take.
        """
        slots = max(1, min(devices, len(images)))
        ends: list[float] = []
        # Of a device alone, and of the clock: it goes faster at the end, when some have nothing left.
        alone = wall = 0.0

        def end_one() -> None:
            nonlocal alone, wall
            busy = math.ceil(len(ends) / machines)
            ended = heapq.heappop(ends)
            wall, alone = wall + (ended - alone) / self.speed(busy), ended

        for number, image_count in enumerate(sorted(images, reverse=True)):
            if len(ends) == slots:
                end_one()
            heapq.heappush(ends, alone + self.run_seconds(image_count, first=number < slots))
        while ends:
            end_one()
        cpu_seconds = sum(self.base_cpu + image_count * self.image_cpu for image_count in images)
        cores = cpu_seconds / (self.cores * machines)
        return max(wall, cores)


@dataclass(frozen=True)
class StartUp:
    """Seconds of a device: ``seconds`` to start the run of a partition, ``a_property`` for each property."""

    seconds: float
    a_property: float

    @classmethod
    def from_measurement(cls, settings: Settings, measured: Measurement, images_a_property: float) -> StartUp:
        """The start-up as measured here; longer by what another launcher than Dagster's takes."""
        pace = Pace.from_measurement(measured)
        start = pace.run_seconds(0.0, first=False) + launcher_of(settings).added_seconds
        return cls(start, max(pace.image_seconds * images_a_property, 1e-9))

    def share(self, range_size: int) -> float:
        """The share of start-up in the time of a partition of so many properties."""
        return self.seconds / (self.seconds + range_size * self.a_property)

    @property
    def range_size(self) -> int:
        """The fewest properties with which start-up takes START_SHARE of the time at most.

        Rounded up to 1, 2, 3 or 5 times a power of ten.
        """
        fewest = max(1.0, (1 / START_SHARE - 1) * self.seconds / self.a_property)
        power = int(10 ** math.floor(math.log10(fewest)))
        return next(step * power for step in (1, 2, 3, 5, 10) if step * power >= fewest)


def range_size_advice(
    settings: Settings, range_size: int, images_a_property: float, request: IngestRequest
) -> str | None:
    """Which partition size is enough for start-up to take START_SHARE at most; None where this one is.

    request: the ingest that was asked for.
    """
    measured = next(iter(read_measurements(settings)), None)
    if measured is None:
        return (
            f"{command('compare')}, then {command('plan')}, name the partition size with which starting runs"
            " takes less than 2% of the time. Before the first run the size may be changed for all"
            " partitions."
        )
    start = StartUp.from_measurement(settings, measured, images_a_property)
    if range_size >= start.range_size:
        return None
    return (
        f"Partitions of {counted(range_size, 'properties')} spend {start.share(range_size):.0%} of their"
        f" time on starting, as measured with {measured.model}; with {start.range_size} it is less than 2%:"
        f" {request.command('--range-size', start.range_size)}. Before the first run the size may be changed"
        " for all partitions."
    )
