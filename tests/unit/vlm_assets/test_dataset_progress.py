"""The page of the whole dataset: picture, figures, and a schedule that starts nothing where nothing moves."""

from __future__ import annotations

import base64
import io
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from PIL import Image

from resources.pause import pause, resume
from resources.workers import Workers
from vlm_assets.catalog import Catalog
from vlm_assets.dataset_progress import LOOKS, build_dataset_progress, build_progress_schedule
from vlm_assets.partition_states import State
from vlm_assets.settings import Settings, load_settings

FOLLOWED = ["property_descriptions", "property_embeddings"]


class Ticks:
    """The schedule of a home, ticked by hand."""

    def __init__(self, settings: Settings) -> None:
        self.schedule = build_progress_schedule(settings, build_dataset_progress(settings, followed=FOLLOWED))
        self.number = 0

    def tick(self) -> dg.RunRequest | dg.SkipReason:
        self.number += 1
        at = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(minutes=10 * self.number)
        with dg.build_schedule_context(scheduled_execution_time=at) as context:
            found = self.schedule(context)
        assert isinstance(found, dg.RunRequest | dg.SkipReason)
        return found

    def key(self) -> str:
        found = self.tick()
        assert isinstance(found, dg.RunRequest)
        assert found.run_key
        return found.run_key


def test_page_has_the_picture_and_the_figures(dataset) -> None:
    """Materialize: the picture inline, what happens next, and numbers that Dagster plots over time."""
    progress = build_dataset_progress(dataset.settings, followed=FOLLOWED)
    result = dg.materialize([progress], selection=["dataset_progress"])
    (event,) = result.asset_materializations_for_node("dataset_progress")
    metadata = event.metadata
    head, _, encoded = metadata["progress"].value.partition("base64,")
    assert head == "![all partitions](data:image/png;"
    picture = Image.open(io.BytesIO(base64.b64decode(encoded.removesuffix(")"))))
    assert picture.width > 800
    numbers = {name: one.value for name, one in metadata.items() if isinstance(one.value, int | float)}
    assert numbers["percent described"] == 100.0
    assert numbers["properties described"] == 9
    assert numbers["failed rows"] == 1
    assert numbers["partitions done"] == 3
    assert numbers["hours left"] == 0.0
    assert "| missing | 1 |" in metadata["failed rows by kind"].value
    assert "vlm-assets audit" in metadata["what happens next"].value


def test_every_state_has_a_look() -> None:
    """No state of a partition is missing from the picture."""
    assert set(LOOKS) == set(State)


def test_schedule_starts_nothing_where_nothing_moves(dataset) -> None:
    """The same key again is no new run; a publication, a worker or new properties make another."""
    ticks = Ticks(dataset.settings)
    first = ticks.key()
    assert ticks.key() == first
    dataset.describe(dataset.keys[0], text="another house")
    second = ticks.key()
    assert second != first
    workers = Workers(dataset.settings.state_directory / "workers")
    with workers.begin(run_id="r", asset="property_descriptions", partition=dataset.keys[0], expected=3):
        working = ticks.key()
        assert len({first, second, working, ticks.key()}) == 4
    # The last picture showed it running: one more look, and then rest.
    after = ticks.key()
    assert after not in (second, working)
    assert ticks.key() == after


def test_schedule_honours_the_pause_and_a_home_without_catalogue(dataset, tmp_path: Path) -> None:
    """While paused nothing is started, and the tick says so; without a catalogue there is nothing to show."""
    ticks = Ticks(dataset.settings)
    pause(dataset.settings.state_directory, "the night", now=time.time())
    found = ticks.tick()
    assert isinstance(found, dg.SkipReason)
    assert "the night" in str(found.skip_message)
    resume(dataset.settings.state_directory)
    assert ticks.key()
    nothing = Ticks(load_settings(home=tmp_path / "nothing")).tick()
    assert isinstance(nothing, dg.SkipReason)


def test_a_tick_does_not_grow_with_the_dataset(dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand partitions cost a tick no more than three: it opens neither catalogue nor records."""

    def refuse(home: Path) -> Catalog:
        raise AssertionError("a tick opened the catalogue")

    monkeypatch.setattr(Catalog, "open", refuse)
    before = time.process_time()
    Ticks(dataset.settings).key()
    assert time.process_time() - before < 0.5
