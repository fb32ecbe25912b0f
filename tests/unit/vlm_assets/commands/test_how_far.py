"""Every command that may take more than 5 s says what it does and how far it is; none is forgotten."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import click
import pytest
from typer.testing import CliRunner

from tests.support.activity import Told, check_steps, commands_of
from tests.support.homes import Dataset
from tests.support.listings import write_listing
from tests.support.measurements import MEASURED
from tests.support.scripted_engine import scripted_engine  # noqa: F401 - a fixture
from vlm_assets.assets import row_counts
from vlm_assets.commands import device_commands, terminal
from vlm_assets.commands import run as run_module
from vlm_assets.commands.main import app
from vlm_assets.commands.run import BackfillLines
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.config.settings import Settings
from vlm_assets.services import home_audit, measurement
from vlm_assets.services.backfill import BackfillProgress
from vlm_assets.services.small_runs import MeasuredRun
from vlm_durable.files.files import make_directory

QUICK = {
    "alerts": "reads the control state",
    "alerts close": "writes to the control state",
    "devices": "reads the control state and the driver",
    "devices resume": "writes to the control state",
    "questions": "reads nothing but settings",
    "questions add": "reads the records, and writes one file",
    "settings": "reads nothing but settings",
    "show": "reads one property",
}
"""Commands that are done, or are up, in less than 5 s; why."""

KEY = "000000000-000000002"


def quarantine(dataset: Dataset, _: pytest.MonkeyPatch) -> None:
    """A file that may belong to any partition: all are read before it goes."""
    folder = dataset.settings.descriptions.quarantine
    make_directory(folder)
    (folder / "left.parquet").write_bytes(b"left")


def damage(dataset: Dataset, _: pytest.MonkeyPatch) -> None:
    path = dataset.settings.descriptions.partition(KEY).published
    path.write_bytes(path.read_bytes()[:100])


def one_at_a_time(_: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_audit, "_RANGES_TOGETHER", 1)
    monkeypatch.setattr(row_counts, "_FILES_TOGETHER", 1)


def name_ids(dataset: Dataset, _: pytest.MonkeyPatch) -> None:
    (dataset.settings.home.parent / "ids.txt").write_text("p1\n")


def back_up(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = dataset.settings.home.parent
    done = CliRunner().invoke(app, ["backup", str(folder / "backup"), "--home", str(dataset.settings.home)])
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("VLM_ASSETS_HOME", str(folder / "restored"))


def hold_a_device(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has not ended yet when the devices are looked at first."""

    @dataclass
    class Leases:
        looks: int = 0

        def leases(self) -> Leases:
            return self

        def holders(self) -> list[Any]:
            self.looks += 1
            return [click.UsageError("")] if self.looks < 3 else []

    monkeypatch.setattr(device_commands, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(click.UsageError, "sentence", lambda self: "", raising=False)
    monkeypatch.setattr(device_commands, "build_gpu", lambda settings: Leases())


def without_dagster(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "run_partitions", lambda *arguments, **options: 0)
    monkeypatch.setattr(run_module, "run_backfill", lambda *arguments, **options: 0)
    monkeypatch.setattr(run_module, "serve", lambda *arguments, **options: None)
    source = write_listing(dataset.settings.home.parent / "listing.jsonl", {"p0": ["0.jpg"]})
    monkeypatch.setenv("VLM_ASSETS_SOURCE", str(source))
    monkeypatch.setenv("VLM_ASSETS_IMAGE_ROOT", dataset.catalog.image_root)


def without_counted_images(_: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an image costs would take transformers, and says nothing of how far a command is."""
    monkeypatch.setattr("tests.support.scripted_engine._image_tokens", lambda *_: None)


def measured_runs(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would be done in processes of their own: ``compare`` in one, and a Dagster."""

    def describe(settings: Settings, limit: int, *, quiet: bool) -> None:
        device = build_gpu(settings).find()[0]
        name = measurement._name(
            settings, build_vision_language_model(settings), f"{device.id} ({device.name})"
        )
        measurement.keep_measurement(settings, replace(MEASURED, name=name, run=None))

    monkeypatch.setattr(measurement, "_try_apart", describe)
    run = MeasuredRun(3, 3.0, 1, seconds=5.0, alone_seconds=5.0, between_seconds=1.0)
    monkeypatch.setattr(measurement, "measure_small_runs", lambda *arguments: run)


TELLS: Mapping[str, Told | str] = {
    "alerts deliver": Told("alerts deliver", {"waiting for the answers of 1 target, 20 s at most": 0}),
    "alerts test": Told("alerts test", {"waiting for the answers of 1 target, 20 s at most": 0}),
    "audit": Told(
        "audit --deep",
        {
            "looking at the files and journals of partitions": 3,
            "reading the catalogue's ids, partitions": 3,
            "comparing ids with the catalogue's, files": 6,
        },
        one_at_a_time,
    ),
    "backup": Told(
        "backup FOLDER/backup",
        {
            "copying the control state": 0,
            "copying property_descriptions, partitions": 3,
            "copying property_embeddings, partitions": 3,
        },
    ),
    "compare": Told(
        "compare --model example --model example --limit 4",
        {"describing the sample with example": 4},
        without_counted_images,
        ("scripted_engine",),
    ),
    "demo": Told(
        "demo --no-run --properties 2 --home FOLDER/example",
        {"rendering the images of properties": 2, "taking properties in": 2},
    ),
    "devices pause": Told(
        "devices pause", {f"{device_commands._DRAINING}": 1, "ending model servers": 0}, hold_a_device
    ),
    "doctor": Told("doctor --quick", {"trying what a run will need (state), checks": 0}),
    "ingest": Told(
        "ingest FOLDER/listing.jsonl", {"reading (100%): 1 property, 1 image": 0}, without_dagster
    ),
    "plan": Told(
        "plan --limit 4",
        {"looking at the model and what was measured with it": 0, "planning what is left": 0},
        measured_runs,
    ),
    "prune": Told(
        "prune --yes",
        {
            "looking at the partitions of property_descriptions": 3,
            "reading every byte of property_descriptions, partitions": 3,
        },
        quarantine,
    ),
    "repair": Told(
        "repair --yes",
        {
            "looking at the files and journals of partitions": 3,
            "reading the files of wrong partitions": 1,
            "putting right": 1,
        },
        damage,
    ),
    "restore": Told("restore FOLDER/backup --home FOLDER/restored", {"restoring files": -1}, back_up),
    "run": Told("run", {"reading where partitions stand": 3}, without_dagster),
    "serve": Told("serve", {"trying what a run will need (state), checks": 0}, without_dagster),
    "status": Told("status", {"reading where partitions stand": 3}),
    "withdraw": Told(
        "withdraw --ids FOLDER/ids.txt --yes",
        {
            "looking for the properties in partitions": 3,
            "removing the properties from the catalogue and its copies": 0,
            "removing the properties from partitions": 1,
        },
        name_ids,
    ),
}
"""Commands that take longer, with what each says; or the test that sees to it."""


def test_each_command_is_quick_or_tells_how_far_it_is() -> None:
    """A new command is put into one of the lists: nobody waits before an empty line."""
    assert not QUICK.keys() & TELLS.keys()
    assert QUICK.keys() | TELLS.keys() == commands_of("vlm_assets")
    assert {one for one in TELLS.values() if isinstance(one, str)} <= globals().keys()


@pytest.mark.parametrize("name", [name for name, told in TELLS.items() if isinstance(told, Told)])
def test_a_command_says_what_it_does_and_how_far_it_is(name, dataset, steps, monkeypatch, receiver, request):
    """Each command over a small home: what takes long is said, up to the last of what can be counted."""
    told = TELLS[name]
    assert isinstance(told, Told)
    check_steps(name, told, dataset, steps, monkeypatch, receiver, request)


def test_a_backfill_says_how_many_of_its_partitions_are_done() -> None:
    """Into a file, a line at every change; on a terminal a bar."""
    keys = [f"{3 * n:09d}-{3 * n + 2:09d}" for n in range(4)]
    for is_terminal in (False, True):
        console = terminal.TerminalConsole(file=io.StringIO(), force_terminal=is_terminal, width=100)
        with BackfillLines(console).progress(len(keys)) as show:
            for done in range(2):
                show(
                    BackfillProgress(
                        frozenset(keys[:done]), frozenset(keys[done:]), frozenset(), 1,
                        properties=3 * done, rate=0.5, seconds_left=18.0,
                    )
                )  # fmt: skip
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert re.search(r"1/4 partitions, 1 running, 0 failed; 3 properties, 0.50/s, 0:00:18 left", shown)
