"""What a start restored is on the partition's page before the first property is processed."""

from datetime import UTC, datetime

import dagster as dg
import pyarrow.parquet as pq
import pytest

from tests.support.scripted_engine import LostAfterOneBatch

KEY = "000000000-000000007"

pytestmark = pytest.mark.usefixtures("scripted_engine")


def what_was_restored(desk, asset):
    """The events of a partition that say what a start restored, oldest first: when, and what."""
    wanted = dg.AssetRecordsFilter(asset_key=dg.AssetKey(asset), asset_partitions=[KEY])
    records = desk.instance.fetch_observations(wanted, limit=100, ascending=True).records
    return [
        (datetime.fromtimestamp(record.timestamp, UTC), record.asset_observation.metadata)
        for record in records
        if "restored rows" in record.asset_observation.metadata
    ]


@pytest.mark.parametrize("asset", ["property_descriptions", "property_embeddings"])
@pytest.mark.promise("What can be restored without loss")
def test_it_is_an_event_before_the_first_property(desk, asset):
    """Rows, manifest, mark, segments adopted and files quarantined: said by each start, before its work."""
    lost = LostAfterOneBatch(model=desk.settings.model)
    if asset == "property_descriptions":
        assert "device is lost" in desk.materialize(vision_language_model=lost).failure
        column, restored = "described_at", 4
    else:
        column, restored = "embedded_at", 0
    done = desk.materialize("property_descriptions", "property_embeddings")
    assert done.success, done.failure

    at, said = what_was_restored(desk, asset)[-1]
    assert said["restored rows"].value == restored
    assert said["manifest rows"].value == (restored or "no manifest yet")
    assert said["high-water mark"].value == (restored or "none yet")
    assert said["segments adopted"].value == 0
    assert said["files quarantined"].value == "none"
    assert f"{restored} of 8 rows restored" in said["restored"].value
    worked = sorted(pq.read_table(desk.settings.home / asset / f"{KEY}.parquet")[column].to_pylist())
    assert all(before < at for before in worked[:restored])
    assert all(at < after for after in worked[restored:])


def test_a_quarantined_file_is_named_in_it(desk):
    """What did not verify is said with its new place and the reason, where a person looks first."""
    lost = LostAfterOneBatch(model=desk.settings.model)
    desk.materialize(vision_language_model=lost)
    (newest, *_) = sorted(desk.paths.journals.glob("*/manifest-*"), reverse=True)
    newest.write_bytes(b"cut")
    assert desk.materialize().success
    _, said = what_was_restored(desk, "property_descriptions")[-1]
    assert newest.name in said["files quarantined"].value
    assert "does not verify" in said["files quarantined"].value
    assert said["segments adopted"].value == 1
    assert said["restored rows"].value == 4


def percents(desk):
    """How far the partition's page said that it was, oldest first."""
    wanted = dg.AssetRecordsFilter(asset_key=dg.AssetKey("property_descriptions"), asset_partitions=[KEY])
    records = desk.instance.fetch_observations(wanted, limit=100, ascending=True).records
    told = [record.asset_observation.metadata for record in records]
    return [one["percent done"].value for one in told if "percent done" in one]


def test_percent_is_told_at_start_and_end_and_never_starts_again(desk):
    """A start says at once how far it is, an interrupted partition goes on from there, the end says 100."""
    desk.materialize(vision_language_model=LostAfterOneBatch(model=desk.settings.model))
    assert percents(desk) == [0.0]
    assert desk.materialize().success
    assert percents(desk) == [0.0, 50.0, 100.0]
