"""What describing the rest of a catalogue will take: days, cost, disk, failures, and what to set.

The arithmetic from a measurement (``measurement.py``) and a catalogue. A forecast is kept, and compared with
what its run then took: the next one knows how far the last ones were off.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlm_assets.assets.published_rows import PublishedRows
from vlm_assets.config.resource_settings import build_text_embedding_model
from vlm_assets.config.settings import Settings
from vlm_assets.services.expected_cost import ExpectedCost
from vlm_assets.services.measurement import Measurement, keep_measurement, read_measurements
from vlm_assets.services.pace import Pace, StartUp
from vlm_assets.services.small_runs import MeasuredRun, launch_and_end, runs_to_measure
from vlm_assets.services.trial import COPIES
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_durable.state.rate import GAP_SECONDS
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import RecordDamagedError
from vlm_durable.wording import counted, duration
from vlm_engine.batches import BATCH_SECONDS
from vlm_engine.protocol import ModelLoadError

DEVICES: Final = (1, 2, 4, 8, 16)

MTBF_HOURS: Final = 5000.0
"""Hours that a device works between two failures of it or its machine: a cautious guess; none was counted."""

_USUAL_SPREAD: Final = 0.03
"""A device is faster or slower by this share from day to day, as far as nothing was measured yet."""

_USUAL_SPREAD_OF_CPU: Final = 0.2
"""A CPU slot shares its cores with whatever else the machine does: a run that was planned to take 50 s took
72 s there. With eight others on two cores it was 0.5."""

_USUAL_REPETITIONS: Final = 3
"""So many repetitions the usual spread counts for, beside the measured ones."""

_LAST_FORECASTS: Final = 10
"""Forecasts whose errors widen the band of the next one: a machine changes."""

_WIDEST: Final = math.log(10.0)
"""The band is never wider than from a tenth to ten times."""

SECONDS_A_DAY: Final = 86_400.0


@dataclass(frozen=True)
class Forecast:
    """What is left, and what it will take.

    days, days_band: of wall time, expected failures included. finish: unix seconds, if it starts now. cost:
    None without a price. failures_expected: of devices or machines. no_failure: the odds that there is none.
    days_lost: work done twice because of them, on one device. commit_seconds_best: after Young and Daly;
    commit_cost: share of the time that commits and lost work cost with it, and as set. range_size: properties
    from which start-up is at most 2% of a partition. disk_bytes: of all results with their second copies;
    read_bytes: of the images; they are the traffic where both lie on S3. what_if: by measurement, days with
    so many devices.
    """

    properties: int
    images: int
    partitions: int
    is_anew: bool
    devices: int
    days: float
    days_band: tuple[float, float]
    finish: float
    cost: float | None
    cost_band: tuple[float, float] | None
    failures_expected: float
    no_failure: float
    days_lost: float
    commit_seconds: float
    commit_seconds_best: float
    commit_cost: float
    commit_cost_best: float
    range_size: int
    range_size_now: int
    start_share_now: float
    disk_bytes: float
    disk_free_bytes: int
    read_bytes: int
    what_if: Mapping[str, Mapping[int, float]]
    measured: Measurement = field(repr=False)
    keys: tuple[str, ...] = field(repr=False, default=())
    notes: tuple[str, ...] = ()
    compared: ForecastAndRun | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything but the partitions' keys."""
        content = asdict(self)
        del content["keys"]
        if self.compared is not None:
            content["compared"]["off"] = self.compared.off
        return content


def make_forecast(
    settings: Settings,
    catalog: Catalog,
    measured: Measurement,
    *,
    devices: int,
    devices_here: int,
    price_per_hour: float | None = None,
    asked: Mapping[str, float] = MappingProxyType({}),
) -> Forecast:
    """What the rest of the catalogue takes; all of it where nothing is left. Raises CatalogError, OSError.

    devices_here: of this machine; more are taken for further machines like it. asked: the share of each
    partition's properties that is asked; 1 unless given.
    """
    vector_width: int | None = 0
    if settings.embedding_model is not None:
        try:
            vector_width = build_text_embedding_model(settings).width()
        except ModelLoadError:
            vector_width = None
    partitions = _images_left(settings, catalog, asked)
    is_anew = not partitions
    partitions = partitions or all_images(settings, catalog)
    properties = sum(rows for rows, _ in partitions.values())
    images_by_partition = [images for _, images in partitions.values()]
    images = sum(images_by_partition)
    pace = Pace.from_measurement(measured)
    machines = _machines(measured, devices, devices_here)
    seconds = pace.seconds(images_by_partition, devices, machines=machines)
    working = min(devices, len(partitions))
    # Each failure costs the work since its last commit, the batch under way and a new start, on one device.
    batch = min(BATCH_SECONDS, measured.batch_images * measured.seconds_an_image)
    start = pace.run_seconds(0.0, first=False)
    again = settings.commit_seconds / 2 + batch / 2 + start
    mtbf = MTBF_HOURS * 3600.0
    failures = seconds * working / mtbf
    lost = failures * again
    total = seconds + lost / max(1, working)
    low, high = _band(settings, measured, seconds, failures, again / max(1, working))
    best = best_commit_seconds(measured.commit_seconds, mtbf)
    starting = StartUp.from_measurement(settings, measured, images / max(1, properties))
    usual = max((len(range_) for range_ in catalog.ranges), default=catalog.rows)
    price = None if price_per_hour is None else working / 3600.0 * price_per_hour  # of a second
    disk = os.statvfs(settings.home)
    with pq.ParquetFile(catalog.path) as file:
        # Bytes of all images that are shown, as they were when they were catalogued.
        batches = file.iter_batches(columns=["image_bytes"], batch_size=65_536)
        shown = (pc.list_slice(batch.column(0), 0, settings.max_images) for batch in batches)
        image_bytes = sum(pc.sum(pc.list_flatten(sizes)).as_py() or 0 for sizes in shown)
    return Forecast(
        properties=properties,
        images=images,
        partitions=len(partitions),
        is_anew=is_anew,
        devices=devices,
        days=total / SECONDS_A_DAY,
        days_band=(low / SECONDS_A_DAY, high / SECONDS_A_DAY),
        finish=time.time() + total,
        cost=None if price is None else total * price,
        cost_band=None if price is None else (low * price, high * price),
        failures_expected=failures,
        no_failure=math.exp(-failures),
        days_lost=lost / SECONDS_A_DAY,
        commit_seconds=settings.commit_seconds,
        commit_seconds_best=best,
        commit_cost=_commit_cost(settings.commit_seconds, measured.commit_seconds, mtbf),
        commit_cost_best=_commit_cost(best, measured.commit_seconds, mtbf),
        range_size=starting.range_size,
        range_size_now=usual,
        start_share_now=starting.share(usual),
        disk_bytes=COPIES * (measured.row_bytes + 4.0 * (vector_width or 0)) * properties,
        disk_free_bytes=disk.f_bavail * disk.f_frsize,
        read_bytes=round(image_bytes * properties / max(1, catalog.rows)),
        what_if=_what_if(settings, images_by_partition, measured, max(1, devices_here)),
        measured=measured,
        keys=tuple(partitions),
        notes=tuple(_notes(measured, catalog, vector_width)),
        compared=next(iter(comparisons(settings)), None),
    )


def best_commit_seconds(cost: float, mtbf: float) -> float:
    """Seconds between two commits that waste least, after Daly (2006), of which Young's is the first term.

    cost: seconds of one commit; mtbf: seconds between two failures of what commits.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def _commit_cost(interval: float, cost: float, mtbf: float) -> float:
    """The share of the time that commits take, and that is lost by a failure between two."""
    return cost / interval + interval / (2 * mtbf)


def _images_left(
    settings: Settings, catalog: Catalog, asked: Mapping[str, float]
) -> dict[str, tuple[int, int]]:
    """The properties and images that are not described, for each partition that has any."""
    cost = ExpectedCost.from_catalog(settings, catalog)
    partitions = {}
    for range_ in catalog.ranges:
        if images := cost.left(range_.key):
            # A run that asks nothing starts all the same.
            images = max(1, round(images * asked.get(range_.key, 1.0)))
            share = images / max(1, cost.whole[range_.key])
            partitions[range_.key] = (round(share * len(range_)), images)
    if catalog.tail is not None:
        shown = np.minimum(catalog.image_counts(), settings.max_images)
        partitions[catalog.tail.key] = (catalog.waiting, int(shown[catalog.tail.start :].sum()))
    return partitions


def _band(
    settings: Settings, measured: Measurement, seconds: float, failures: float, again: float
) -> tuple[float, float]:
    """The lowest and the highest that are likely (95%), in seconds.

    The rate is known as well as the batches of the sample agree. The run itself is one more repetition on a
    machine that is not equally fast at all times: how unequally say the runs that were measured, and how far
    the last plans were off. Failures are those of the Poisson distribution.
    """
    from scipy.special import stdtrit

    rates = [batch_seconds / max(1, images) for _, images, batch_seconds in measured.steady]
    of_rate = 0.1
    if len(rates) > 2:
        quantile = float(stdtrit(len(rates) - 1, 0.975))
        of_rate = quantile * float(np.std(rates, ddof=1)) / float(np.mean(rates)) / math.sqrt(len(rates))
    offs = [math.log(past.actual / past.predicted) for past in comparisons(settings)[:_LAST_FORECASTS]]
    runs = 0 if measured.run is None else max(0, measured.run.repetitions - 1)
    spread = 0.0 if measured.run is None else measured.run.spread
    usual = _USUAL_SPREAD_OF_CPU if _is_cpu(measured) else _USUAL_SPREAD
    degrees = _USUAL_REPETITIONS + runs + len(offs)
    squares = _USUAL_REPETITIONS * usual**2 + runs * spread**2 + sum(off * off for off in offs)
    of_run = float(stdtrit(degrees, 0.975)) * math.sqrt(squares / degrees * (1 + 1 / degrees))
    factor = math.exp(min(math.hypot(of_rate, of_run), _WIDEST))
    many = failures + 1.96 * math.sqrt(failures) + 1.0 if failures > 0.05 else 0.0
    return seconds / factor, seconds * factor + many * again


def _what_if(
    settings: Settings, images: Sequence[int], measured: Measurement, devices_here: int
) -> dict[str, dict[int, float]]:
    """Days for each measurement that is kept: other models, pixels and batches are known once tried."""
    others = [other for other in read_measurements(settings) if other.name != measured.name]
    days_by_row = {}
    for tried in (measured, *others):
        run = tried.run
        if run is None and measured.run is not None:
            # One that was only tried lacks a run of its own: beside describing, a run takes about the same.
            slower = measured.run.images * (tried.seconds_an_image - measured.seconds_an_image)
            seconds, alone = measured.run.seconds + slower, measured.run.alone_seconds + slower
            run = replace(measured.run, seconds=max(0.1, seconds), alone_seconds=max(0.1, alone))
        pace = Pace.from_measurement(replace(tried, run=run))
        name = tried.model.rstrip("/").rpartition("/")[2] or tried.model
        batches = f"batches of {counted(tried.batch_images, 'images')}"
        sized = f"{tried.max_pixels:,} pixels, {batches}"
        row = f"{name}, {sized}, {tried.engine}, {tried.device}"
        # Measurements may differ in what a row does not name, such as the prompt.
        if row in days_by_row:
            measured_at = datetime.fromtimestamp(tried.at).astimezone()
            row += f", measured {measured_at:%Y-%m-%d %H:%M:%S}"
        days_by_row[row] = {
            count: pace.seconds(images, count, machines=_machines(tried, count, devices_here)) / SECONDS_A_DAY
            for count in DEVICES
        }
    return days_by_row


def _machines(measured: Measurement, devices: int, devices_here: int) -> float:
    """How many machines like this one so many devices need; CPU slots are always of this one."""
    return 1.0 if _is_cpu(measured) else max(1.0, devices / max(1, devices_here))


def _notes(measured: Measurement, catalog: Catalog, vector_width: int | None) -> list[str]:
    notes = []
    if measured.run is None:
        notes.append("With a model server the start of a run is estimated, not measured.")
    if vector_width is None:
        notes.append("The embedding model does not load: vectors are not counted on disk.")
    if len(measured.batches) < 4:
        more = min(catalog.rows, 8 * max(properties for properties, _, _ in measured.batches))
        notes.append(
            f"Measured on few batches ({len(measured.batches)}): "
            f"{command('compare', '--limit', more)} makes the band narrower."
        )
    if _is_cpu(measured):
        notes.append("CPU slots share this machine's cores: more of them than cores help nothing.")
    return notes


def _is_cpu(measured: Measurement) -> bool:
    return measured.device.startswith("cpu-")


def keep_forecast(settings: Settings, forecast: Forecast) -> None:
    """Note what was forecast, for the comparison after the run. Raises OSError."""
    low, high = forecast.days_band
    content = {
        "at": time.time(),
        "measured": forecast.measured.name,
        "keys": list(forecast.keys),
        "properties": forecast.properties,
        "devices": forecast.devices,
        "predicted": forecast.days * SECONDS_A_DAY,
        "low": low * SECONDS_A_DAY,
        "high": high * SECONDS_A_DAY,
    }
    write_sealed(_folder(settings) / "latest.json", content)


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


def comparisons(settings: Settings) -> list[ForecastAndRun]:
    """Forecasts and what their runs took, newest first; none where they do not read."""
    with contextlib.suppress(OSError, BrokenSealError, KeyError, TypeError):
        content = read_sealed(_folder(settings) / "compared.json")
        return [ForecastAndRun(**fields) for fields in content["compared"]]
    return []


def _folder(settings: Settings) -> Path:
    # Each question set is planned by itself.
    return settings.state_directory / "plans" / settings.descriptions.name


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
    """Launch and publication of each partition and asset; None while one is not made, or was made before."""
    # Other question sets have plans of their own.
    planned = [settings.descriptions, *([settings.embeddings] if settings.embedding_model else [])]
    times = {}
    for key in keys:
        spans = []
        for asset in planned:
            try:
                span = launch_and_end(asset, key)
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
    whole_spans = [
        (min(began for began, _ in spans), max(end for _, end in spans)) for spans in times.values()
    ]
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
    """The numbers of properties and images of each partition of the catalogue. Raises CatalogError."""
    whole = ExpectedCost.from_catalog(settings, catalog).whole
    return {range_.key: (len(range_), whole[range_.key]) for range_ in catalog.ranges}


def _was_resumed(settings: Settings, key: str) -> bool:
    """Whether the run that published a partition found rows of an earlier one, so that it took less."""
    record = PublishedPartitions(settings.descriptions).record(key)
    rows = None if record is None else PublishedRows.from_record(record)
    return rows is not None and any(stretch.first < (rows.began or 0.0) for stretch in rows.stretches)
