"""The commands with which a person begins: what they take from the settings, and what they say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from vlm_assets.commands import run as run_module
from vlm_assets.commands.main import app
from vlm_assets.config.resource_settings import runs_at_once
from vlm_assets.config.settings import PREFIX, Settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home of this test's own, which nothing but the test sets anything for."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(Settings.model_config, "env_file", tmp_path / "none.env")
    monkeypatch.setenv(f"{PREFIX}HOME", str(tmp_path / "home"))
    monkeypatch.setenv(f"{PREFIX}MODEL", "example")
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder tree of five properties with an image each."""
    for name in "abcde":
        folder = tmp_path / "source" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "1.jpg")
    return tmp_path / "source"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Dagster would be started with; it is not."""
    asked: list[dict[str, Any]] = []

    def run_backfill(settings: Settings, **options: Any) -> int:
        asked.append({"settings": settings, **options})
        return 0

    monkeypatch.setattr(run_module, "run_backfill", run_backfill)
    return asked


@pytest.fixture
def said() -> Callable[..., str]:
    """Runs a command and gives what it says."""

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return run


def sizes(home: Path) -> list[int]:
    """Properties of each range."""
    return [len(one) for one in Catalog.open(home).ranges]


def test_settings_are_listed_with_whole_names(said, monkeypatch) -> None:
    """Names are copied and searched for: a narrow terminal, or a pipe, cuts none of them."""
    monkeypatch.setenv("COLUMNS", "40")
    listed = said("settings")
    assert [f"{PREFIX}{name.upper()}=" in listed for name in Settings.model_fields].count(False) == 0


def test_the_range_size_of_the_settings_holds_for_every_way_in(said, source, home, monkeypatch) -> None:
    """VLM_ASSETS_RANGE_SIZE is no matter of `make run` alone; an option goes before it."""
    monkeypatch.setenv(f"{PREFIX}RANGE_SIZE", "2")
    said("ingest", str(source), "--close")
    assert sizes(home) == [2, 2, 1]
    said("ingest", str(source), "--home", str(home.with_name("other")), "--range-size", "4")
    assert sizes(home.with_name("other")) == [4]


def test_a_start_keeps_the_range_size_that_was_ingested_with(said, source, home, started, monkeypatch):
    """`ingest --range-size N` once: new properties that `make run` takes in come in ranges of N too."""
    said("ingest", str(source), "--range-size", "2")
    for name in "fghi":
        (source / "a").rename(source / name)
        (source / "a").mkdir()
        Image.new("RGB", (8, 8)).save(source / "a" / "1.jpg")
    monkeypatch.setenv(f"{PREFIX}SOURCE", str(source))
    said("demo")
    assert sizes(home) == [2, 2, 2, 2, 1]
    assert len(started) == 1


def test_a_start_without_a_source_goes_on_with_what_is_catalogued(said, source, home, started) -> None:
    """In a shell without VLM_ASSETS_SOURCE no example is mixed into a person's own home, nor judged."""
    ingest(source, home)
    told = said("demo")
    assert "nothing new is taken in" in told
    assert not (home / "example").exists()
    assert started[0]["accuracy"]() is None


@pytest.mark.parametrize(("chosen", "devices", "slots"), [(None, "cpu:3", 3), ("cpu:1", "cpu:1", 1)])
def test_the_example_keeps_every_core_busy(chosen, devices, slots, said, started, monkeypatch) -> None:
    """Its partitions are start-up and little else: a slot a core, unless a setting says how many."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    if chosen is not None:
        monkeypatch.setenv(f"{PREFIX}DEVICES", chosen)
    said("demo", "--properties", "2")
    assert started[0]["environment"][f"{PREFIX}DEVICES"] == devices
    assert runs_at_once(started[0]["settings"]) == slots
