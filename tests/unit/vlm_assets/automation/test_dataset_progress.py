"""The page of the whole dataset: picture, figures, and a sensor that starts nothing where nothing moves."""

from __future__ import annotations

import base64
import io
import itertools
import time
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest
from PIL import Image

from tests.support.listings import write_listing
from vlm_assets.assets.partition_state import State
from vlm_assets.automation.dataset_progress import (
    Drawn,
    build_dataset_progress,
    build_progress_sensor,
    progress_metadata,
)
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.database import open_state
from vlm_durable.state.pause import pause, resume
from vlm_durable.state.workers import Workers
from vlm_durable.versions.published import PublishedPartitions


class Ticks:
    """The sensor of a home, ticked by hand once a minute."""

    def __init__(self, settings: Settings) -> None:
        self.sensor = build_progress_sensor(settings, build_dataset_progress(settings))
        self.cursor: str | None = None

    def tick(self) -> str:
        """DRAWN where a picture was reported, or the reason why nothing was. No run is ever asked for."""
        with (
            dg.DagsterInstance.ephemeral() as instance,
            dg.build_sensor_context(instance, cursor=self.cursor) as context,
        ):
            found = self.sensor(context)
            self.cursor = context.cursor
        if isinstance(found, dg.SkipReason):
            return str(found.skip_message)
        assert isinstance(found, dg.SensorResult)
        self.cursor = found.cursor or self.cursor
        assert not found.run_requests
        (event,) = found.asset_events
        assert event.asset_key == dg.AssetKey("dataset_progress")
        if "progress" not in event.metadata:
            return str(event.metadata["what to do first"].value)
        assert "base64," in event.metadata["progress"].value
        return DRAWN


DRAWN = "drawn"
RESTS = "Nothing has moved, or the picture is young."


@pytest.fixture
def sketches(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The pause that each picture was given. Pictures are quick to draw: test_picture.py looks at them."""
    paused: list[str | None] = []

    def draw(*_: object, **more: str | None) -> bytes:
        paused.append(more["paused"])
        return b"png"

    monkeypatch.setattr("vlm_assets.automation.dataset_progress.progress_picture", draw)
    return paused


def test_page_has_the_picture_and_the_figures(dataset) -> None:
    """Materialize: the picture inline, what happens next, and numbers that Dagster plots over time."""
    progress = build_dataset_progress(dataset.settings)
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


@pytest.mark.usefixtures("sketches")
def test_rows_that_a_check_keeps_back_are_not_counted_as_described(uneven: Settings, commit, refuse) -> None:
    """Three rows are committed, two of them refused: the page does not say that they are there to be used."""
    for key, rows in (("000000002-000000003", 1), ("000000004-000000005", 2)):
        commit(uneven, key, rows)
    refuse(uneven, "000000004-000000005")
    status = read_status(uneven, Catalog.open(uneven.home))
    metadata = progress_metadata(status)
    assert metadata["properties described"].value == 1
    assert metadata["percent described"].value == 12.5
    (refused,) = [one for one in status.partitions if one.state is State.REFUSED]
    assert (refused.percent, refused.usable_rows) == (100.0, 0)


@pytest.mark.usefixtures("sketches")
def test_a_picture_is_drawn_where_something_moved_and_came_to_rest(dataset, monkeypatch) -> None:
    """The first at once; then only after a publication or a worker, and not while the last one is young.

    Where nothing is drawn, ten thousand partitions cost no more than three: no record is opened.
    """
    ticks = Ticks(dataset.settings)
    assert [ticks.tick(), ticks.tick()] == [DRAWN, RESTS]
    dataset.describe(dataset.keys[0], text="another house")
    assert [ticks.tick() for _ in range(3)] == [RESTS, DRAWN, RESTS]
    with at_work(dataset.settings, dataset.keys[0]):
        assert ticks.tick() == RESTS, "the last picture is not a minute old"
    # The worker is gone, and a picture may still show it: one more, when the next tick finds all at rest.
    assert [ticks.tick() for _ in range(3)] == [RESTS, DRAWN, RESTS]

    def refuse(*_: object) -> None:
        raise AssertionError("a tick opened a partition")

    monkeypatch.setattr(Catalog, "open", refuse)
    monkeypatch.setattr(PublishedPartitions, "record", refuse)
    assert ticks.tick() == RESTS


@pytest.mark.usefixtures("sketches")
def test_a_pause_is_drawn_once_when_all_is_at_rest_and_its_end_too(dataset) -> None:
    """While it drains the picture would show partitions as running for all of the pause."""
    ticks = Ticks(dataset.settings)
    assert ticks.tick() == DRAWN
    with at_work(dataset.settings, dataset.keys[0]):
        pause(control_state(dataset.settings), "the night", now=time.time())
        assert "the night" in ticks.tick(), "it still commits"
    assert ticks.tick() == DRAWN, "drawn without waiting"
    assert "Nothing is started: paused since" in ticks.tick(), "drawn once"
    resume(control_state(dataset.settings))
    assert [ticks.tick(), ticks.tick()] == [DRAWN, RESTS], "it is not paused for longer than it is"


def test_page_says_since_when_and_why_it_is_paused(uneven: Settings, commit, sketches) -> None:
    """Asleep on purpose looks like nothing else, and what was interrupted for it is not shown as running."""
    key = "000000002-000000003"
    commit(uneven, key, 1)
    catalog = Catalog.open(uneven.home)
    with at_work(uneven, key):
        metadata = progress_metadata(read_status(uneven, catalog))
        assert "paused" not in metadata
        assert metadata["partitions running"].value == 1
    since = datetime(2026, 1, 1, 10, 0, tzinfo=UTC).timestamp()
    pause(control_state(uneven), "the night", now=since)
    metadata = progress_metadata(read_status(uneven, catalog))
    sentence = str(metadata["paused"].value)
    assert sentence.startswith(f"Paused since {datetime.fromtimestamp(since).astimezone():%Y-%m-%d %H:%M}")
    assert "because the night" in sentence
    assert sketches[0] is None and sentence.startswith(sketches[1] or "?"), "it stands on the picture too"
    assert (metadata["partitions running"].value, metadata["partitions interrupted"].value) == (0, 1)


def at_work(settings: Settings, key: str) -> AbstractContextManager[object]:
    """A worker on a partition."""
    workers = Workers(open_state(settings.state_directory))
    return workers.begin(run_id="r", asset="property_descriptions", partition=key, expected=3)


def test_a_new_home_says_what_to_do_first(tmp_path: Path) -> None:
    """Whoever opens the pages of a new home sees the next command, whole, and not "No metadata found"."""
    home = tmp_path / "my home"
    ticks = Ticks(load_settings(home=home))
    assert f"`vlm-assets ingest FOLDER --home '{home}'`" in ticks.tick()
    assert ticks.tick() == "Nothing was ever started.", "said once"
    ingest(write_listing(tmp_path / "listing.jsonl", {"p": ["1.jpg"]}), home, range_size=1)
    said = ticks.tick()
    assert "1 property in the catalogue" in said
    assert f"`vlm-assets compare --home '{home}' --html tried.html`" in said
    assert f"`vlm-assets run --home '{home}'`" in said
    assert ticks.tick() == "Nothing was ever started.", "said once"


def test_a_picture_is_right_within_a_minute_or_two_of_the_first_hours_progress() -> None:
    """0% for the first half hour is no progress page; a month of pictures, one a minute, is no event log."""
    drawn, pictures = Drawn(), list[float]()
    for now in range(60, 36_000, 60):
        if drawn.is_due(f"{now}", works=True, now=now):
            drawn = Drawn(f"{now}", f"{now}", at=now, began=60.0)
            pictures.append(now)
    waits = {at: after - at for at, after in itertools.pairwise(pictures)}
    assert max(wait for at, wait in waits.items() if at < 1200) == 60
    assert max(wait for at, wait in waits.items() if at < 2400) <= 120
    assert all(
        wait <= 60 + 0.05 * after
        for (_, after), wait in zip(itertools.pairwise(pictures), waits.values(), strict=True)
    )
    assert len(pictures) < 100


@pytest.mark.parametrize(
    ("moved", "works", "now", "pause", "is_due"),
    [
        ("b", True, 2799.0, "", False),
        ("b", True, 2800.0, "", True),
        ("a", True, 2800.0, "", True),
        ("a", False, 9999.0, "", False),
        ("a", False, 1001.0, "since noon", True),
        ("b", True, 1001.0, "since noon", False),
    ],
)
def test_while_something_works_a_picture_is_drawn_every_half_hour(moved, works, now, pause, is_due) -> None:
    """Not at every tick: the event log keeps each of them."""
    drawn = Drawn("a", "a", at=1000.0, began=1000.0 - 36_000)
    assert drawn.is_due(moved, works=works, now=now, pause=pause) is is_due
