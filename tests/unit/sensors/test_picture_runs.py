"""Old pictures are forgotten with all that they left on disk; nothing else is."""

import sqlite3
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from sensors.progress_picture import NAME, build_progress_picture_sensor

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
OLD = NOON.timestamp()
YOUNG = OLD - 30 * 3600.0
"""When all of the runs below are older than a day, and when none of them is."""

DRAWN_BY_US = {"dagster/sensor_name": NAME}


@dg.asset
def picture() -> dg.MaterializeResult[None]:
    return dg.MaterializeResult(metadata={"progress": "x" * 1000})


@dg.asset
def broken() -> None:
    raise dg.Failure("it cannot be drawn")


@dg.asset(partitions_def=dg.StaticPartitionsDefinition(["a"]))
def described() -> None: ...


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """Dagster's own database as homes have it: one file of events for each run."""
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as opened:
        yield opened


def ran(
    instance: dg.DagsterInstance,
    home: Path,
    asset: dg.AssetsDefinition,
    hours_ago: float,
    tags: Mapping[str, str] | None = None,
    key: str | None = None,
) -> str:
    """A run of this asset that was created so long ago."""
    found = dg.materialize([asset], instance=instance, tags=tags, partition_key=key, raise_on_error=False)
    created = (NOON - timedelta(hours=hours_ago)).replace(tzinfo=None)
    with sqlite3.connect(home / "history" / "runs.db") as database:
        database.execute(
            "UPDATE runs SET create_timestamp = ? WHERE run_id = ?",
            (created.isoformat(" ") + ".000000", found.run_id),
        )
    return str(found.run_id)


def tick(instance: dg.DagsterInstance, home: Path, now: float) -> None:
    """A tick of the sensor whose runs they are, where there is nothing to draw."""
    sensor = build_progress_picture_sensor(
        picture,
        moved=str,
        works=lambda: False,
        paused=lambda: None,
        ticks=home / "ticks",
        clock=lambda: now,
    )
    with dg.build_sensor_context(instance=instance) as context:
        sensor(context)


def test_of_older_pictures_one_a_day_stays(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    """The latest materialization, other assets' history and what a person launched are as they were."""
    key = dg.AssetKey("described")
    other = ran(instance, tmp_path, described, 50, key="a")
    by_hand = ran(instance, tmp_path, picture, 49)
    gone = [ran(instance, tmp_path, asset, 48, DRAWN_BY_US) for asset in (picture, broken)]
    last_of_day = ran(instance, tmp_path, picture, 47, DRAWN_BY_US)
    newest = ran(instance, tmp_path, broken, 25, DRAWN_BY_US)
    before = [event.storage_id for event in instance.fetch_materializations(key, limit=9).records]
    for now, runs in ((YOUNG, 6), (OLD, 4), (OLD, 4)):
        tick(instance, tmp_path, now)
        assert instance.get_runs_count() == runs
    assert {run.run_id for run in instance.get_runs()} == {other, by_hand, last_of_day, newest}
    latest = instance.get_latest_materialization_event(dg.AssetKey("picture"))
    assert latest is not None
    assert latest.run_id == last_of_day, "the last good one, though one failed after it"
    assert [event.storage_id for event in instance.fetch_materializations(key, limit=9).records] == before
    assert instance.get_materialized_partitions(key) == {"a"}
    left = [str(path) for path in tmp_path.rglob("*") if any(run_id in str(path) for run_id in gone)]
    assert left == []
    with sqlite3.connect(tmp_path / "history" / "runs.db") as database:
        tagged = {row[0] for row in database.execute("SELECT run_id FROM run_tags")}
    assert not tagged & set(gone)
