"""What was forecast, and what its run then took: the next forecast knows how far the last ones were off."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from vlm_assets.assets.published_rows import PublishedRows
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.settings import Settings
from vlm_assets.services.expected_cost import ExpectedCost
from vlm_assets.services.measurement import keep_measurement, read_measurements
from vlm_assets.services.small_runs import MeasuredRun, launch_and_end, runs_to_measure
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_durable.state.rate import GAP_SECONDS
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import RecordDamagedError
from vlm_durable.wording import counted, duration

_KEPT: Final = 100


@dataclass(frozen=True)
class ForecastAndRun:
    """A forecast, and what its run took. All in seconds of work; at: when it was forecast."""

    at: float
    properties: int
    devices: int
    predicted: float
    low: float
    high: float
    actual: float

    @property
    def off(self) -> float:
        """How far the prediction was off, as a share of what it took; above 0: it took less."""
        return self.predicted / self.actual - 1.0

    def sentence(self) -> str:
        """Both, for people."""
        inside = "inside" if self.low <= self.actual <= self.high else "outside"
        return (
            f"Planned {duration(self.predicted)} ({duration(self.low)} to {duration(self.high)}) for"
            f" {counted(self.properties, 'properties')} on {counted(self.devices, 'devices')}; took"
            f" {duration(self.actual)}: {self.off:+.1%}, {inside} the band."
        )


def keep_for_comparison(settings: Settings, content: Mapping[str, Any]) -> None:
    """Note a forecast for the comparison after its run. Raises OSError.

    content: when it was made (at), the name of its measurement (measured), the partitions (keys), and the
    other fields of ``ForecastAndRun`` but ``actual``.
    """
    write_sealed(_folder(settings) / "latest.json", content)


def comparisons(settings: Settings) -> list[ForecastAndRun]:
    """Forecasts and what their runs took, newest first; none where they do not read."""
    with contextlib.suppress(OSError, BrokenSealError, KeyError, TypeError):
        content = read_sealed(_folder(settings) / "compared.json")
        return [ForecastAndRun(**fields) for fields in content["compared"]]
    return []


def _folder(settings: Settings) -> Path:
    return settings.state_directory / "plans"


def compare_with_run(settings: Settings) -> ForecastAndRun | None:
    """Compare the latest forecast with its run, once that is over, and keep it; None before.

    What the run took: from the launch of its first partition to the last publication, without times of more
    than a quarter of an hour in which nobody worked, as the rate has it. The next forecast reckons with the
    times of these partitions. Raises OSError, CatalogError.
    """
    try:
        content = read_sealed(_folder(settings) / "latest.json")
        keys, measured_name = list(content.pop("keys")), str(content.pop("measured", ""))
        made_at = float(content["at"])
        earlier = comparisons(settings)
        for comparison in earlier:
            if comparison.at == made_at:
                return comparison
        times = _launches_and_ends(settings, keys, since=made_at)
        if not times:
            return None
        newest = ForecastAndRun(**content, actual=_worked(times))
    except (FileNotFoundError, BrokenSealError, KeyError, TypeError):
        return None
    _learn(settings, measured_name, times)
    compared = [asdict(comparison) for comparison in [newest, *earlier][:_KEPT]]
    write_sealed(_folder(settings) / "compared.json", {"compared": compared})
    return newest


def _launches_and_ends(
    settings: Settings, keys: Sequence[str], *, since: float
) -> dict[str, list[tuple[float, float]]] | None:
    """Of each partition and asset: launch and publication; None while one is not made, or was before."""
    times = {}
    for key in keys:
        spans = []
        for asset in settings.computed_assets:
            try:
                span = launch_and_end(settings.layout.asset(asset), key)
            except RecordDamagedError:
                return None
            if span is None or span[0] < since:
                return None
            spans.append(span)
        times[key] = spans
    return times


def _worked(times: Mapping[str, Sequence[tuple[float, float]]]) -> float:
    """Seconds from the first launch to the last publication, without long times in which nobody worked."""
    total, end = 0.0, -math.inf
    for began, ended in sorted(span for spans in times.values() for span in spans):
        pause = began - end
        total += max(0.0, ended - max(began, end)) + (pause if 0 < pause <= GAP_SECONDS else 0.0)
        end = max(end, ended)
    return total


def _learn(settings: Settings, name: str, times: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Put what these real partitions took into the measurement, if there are enough of them.

    Raises OSError, CatalogError.
    """
    measured = next((other for other in read_measurements(settings) if other.name == name), None)
    times = {key: spans for key, spans in times.items() if not _was_resumed(settings, key)}
    whole_spans = [(first[0], last[1]) for first, last in times.values()]
    changes = sorted([(began, 1) for began, _ in whole_spans] + [(ended, -1) for _, ended in whole_spans])
    at_once = max(accumulate(change for _, change in changes), default=1)
    if measured is None or len(times) < runs_to_measure(at_once):
        return
    catalogued = all_images(settings, Catalog.open(settings.home))
    rows, images = zip(*(catalogued[key] for key in times if key in catalogued), strict=True)
    run = MeasuredRun.from_times(
        whole_spans, properties=round(fmean(rows)), images=fmean(images), devices=at_once
    )
    # None of them had the machine alone, and the last one is the lightest.
    # Nor are they alike: how they differ says nothing of the machine.
    alone, repetitions, spread = 1.0, 0, 0.0
    if (before := measured.run) is not None:
        alone, repetitions, spread = before.alone_seconds / before.seconds, before.repetitions, before.spread
    run = replace(run, alone_seconds=run.seconds * alone, repetitions=repetitions, spread=spread)
    keep_measurement(settings, replace(measured, run=run))


def all_images(settings: Settings, catalog: Catalog) -> dict[str, tuple[int, int]]:
    """Of each partition of the catalogue: its properties and images. Raises CatalogError."""
    whole = ExpectedCost.of(settings, catalog).whole
    return {range_.key: (len(range_), whole[range_.key]) for range_ in catalog.ranges}


def _was_resumed(settings: Settings, key: str) -> bool:
    """Whether the run that published a partition found rows of an earlier one, so that it took less."""
    record = PublishedPartitions(settings.descriptions).record(key)
    rows = None if record is None else PublishedRows.from_record(record)
    return rows is not None and any(stretch.first < (rows.began or 0.0) for stretch in rows.stretches)
