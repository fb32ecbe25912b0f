"""The forecast: arithmetic that a person could redo, and a comparison with the run that followed."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from tests.support.measurements import MEASURED
from vlm_assets.assets.published_rows import COUNTED
from vlm_assets.services import forecast, small_runs
from vlm_assets.services.forecast import (
    best_commit_seconds,
    compare_with_run,
    comparisons,
    keep_forecast,
    make_forecast,
)
from vlm_assets.services.measurement import Measurement, keep_measurement, read_measurements
from vlm_assets.services.pace import Pace, range_size_advice
from vlm_assets.services.small_runs import MeasuredRun
from vlm_catalog.catalog import Catalog
from vlm_catalog.listing import IngestRequest
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine.batches import BATCH_SECONDS


def plan_of(settings, measured=MEASURED, **more):
    chosen = {"devices": 1, "devices_here": 1, **more}
    return make_forecast(settings, Catalog.open(settings.home), measured, **chosen)


@pytest.fixture
def published_at(monkeypatch):
    """Has partitions be published: when each began, and how long it took. more: what its record says."""

    def publish(times, more=MappingProxyType({})):
        def record(_: PublishedPartitions, key: str) -> PublishedRecord | None:
            if key not in times:
                return None
            began, seconds = times[key]
            ended = datetime.fromtimestamp(began + seconds).astimezone().isoformat()
            return PublishedRecord(key, 1, "", 0, 2, "", "", ended, {"began": began, **more.get(key, {})})

        monkeypatch.setattr(PublishedPartitions, "record", record)

    return publish


def test_the_best_interval_is_dalys() -> None:
    """Rare failures: the square root of Young; failures all the time: the time between two."""
    assert best_commit_seconds(0.02, 5000 * 3600.0) == pytest.approx(math.sqrt(0.04 * 1.8e7), rel=1e-3)
    assert best_commit_seconds(60.0, 600.0) == pytest.approx(268.33 * (1 + 0.0745 + 0.0056) - 60, rel=1e-3)
    assert best_commit_seconds(60.0, 20.0) == 20.0


def test_time_is_that_of_the_slowest_device_and_never_less_than_the_cores_take() -> None:
    """Partitions go to whichever device is free, the heaviest first; the decoders' cores bound them all."""
    pace = Pace(10.0, 1.0, base_cpu=0.0, image_cpu=0.0, cores=2, between_seconds=0.0)
    assert pace.seconds([30, 10, 10, 10], 2) == 60.0
    assert pace.seconds([10, 10, 10, 10, 30], 2) == 60.0, "last, the heavy one would end at 80"
    assert replace(pace, image_cpu=4.0).seconds([30, 10, 10, 10], 2) == 120.0
    assert replace(pace, image_cpu=4.0).seconds([30, 10, 10, 10], 2, machines=2.0) == 60.0


def test_runs_beside_each_other_share_the_cores_and_the_last_one_has_them_alone() -> None:
    """Two at once are half as fast each: 20 s for two of 10 s, and the third takes 10 s by itself."""
    pace = Pace(10.0, 1.0, 0.0, 0.0, 2, between_seconds=1.0, devices=2, shared=0.5)
    assert pace.seconds([0, 0, 0], 2) == 2 * 10.0 + 11.0
    assert pace.seconds([0, 0, 0], 1) == 10.0 + 11.0 + 11.0
    assert pace.seconds([0, 0], 2, machines=2.0) == 10.0


def test_a_plan_stands_on_images_partitions_and_what_a_run_takes(uneven, monkeypatch) -> None:
    """34 images at 0.1 s, four runs of 12 s, 1.5 s between; all figures are named."""
    embedder = SimpleNamespace(width=lambda: 250)
    monkeypatch.setattr(forecast, "build_text_embedding_model", lambda _: embedder)
    made = plan_of(uneven.model_copy(update={"embedding_model": "an/embedder"}), price_per_hour=3600.0)
    images = sum(min(count, uneven.max_images) for count in (1, 1, 3, 20, 2, 2, 1, 4))
    assert (made.properties, made.images, made.partitions) == (8, images, 4)
    seconds = made.days * 86_400
    assert seconds == pytest.approx(4 * 12 + 3 * 1.5 + images * 0.1, rel=1e-3)
    assert made.cost == pytest.approx(seconds, rel=1e-6)
    assert made.days_band[0] < made.days < made.days_band[1]
    assert made.disk_bytes == 2 * (1000 + 1000) * 8
    assert made.failures_expected == pytest.approx(seconds / 3600 / forecast.MTBF_HOURS, rel=1e-2)
    assert made.no_failure == pytest.approx(math.exp(-made.failures_expected))
    # 49 times 13.5 s of start-up, at 0.1 s an image and 3.25 images a property.
    assert made.range_size == 3000
    assert [days[1] for days in made.what_if.values()] == [pytest.approx(made.days, rel=1e-3)]
    (days,) = made.what_if.values()
    assert days[4] < days[2] < days[1]
    assert json.loads(json.dumps(made.as_json()))["range_size"] == 3000


def test_another_measurement_of_the_same_name_stands_in_a_row_of_its_own(uneven) -> None:
    """Measured with another prompt, twice as slow: neither takes the place of what holds now."""
    keep_measurement(
        uneven, replace(MEASURED, name="another prompt", batches=((10, 100, 20.0),) * 4, run=None)
    )
    made = plan_of(uneven)
    now, other = (days[1] for days in made.what_if.values())
    assert now == pytest.approx(made.days, rel=1e-3)
    assert other > now


def test_an_ingest_proposes_the_partition_size_that_the_plan_names(uneven) -> None:
    """Known before the first run, when it can still be changed for all."""
    request = IngestRequest(Path("list.csv"), image_root=Path("photos"))
    said = range_size_advice(uneven, 100, 3.25, request)
    assert said is not None and "vlm-assets plan" in said, "nothing is measured yet"
    keep_measurement(uneven, MEASURED)
    said = range_size_advice(uneven, 100, 3.25, request)
    assert said is not None and "spend 29% of their time" in said
    assert "`vlm-assets ingest list.csv --image-root photos --range-size 3000`" in said
    assert range_size_advice(uneven, 3000, 3.25, request) is None


def test_devices_at_work_share_the_cores_as_the_measured_ones_did() -> None:
    """Between one alone and all that were measured it goes evenly; more than those share as these do."""
    pace = Pace(10.0, 1.0, 0.0, 0.0, 2, between_seconds=0.0, devices=5, shared=0.2)
    assert [pace.speed(count) for count in (1, 2, 3, 5, 9)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])
    # Three together until 10 / 0.6 s; on a machine each they are alone.
    assert pace.seconds([0, 0, 0], 3) == pytest.approx(10 / 0.6)
    assert pace.seconds([0, 0, 0], 3, machines=3.0) == 10.0
    measured = replace(MEASURED, run=replace(MEASURED.run, devices=3, seconds=40.0, alone_seconds=30.0))
    assert Pace.from_measurement(measured).speed(3) == pytest.approx(0.75)
    assert Pace.from_measurement(measured).base_seconds == pytest.approx(30 - 200 * 0.1)
    faster_together = replace(MEASURED, run=replace(MEASURED.run, devices=2, seconds=20.0))
    assert Pace.from_measurement(faster_together).speed(2) == 1.0


def test_work_lost_is_half_a_commit_half_a_batch_and_a_start_for_each_failure(uneven, monkeypatch) -> None:
    """By hand: what is on the device since the last commit and batch, and the next launch; on it alone."""
    calm = plan_of(uneven)
    monkeypatch.setattr(forecast, "MTBF_HOURS", 0.02)
    rough = uneven.model_copy(update={"commit_seconds": 60.0})
    made = plan_of(rough)
    images = sum(min(count, uneven.max_images) for count in (1, 1, 3, 20, 2, 2, 1, 4))
    seconds = 4 * 12 + 3 * 1.5 + images * 0.1
    assert made.failures_expected == pytest.approx(seconds / 72)
    # A batch of 256 images takes 25.6 s, and no longer than BATCH_SECONDS.
    again = 60 / 2 + min(BATCH_SECONDS, 25.6) / 2 + 13.5
    assert made.days_lost * 86_400 == pytest.approx(made.failures_expected * again)
    assert made.days * 86_400 == pytest.approx(seconds + made.days_lost * 86_400)
    two = plan_of(rough, devices=2, devices_here=2)
    assert two.days_lost > 0
    at_work = Pace.from_measurement(MEASURED).seconds([5, 23, 4, 2], 2)
    assert two.days * 86_400 == pytest.approx(at_work + two.days_lost * 86_400 / 2, rel=0.02)
    # The upper end has the failures that are likely at most; the lower end has none.
    assert made.days_band[1] / calm.days_band[1] > made.days / calm.days
    assert made.days_band[0] == pytest.approx(calm.days_band[0], rel=0.01)


SPEEDS = (
    0.14, 0.31, 0.31, 0.33, 0.47, 0.48, 0.46, 0.21, 0.24, 0.26, 0.20, 0.24, 0.19, 0.19, 0.25,
    0.18, 0.49, 0.36, 0.37, 0.42, 0.40, 0.45, 0.51, 0.29, 0.24, 0.31, 0.29, 0.41, 0.61, 0.67,
    0.32, 0.41, 0.48, 0.27, 0.19, 0.18, 0.12, 0.17, 0.16, 0.20, 0.14, 0.23, 0.05, 0.23, 0.18,
    0.23, 0.17, 0.13, 0.23, 0.27, 0.24, 0.20, 0.24, 0.15, 0.08, 0.14, 0.08, 0.10, 0.18, 0.22,
)  # fmt: skip
"""Seconds that the same work took every four seconds, on two cores that eight others worked on as well."""

STEP = 4.0


class SharedMachine:
    """A machine that is as fast at each moment as that one was, or differs by a root of it.

    The quickest second is a second.
    """

    def __init__(self, seed: int, *, power: float = 1.0) -> None:
        self._slowness = [(one / min(SPEEDS)) ** power for one in SPEEDS]
        self.now = random.Random(seed).uniform(0, STEP * len(SPEEDS))

    def work(self, seconds: float) -> tuple[float, float]:
        """Do work of so many seconds; when it began and ended."""
        began = self.now
        while seconds > 1e-9:
            slower = self._slowness[int(self.now / STEP) % len(SPEEDS)]
            wall = min(seconds * slower, STEP - self.now % STEP + 1e-6)
            seconds, self.now = seconds - wall / slower, self.now + wall
        return began, self.now

    def measured(self) -> Measurement:
        """Five runs one after the other, the first of which does not count, and five batches."""
        times = []
        for _ in range(5):
            times.append(self.work(2.0))
            self.now += 1.5
        run = MeasuredRun.from_times(times, properties=20, images=10.0, devices=1)
        batches = [(8, 20, ended - began) for began, ended in (self.work(0.4) for _ in range(5))]
        return replace(MEASURED, device="cpu-0 (slot)", run=run, batches=tuple(batches), batch_images=20)

    def run(self, images: Sequence[int]) -> list[tuple[float, float]]:
        """A partition after the other, a while later: 1.8 s and 0.02 s an image, 1.5 s between."""
        self.now += 60.0
        times = []
        for count in images:
            times.append(self.work(1.8 + 0.02 * count))
            self.now += 1.5
        return times


def test_the_band_holds_in_nine_of_ten_first_plans_on_a_machine_with_neighbours(uneven) -> None:
    """Nothing is known but the measured runs. The machine is faster or slower by 26% (standard deviation)."""
    inside = 0
    for seed in range(60):
        machine = SharedMachine(seed, power=0.5)
        made = plan_of(uneven, machine.measured())
        times = machine.run([23, 5, 4, 2])
        low, high = (86_400 * one for one in made.days_band)
        inside += low <= times[-1][1] - times[0][0] <= high
    assert inside >= 54


def test_the_band_holds_in_nine_of_ten_plans_that_know_the_ones_before(uneven, published_at) -> None:
    """Thirty times planned, run and compared, where 52% is usual: a band learns how far plans were off."""
    spans: dict[str, tuple[float, float]] = {}
    published_at(spans)
    for repetition in range(30):
        machine = SharedMachine(100 + repetition)
        spans.clear()
        made = plan_of(uneven, machine.measured())
        keep_forecast(uneven, made)
        times = machine.run([23, 5, 4, 2])
        at = time.time() + 10 - times[0][0]
        spans.update(zip(made.keys, ((at + began, ended - began) for began, ended in times), strict=True))
        assert compare_with_run(uneven) is not None
    compared = comparisons(uneven)
    assert len(compared) == 30
    assert sum(one.low <= one.actual <= one.high for one in compared) >= 27


def test_a_machine_that_is_even_gets_a_narrow_band(uneven) -> None:
    """A band that is always wide holds as well, and says nothing: here it is within 10%."""
    even = replace(
        MEASURED, run=replace(MEASURED.run, repetitions=4, spread=0.01), batches=((10, 100, 10.0),) * 6
    )
    made = plan_of(uneven, even)
    low, high = made.days_band
    assert 1.03 < high / made.days < 1.10
    assert 1.03 < made.days / low < 1.10
    uneven_runs = replace(even, run=replace(even.run, spread=0.3))
    assert plan_of(uneven, uneven_runs).days_band[1] > 1.3 * high


@pytest.mark.usefixtures("published")
def test_where_nothing_is_left_the_plan_is_of_all_of_it_anew(uneven) -> None:
    """A finished home still says what a new generation would take."""
    made = plan_of(uneven)
    assert made.is_anew
    assert made.properties == 8


def test_batches_that_differ_widen_the_band(uneven) -> None:
    """A rate that jumps is not told as if it were certain."""
    jumping = replace(MEASURED, batches=((10, 100, 14.0), (10, 100, 5.0), (10, 100, 15.0), (10, 100, 10.0)))
    calm, wild = plan_of(uneven).days_band, plan_of(uneven, jumping).days_band
    assert wild[0] < calm[0] < calm[1] < wild[1]


def test_without_an_embedding_model_no_vectors_are_counted_and_none_is_missed(uneven) -> None:
    """A set by itself has no vectors: the plan speaks of them only where a named model does not load."""
    alone = plan_of(uneven.model_copy(update={"embedding_model": None}))
    assert (alone.disk_bytes, [note for note in alone.notes if "vectors" in note]) == (2 * 1000 * 8, [])
    lacks = plan_of(uneven.model_copy(update={"embedding_model": "no/such/embedder"}))
    assert [note for note in lacks.notes if "does not load" in note]


@pytest.mark.parametrize("embeds", [True, False])
def test_a_prediction_is_compared_once_all_of_its_partitions_were_made(uneven, embeds, published_at) -> None:
    """After the run, the plan is compared with it, without the pauses; the result widens the next band."""
    embedder = uneven.embedding_model or "an/embedder"
    uneven = uneven.model_copy(update={"embedding_model": embedder if embeds else None})
    made = plan_of(uneven)
    keep_forecast(uneven, made)
    assert compare_with_run(uneven) is None
    at = datetime.now().timestamp() + 10
    # One after the other with two seconds between, and a night before the last.
    begins = (at, at + 32, at + 64, at + 50_000)
    published_at({key: (began, 30) for key, began in zip(made.keys, begins, strict=True)})
    found = compare_with_run(uneven)
    assert found is not None
    assert found.actual == pytest.approx(4 * 30 + 2 * 2, abs=0.1)
    assert compare_with_run(uneven) == found
    assert comparisons(uneven) == [found]
    assert plan_of(uneven).compared == found
    assert f"{found.off:+.1%}" in found.sentence()
    after = plan_of(uneven)
    assert after.days_band[0] < after.days * found.actual / found.predicted < after.days_band[1]
    assert after.days_band[1] / after.days > 1.5 * made.days_band[1] / made.days


def test_the_next_plan_stands_on_what_real_partitions_took(uneven, monkeypatch, published_at) -> None:
    """A run that took twice as long as was measured: the next plan says so, whatever devices were named."""
    monkeypatch.setattr(small_runs, "STEADY_RUNS", 3)
    keep_measurement(uneven, MEASURED)
    made = plan_of(uneven, devices=8)
    keep_forecast(uneven, made)
    at = datetime.now().timestamp() + 10
    published_at({key: (at + 61.0 * number, 60) for number, key in enumerate(made.keys)})
    assert compare_with_run(uneven) is not None
    (learned,) = read_measurements(uneven)
    assert learned.run is not None
    assert (learned.run.devices, learned.run.properties) == (1, 2)
    assert plan_of(uneven, learned).days * 86_400 == pytest.approx(4 * 60 + 3 * 1, rel=0.02)


def test_what_was_resumed_does_not_say_what_a_partition_takes(uneven, monkeypatch, published_at) -> None:
    """Half of its rows were there: its second run was over soon, and the next plan would be too short."""
    monkeypatch.setattr(small_runs, "STEADY_RUNS", 1)
    keep_measurement(uneven, MEASURED)
    made = plan_of(uneven)
    keep_forecast(uneven, made)
    at = datetime.now().timestamp() + 10
    times, counted = {}, {}
    for number, key in enumerate(made.keys):
        began, is_resumed = at + 61.0 * number, number == 1
        times[key] = began, 6 if is_resumed else 60
        stretch = {"device": "d", "first": began - 500 * is_resumed, "last": began, "rows": 2}
        counted[key] = {COUNTED: {"kinds": {"ok": 2}, "stretches": [stretch]}}
    published_at(times, counted)
    assert compare_with_run(uneven) is not None
    (learned,) = read_measurements(uneven)
    assert learned.run is not None
    assert round(learned.run.seconds) == 60


def test_a_short_last_partition_says_nothing_of_how_devices_share(uneven, monkeypatch, published_at) -> None:
    """A tail is over sooner because it is small: the other devices are not as much slower for that."""
    monkeypatch.setattr(small_runs, "STEADY_RUNS", 0)
    keep_measurement(uneven, MEASURED)
    made = plan_of(uneven)
    keep_forecast(uneven, made)
    at = datetime.now().timestamp() + 10
    times = ((at, 60), (at, 60), (at + 61, 60), (at + 62, 6))
    published_at(dict(zip(made.keys, times, strict=True)))
    compare_with_run(uneven)
    (learned,) = read_measurements(uneven)
    assert learned.run is not None
    assert (learned.run.devices, round(learned.run.seconds)) == (2, 60)
    assert learned.run.alone_seconds == learned.run.seconds


@pytest.mark.usefixtures("published")
def test_what_was_made_before_the_prediction_is_no_run_of_it(uneven) -> None:
    """Finished partitions of last week do not stand for the run that was planned today."""
    keep_forecast(uneven, plan_of(uneven))
    assert compare_with_run(uneven) is None
