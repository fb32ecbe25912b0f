"""What is measured before a forecast, what is said before it, and what is read from real runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.measurements import MEASURED
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.services import measurement
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.measurement import keep_measurement, measure, read_measurements
from vlm_assets.services.small_runs import MeasuredRun, _apart
from vlm_catalog.catalog import Catalog


def test_what_runs_take_is_read_from_when_they_were_launched_and_published() -> None:
    """A first wave does not count, for it fills caches; then both devices at work, one alone, and between."""
    times = [(0.0, 15.0), (0.5, 15.5), (16.0, 28.0), (16.5, 28.5), (29.0, 37.0)]
    found = MeasuredRun.from_times(times, properties=20, images=100.0, devices=2)
    assert (found.seconds, found.alone_seconds) == (12.0, 8.0)
    assert found.between_seconds == pytest.approx(1.0)
    assert (found.repetitions, found.spread) == (2, 0.0)
    uneven = MeasuredRun.from_times(
        [(0.0, 30.0), (31.0, 41.0), (42.0, 62.0), (63.0, 83.0)], properties=20, images=1.0, devices=1
    )
    assert (uneven.repetitions, uneven.spread) == (3, pytest.approx(math.log(2) / math.sqrt(3)))


def test_a_plan_says_before_it_measures_how_long_that_takes(uneven, monkeypatch) -> None:
    """Twelve silent minutes look like a command that hangs: the sample comes first, and tells of the rest."""
    settings = uneven.model_copy(update={"devices": "cpu:1"})
    catalog, gpu = Catalog.open(settings.home), build_gpu(settings)
    model = build_vision_language_model(settings)
    happened: list[str] = []

    def describe(_: object, limit: int, *, quiet: bool) -> None:
        happened.append(f"a sample of {limit}, {quiet=}")
        name = measurement._name(settings, model, f"{gpu.find()[0].id} ({gpu.find()[0].name})")
        keep_measurement(settings, replace(MEASURED, name=name, run=None))

    def run(*_: object) -> MeasuredRun | None:
        happened.append("runs")
        return MEASURED.run

    monkeypatch.setattr(measurement, "_try_apart", describe)
    monkeypatch.setattr(measurement, "measure_small_runs", run)
    found = measure(settings, catalog, gpu, model, limit=20, report=happened.append)
    first, sample, then, runs = happened
    assert "a sample of 8 properties is described" in first
    assert "how long the rest of measuring takes is said after it" in first
    assert (sample, runs) == ("a sample of 20, quiet=False", "runs")
    # 20 s for Dagster; each run: 4 s to start, 5 s to load, 2 properties of 10 images, 1.5 s to the next one.
    assert "5 small partitions of 2 properties run, as for real. That takes about 1.4 minutes, once" in then
    assert read_measurements(settings) == [found]
    assert found.run == MEASURED.run
    happened.clear()
    assert measure(settings, catalog, gpu, model, limit=20, report=happened.append) == found
    assert not happened, "all is measured"


def test_a_sample_that_cannot_be_described_ends_a_plan_with_a_sentence(uneven, monkeypatch) -> None:
    """The reason is what the other process said: nothing is run, and nothing kept."""
    settings = uneven.model_copy(update={"devices": "cpu:1"})
    gpu, model = build_gpu(settings), build_vision_language_model(settings)
    monkeypatch.setattr(measurement, "measure_small_runs", lambda *_: pytest.fail("it ran"))
    monkeypatch.setenv("VLM_ASSETS_HOME", str(settings.home.parent / "nothing is here"))
    with pytest.raises(CommandError, match="Why stands above"):
        measure(settings, Catalog.open(settings.home), gpu, model, limit=1)
    assert read_measurements(settings) == []


def test_devices_that_are_left_out_are_not_measured_with(uneven) -> None:
    """Runs in a home of their own know of no left-out device: they are told which ones are usable."""
    settings = uneven.model_copy(update={"devices": "cpu:2"})
    gpu, model = build_gpu(settings), build_vision_language_model(settings)
    for device, expected in (("cpu-0", ["cpu-1"]), ("cpu-1", [])):
        for occurrence in ("a", "b"):
            gpu.left_out_devices().note_failure(device, occurrence=occurrence, why="It fell off the bus.")
        assert [one.id for one in gpu.usable()] == expected
        if expected:
            assert _apart(settings, gpu.usable())["VLM_ASSETS_DEVICES"] == "cpu:1"
    with pytest.raises(CommandError, match="left out"):
        measure(settings, Catalog.open(settings.home), gpu, model, limit=1)
