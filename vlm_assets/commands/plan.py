"""What describing the rest of a catalogue will take: days, cost, disk, failures, and what to set.

The arithmetic from a measurement (``measurement.py``) and a catalogue; the prediction is kept, and compared
with what the run then took.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Annotated, Any, Final

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from vlm_assets.assets.published_rows import PublishedRows
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.commands.measurement import (
    COPIES,
    LAUNCH_SECONDS,
    MeasuredRun,
    Measurement,
    keep,
    kept,
    launch_and_end,
    measure,
    measurement_of_now,
    runs_to_measure,
)
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import (
    build_gpu,
    build_text_embedding_model,
    build_vision_language_model,
)
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.expected_cost import GAP_SECONDS, ExpectedCost
from vlm_assets.services.progress import doing
from vlm_durable.commands import command
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_durable.versions.partition_files import RecordDamagedError
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted, duration
from vlm_engine.batch_sizes import BATCH_SECONDS
from vlm_engine.protocol import ModelLoadError

START_SHARE: Final = 0.02
"""Share of a partition's time that start-up may take at most, for the range size that is named."""

DEVICES: Final = (1, 2, 4, 8, 16)

RAY_SECONDS: Final = 8.0
"""A launch takes so much longer on Ray, at most: 4 to 11 s; with Dagster's own launcher 2.1 to 2.7 s."""

_USUAL_SPREAD: Final = 0.03
"""A device is faster or slower by this share from day to day, as far as nothing was measured yet."""

_USUAL_SPREAD_OF_CPU: Final = 0.2
"""A CPU slot shares its cores with whatever else the machine does: a run that was planned to take 50 s took
72 s there. With eight others on two cores it was 0.5."""

_USUAL_REPETITIONS: Final = 3
"""So many repetitions the usual spread counts for, beside the measured ones."""

_LAST_PLANS: Final = 10
"""Plans whose errors widen the band of the next one: a machine changes."""

_WIDEST: Final = math.log(10.0)
"""The band is never wider than from a tenth to ten times."""

_SECONDS_A_DAY: Final = 86_400.0

_KEPT: Final = 100


@dataclass(frozen=True)
class PlanAndRun:
    """A prediction, and what the run took. All in seconds of work; at: when it was predicted."""

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


@dataclass(frozen=True)
class Plan:
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
    compared: PlanAndRun | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything but the partitions' keys."""
        content = asdict(self)
        del content["keys"]
        if self.compared is not None:
            content["compared"]["off"] = self.compared.off
        return content


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
    def of(cls, measured: Measurement) -> Pace:
        """From a measurement: real runs say what a run takes, the sample's batches what is beyond it."""
        each, cpu, run = measured.seconds_an_image, measured.cpu_an_image, measured.run
        cores = len(os.sched_getaffinity(0))
        if run is None:
            base = measured.start_seconds + measured.load_seconds
            return cls(base, each, base, cpu, cores)
        base, shared = max(0.0, run.alone_seconds - run.images * each), run.alone_seconds / run.seconds
        between = run.between_seconds * shared
        return cls(base, each, base, cpu, cores, between, devices=run.devices, shared=min(1.0, shared))

    def speed(self, at_once: float) -> float:
        """Of each of so many devices of a machine at work, against one alone: they share its cores."""
        beside = min(at_once, self.devices) - 1
        return 1.0 - (1.0 - self.shared) * beside / max(1, self.devices - 1)

    def run_seconds(self, images: float, *, first: bool) -> float:
        """Of a run with no other at work, the time before its launch included."""
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

        for number, one in enumerate(sorted(images, reverse=True)):
            if len(ends) == slots:
                end_one()
            heapq.heappush(ends, alone + self.run_seconds(one, first=number < slots))
        while ends:
            end_one()
        cores = sum(self.base_cpu + one * self.image_cpu for one in images) / (self.cores * machines)
        return max(wall, cores)


@dataclass(frozen=True)
class StartUp:
    """Seconds of a device: ``seconds`` to start the run of a partition, ``a_property`` for each property."""

    seconds: float
    a_property: float

    @classmethod
    def of(cls, settings: Settings, measured: Measurement, images_a_property: float) -> StartUp:
        """As measured; longer by what a launch takes on Ray, where the settings name one."""
        pace = Pace.of(measured)
        on_ray = RAY_SECONDS if settings.ray_address is not None else 0.0
        start = pace.run_seconds(0.0, first=False) + on_ray
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


def range_size_advice(settings: Settings, range_size: int, images_a_property: float) -> str | None:
    """Which partition size is enough for start-up to take START_SHARE at most; None where this one is."""
    measured = next(iter(kept(settings)), None)
    if measured is None:
        return (
            f"{command('try')}, then {command('plan')}, name the --range-size with which starting runs takes"
            " less than 2% of the time. Before the first run the size may be changed for all partitions."
        )
    start = StartUp.of(settings, measured, images_a_property)
    if range_size >= start.range_size:
        return None
    return (
        f"Partitions of {counted(range_size, 'properties')} spend {start.share(range_size):.0%} of their"
        " time on"
        f" starting, as measured with {measured.model}; with --range-size {start.range_size} it is less than"
        " 2%. Before the first run the size may be changed for all partitions."
    )


def make_plan(
    settings: Settings,
    catalog: Catalog,
    measured: Measurement,
    *,
    devices: int,
    devices_here: int,
    price_per_hour: float | None = None,
    vector_width: int | None = None,
) -> Plan:
    """What the rest of the catalogue takes; all of it where nothing is left. Raises CatalogError, OSError.

    devices_here: of this machine; more are taken for further machines like it. vector_width: numbers of an
    embedding; None: not known.
    """
    left = _images_left(settings, catalog)
    is_anew = not left
    left = left or _all_images(settings, catalog)
    images, properties = sum(one for _, one in left.values()), sum(rows for rows, _ in left.values())
    pace = Pace.of(measured)
    machines = max(1.0, devices / max(1, devices_here)) if not _is_cpu(measured) else 1.0
    seconds = pace.seconds([one for _, one in left.values()], devices, machines=machines)
    working = min(devices, len(left))
    # Each failure costs the work since its last commit, the batch under way and a new start, on one device.
    batch = min(BATCH_SECONDS, measured.batch_images * measured.seconds_an_image)
    start = pace.run_seconds(0.0, first=False)
    again = settings.commit_seconds / 2 + batch / 2 + start
    mtbf = settings.mtbf_hours * 3600.0
    failures = seconds * working / mtbf
    lost = failures * again
    total = seconds + lost / max(1, working)
    low, high = _band(settings, measured, seconds, failures, again / max(1, working))
    best = best_commit_seconds(measured.commit_seconds, mtbf)
    starting = StartUp.of(settings, measured, images / max(1, properties))
    usual = max((len(one) for one in catalog.ranges), default=catalog.rows)
    price = None if price_per_hour is None else working / 3600.0 * price_per_hour  # of a second
    disk = os.statvfs(settings.home)
    with pq.ParquetFile(catalog.path) as file:
        # Bytes of all images that are shown, as they were when they were catalogued.
        batches = file.iter_batches(columns=["image_bytes"], batch_size=65_536)
        shown = (pc.list_slice(one.column(0), 0, settings.max_images) for one in batches)
        image_bytes = sum(pc.sum(pc.list_flatten(one)).as_py() or 0 for one in shown)
    return Plan(
        properties=properties,
        images=images,
        partitions=len(left),
        is_anew=is_anew,
        devices=devices,
        days=total / _SECONDS_A_DAY,
        days_band=(low / _SECONDS_A_DAY, high / _SECONDS_A_DAY),
        finish=time.time() + total,
        cost=None if price is None else total * price,
        cost_band=None if price is None else (low * price, high * price),
        failures_expected=failures,
        no_failure=math.exp(-failures),
        days_lost=lost / _SECONDS_A_DAY,
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
        what_if=_what_if(settings, [one for _, one in left.values()], measured, max(1, devices_here)),
        measured=measured,
        keys=tuple(left),
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


def _images_left(settings: Settings, catalog: Catalog) -> dict[str, tuple[int, int]]:
    """Of each partition with something left: its properties and images that are not described."""
    cost = ExpectedCost.of(settings, catalog)
    found = {}
    for one in catalog.ranges:
        if images := cost.left(one.key):
            share = images / max(1, cost.whole[one.key])
            found[one.key] = (round(share * len(one)), images)
    if catalog.tail is not None:
        shown = np.minimum(catalog.image_counts(), settings.max_images)
        found[catalog.tail.key] = (catalog.waiting, int(shown[catalog.tail.start :].sum()))
    return found


def _all_images(settings: Settings, catalog: Catalog) -> dict[str, tuple[int, int]]:
    whole = ExpectedCost.of(settings, catalog).whole
    return {one.key: (len(one), whole[one.key]) for one in catalog.ranges}


def _band(
    settings: Settings, measured: Measurement, seconds: float, failures: float, again: float
) -> tuple[float, float]:
    """From the lowest to the highest that is likely (95%), in seconds.

    The rate is known as well as the batches of the sample agree. The run itself is one more repetition on a
    machine that is not equally fast at all times: how unequally say the runs that were measured, and how far
    the last plans were off. Failures are those of the Poisson distribution.
    """
    from scipy.special import stdtrit

    rates = [one[2] / max(1, one[1]) for one in measured.steady]
    of_rate = 0.1
    if len(rates) > 2:
        quantile = float(stdtrit(len(rates) - 1, 0.975))
        of_rate = quantile * float(np.std(rates, ddof=1)) / float(np.mean(rates)) / math.sqrt(len(rates))
    offs = [math.log(one.actual / one.predicted) for one in comparisons(settings)[:_LAST_PLANS]]
    runs = 0 if measured.run is None else max(0, measured.run.repetitions - 1)
    spread = 0.0 if measured.run is None else measured.run.spread
    usual = _USUAL_SPREAD_OF_CPU if _is_cpu(measured) else _USUAL_SPREAD
    degrees = _USUAL_REPETITIONS + runs + len(offs)
    squares = _USUAL_REPETITIONS * usual**2 + runs * spread**2 + sum(one * one for one in offs)
    of_run = float(stdtrit(degrees, 0.975)) * math.sqrt(squares / degrees * (1 + 1 / degrees))
    factor = math.exp(min(math.hypot(of_rate, of_run), _WIDEST))
    many = failures + 1.96 * math.sqrt(failures) + 1.0 if failures > 0.05 else 0.0
    return seconds / factor, seconds * factor + many * again


def _what_if(
    settings: Settings, images: Sequence[int], measured: Measurement, devices_here: int
) -> dict[str, dict[int, float]]:
    """Days for each measurement that is kept: other models, pixels and batches are known once tried."""
    others = [one for one in kept(settings) if one.name != measured.name]
    found = {}
    for one in (measured, *others):
        run = one.run
        if run is None and measured.run is not None:
            # One that was only tried lacks a run of its own: beside describing, a run takes about the same.
            slower = measured.run.images * (one.seconds_an_image - measured.seconds_an_image)
            seconds, alone = measured.run.seconds + slower, measured.run.alone_seconds + slower
            run = replace(measured.run, seconds=max(0.1, seconds), alone_seconds=max(0.1, alone))
        pace = Pace.of(replace(one, run=run))
        machines = {count: 1.0 if _is_cpu(one) else max(1.0, count / devices_here) for count in DEVICES}
        name = one.model.rstrip("/").rpartition("/")[2] or one.model
        sized = f"{one.max_pixels:,} pixels, batches of {counted(one.batch_images, 'images')}"
        row = f"{name}, {sized}, {one.engine}, {one.device}"
        # Measurements may differ in what a row does not name, such as the prompt.
        if row in found:
            row += f", measured {datetime.fromtimestamp(one.at).astimezone():%Y-%m-%d %H:%M:%S}"
        found[row] = {
            count: pace.seconds(images, count, machines=of) / _SECONDS_A_DAY for count, of in machines.items()
        }
    return found


def _notes(measured: Measurement, catalog: Catalog, vector_width: int | None) -> list[str]:
    notes = []
    if measured.run is None:
        notes.append("With a model server the start of a run is estimated, not measured.")
    if vector_width is None:
        notes.append("No embedding model is named, or it does not load: vectors are not counted on disk.")
    if len(measured.batches) < 4:
        more = min(catalog.rows, 8 * max(one[0] for one in measured.batches))
        notes.append(
            f"Measured on few batches ({len(measured.batches)}): "
            f"{command('try', '--limit', more)} makes the band narrower."
        )
    if _is_cpu(measured):
        notes.append("CPU slots share this machine's cores: more of them than cores help nothing.")
    return notes


def _is_cpu(measured: Measurement) -> bool:
    return measured.device.startswith("cpu-")


def keep_prediction(settings: Settings, plan: Plan) -> None:
    """Note what was predicted, for the comparison after the run. Raises OSError."""
    low, high = plan.days_band
    content = {
        "at": time.time(),
        "measured": plan.measured.name,
        "keys": list(plan.keys),
        "properties": plan.properties,
        "devices": plan.devices,
        "predicted": plan.days * _SECONDS_A_DAY,
        "low": low * _SECONDS_A_DAY,
        "high": high * _SECONDS_A_DAY,
    }
    write_sealed(settings.state_directory / "plans" / "latest.json", content)


def comparisons(settings: Settings) -> list[PlanAndRun]:
    """Predictions and what their runs took, newest first; none where they do not read."""
    with contextlib.suppress(OSError, BrokenSealError, KeyError, TypeError):
        content = read_sealed(settings.state_directory / "plans" / "compared.json")
        return [PlanAndRun(**one) for one in content["compared"]]
    return []


def compare_with_run(settings: Settings) -> PlanAndRun | None:
    """Compare the latest prediction with its run, once that is over, and keep it; None before.

    What the run took: from the launch of its first partition to the last publication, without times of more
    than a quarter of an hour in which nobody worked, as the rate has it. The next plan reckons with the
    times of these partitions. Raises OSError, CatalogError.
    """
    try:
        told = read_sealed(settings.state_directory / "plans" / "latest.json")
        keys, name, at = list(told.pop("keys")), str(told.pop("measured", "")), float(told["at"])
        known = comparisons(settings)
        if any(one.at == at for one in known):
            return next(one for one in known if one.at == at)
        times = _launches_and_ends(settings, keys, since=at)
        if not times:
            return None
        found = PlanAndRun(**told, actual=_worked(times))
    except (FileNotFoundError, BrokenSealError, KeyError, TypeError):
        return None
    _learn(settings, name, times)
    content = {"compared": [asdict(one) for one in [found, *known][:_KEPT]]}
    write_sealed(settings.state_directory / "plans" / "compared.json", content)
    return found


def _launches_and_ends(
    settings: Settings, keys: Sequence[str], *, since: float
) -> dict[str, list[tuple[float, float]]] | None:
    """Of each partition and asset: launch and publication; None while one is not made, or was before."""
    times = {}
    for key in keys:
        found = []
        for asset in settings.computed_assets:
            try:
                span = launch_and_end(settings.layout.asset(asset), key)
            except RecordDamagedError:
                return None
            if span is None or span[0] < since:
                return None
            found.append(span)
        times[key] = found
    return times


def _worked(times: Mapping[str, Sequence[tuple[float, float]]]) -> float:
    """Seconds from the first launch to the last publication, without long times in which nobody worked."""
    total, end = 0.0, -math.inf
    for began, ended in sorted(one for asset in times.values() for one in asset):
        pause = began - end
        total += max(0.0, ended - max(began, end)) + (pause if 0 < pause <= GAP_SECONDS else 0.0)
        end = max(end, ended)
    return total


def _learn(settings: Settings, name: str, times: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Put what these real partitions took into the measurement, if there are enough of them.

    Raises OSError, CatalogError.
    """
    measured = next((one for one in kept(settings) if one.name == name), None)
    times = {key: one for key, one in times.items() if not _was_resumed(settings, key)}
    spans = [(first[0], last[1]) for first, last in times.values()]
    changes = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    at_once = max(accumulate(change for _, change in changes), default=1)
    if measured is None or len(times) < runs_to_measure(at_once):
        return
    whole = _all_images(settings, Catalog.open(settings.home))
    rows, images = zip(*(whole[key] for key in times if key in whole), strict=True)
    run = MeasuredRun.of(spans, properties=round(fmean(rows)), images=fmean(images), devices=at_once)
    # None of them had the machine alone, and the last one is the lightest.
    # Nor are they alike: how they differ says nothing of the machine.
    alone, repetitions, spread = 1.0, 0, 0.0
    if (before := measured.run) is not None:
        alone, repetitions, spread = before.alone_seconds / before.seconds, before.repetitions, before.spread
    run = replace(run, alone_seconds=run.seconds * alone, repetitions=repetitions, spread=spread)
    keep(settings, replace(measured, run=run))


def _was_resumed(settings: Settings, key: str) -> bool:
    """Whether the run that published a partition found rows of an earlier one, so that it took less."""
    record = PublishedPartitions(settings.descriptions).record(key)
    rows = None if record is None else PublishedRows.from_record(record)
    return rows is not None and any(one.first < (rows.began or 0.0) for one in rows.stretches)


_EXAMPLES = """\b
vlm-assets plan
vlm-assets plan --devices 8 --price-per-hour 1.80
vlm-assets plan --json"""


@app.command("plan", epilog=_EXAMPLES)
def plan_command(
    home: Home = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices that work; default: those of this machine.")
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0.0, help=f"Of one device for an hour; default {PREFIX}PRICE_PER_HOUR."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Properties to measure with, where nothing is measured yet.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what describing the rest will take: days, cost, disk, failures.

    Stands on what `vlm-assets try` measured under these settings. Where nothing was measured yet, it
    describes a sample and runs a few small partitions in a folder of their own; no row of the home is
    written.
    The prediction is kept, and compared with the run when that is over.
    """
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    require_models(current)
    gpu, model = build_gpu(current), build_vision_language_model(current)
    here = max(1, len(gpu.usable()))
    doing("comparing the last plan with its run")
    compare_with_run(current)
    doing("looking at the model and what was measured with it")
    found = measurement_of_now(current, model, gpu)
    if found is None or found.run is None:
        wanted = limit or max(20, min(4 * current.batch_size, 200))
        tell = None if as_json else partial(say, err=True)
        found = measure(current, catalog, gpu, model, limit=wanted, tell=tell)
    doing("planning what is left")
    try:
        width: int | None = build_text_embedding_model(current).width()
    except ModelLoadError:
        width = None
    made = make_plan(
        current,
        catalog,
        found,
        devices=devices or here,
        devices_here=here,
        price_per_hour=current.price_per_hour if price_per_hour is None else price_per_hour,
        vector_width=width,
    )
    if not made.is_anew:
        keep_prediction(current, made)
    if as_json:
        say_as_json(made.as_json())
    else:
        for line in lines(made):
            say(line)


def lines(plan: Plan) -> list[str]:
    """The plan in sentences."""
    low, high = (duration(one * _SECONDS_A_DAY) for one in plan.days_band)
    finish = datetime.fromtimestamp(plan.finish).astimezone().strftime("%Y-%m-%d %H:%M")
    what = "Everything is described; all of it anew" if plan.is_anew else "What is left"
    said = [
        f"{what}: {counted(plan.properties, 'properties')} with {counted(plan.images, 'images')} in"
        f" {counted(plan.partitions, 'partitions')}.",
        f"Time: {low} to {high} on {counted(plan.devices, 'devices')}, most likely"
        f" {duration(plan.days * _SECONDS_A_DAY)}: done {finish} if it starts now.",
    ]
    if plan.cost is not None and plan.cost_band is not None:
        said.append(f"Cost: {plan.cost_band[0]:,.2f} to {plan.cost_band[1]:,.2f}.")
    said += [
        f"Disk: {_size(plan.disk_bytes)} with second copies; {_size(plan.disk_free_bytes)} are free.",
        f"Traffic, where images and results lie on S3: {_size(plan.read_bytes)} read,"
        f" {_size(plan.disk_bytes)} written.",
        f"Failures of devices or machines: {plan.failures_expected:.2g} expected, {plan.no_failure:.0%} odds"
        f" of none; work done twice: {duration(plan.days_lost * _SECONDS_A_DAY)} of one device.",
        f"Commits: every {plan.commit_seconds_best:,.0f} s wastes least ({plan.commit_cost_best:.3%} of the"
        f" time; {PREFIX}COMMIT_SECONDS={plan.commit_seconds:.0f} wastes {plan.commit_cost:.3%} and loses"
        " less by a kill).",
        f"Range size: from {counted(plan.range_size, 'properties')} on start-up is below 2%; with"
        f" {plan.range_size_now:,} as it is now, {plan.start_share_now:.0%}.",
        f"What if (on so many devices; {command('try')} with other settings adds a row):",
    ]
    for row, of_row in plan.what_if.items():
        table = ", ".join(f"{count}: {duration(one * _SECONDS_A_DAY)}" for count, one in of_row.items())
        said.append(f"  {row}\n    {table}")
    said += [f"Note: {one}" for one in plan.notes]
    if plan.compared is not None:
        said.append(f"The last plan: {plan.compared.sentence()}")
    return said


def _size(size: float) -> str:
    for unit, of in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= of:
            return f"{size / of:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"
