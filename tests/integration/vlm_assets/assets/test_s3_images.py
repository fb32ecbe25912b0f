"""Properties whose images lie on a real S3 server come out as those of a local folder do."""

from dataclasses import replace

import dagster as dg
import pyarrow.parquet as pq
import pytest

from faults.s3_server import BUCKET
from resources.dagster_names import NO_ATTEMPT
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.bucket import S3Folder

SAME = ["property_id", "status", "error_kind", "description", "images_used", "images_not_used"]


def rows(path):
    return pq.read_table(path).select(SAME).to_pylist()


@pytest.fixture(scope="session")
def uploaded(listing, s3_server):
    """The example's images in a bucket."""
    own = s3_server.client()
    for path in listing.parent.rglob("*.*"):
        key = f"example/{path.relative_to(listing.parent)}"
        own.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    return S3Folder.parse(f"s3://{BUCKET}/example")


@pytest.fixture
def s3_desk(desk, listing, uploaded, bucket, tmp_path):
    """The same home with its images in a bucket."""
    home = tmp_path / "home-s3"
    ingest(listing, home, image_root=uploaded, range_size=8)
    on_s3 = desk.changed(home=home, device_wait_seconds=0.1)
    return replace(on_s3, instance=dg.DagsterInstance.ephemeral())


@pytest.mark.published("property_descriptions")
def test_rows_do_not_depend_on_where_the_images_lie(desk, s3_desk):
    """Descriptions, failures and the images behind them are those of the local folder, hard ones too."""
    done = s3_desk.materialize()
    assert done.success, done.failure
    assert rows(s3_desk.file) == rows(desk.file)
    assert "data:image/jpeg" in done.published[0].metadata["contact sheet"].value


@pytest.mark.usefixtures("scripted_engine")
def test_an_outage_in_mid_partition_fails_no_row_and_is_no_attempt(s3_desk, s3_proxy, monkeypatch):
    """A store that throttles ends the run as interrupted, and the next run finishes the partition."""
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    catalog = Catalog.open(s3_desk.settings.home)
    uris = catalog.slice(catalog.ranges[0])["image_uris"].to_pylist()
    late = [uri.rpartition("/")[2] for some in uris[6:] for uri in some]
    s3_proxy.breaks(
        lambda passing: any(one in passing.path for one in late) and passing.answer(503, "SlowDown")
    )
    down = s3_desk.materialize()
    assert not down.success
    assert "S3 store cannot be used" in down.failure
    (run,) = s3_desk.instance.get_runs()
    assert NO_ATTEMPT in run.tags
    assert not s3_desk.file.exists()
    s3_proxy.heal()
    again = s3_desk.materialize()
    assert again.success, again.failure
    failed = [row for row in rows(s3_desk.file) if row["error_kind"] == "no_images"]
    assert len(rows(s3_desk.file)) == 8 and len(failed) <= 1


@pytest.mark.usefixtures("scripted_engine")
def test_a_bucket_that_was_emptied_fails_no_row(s3_desk, s3_proxy):
    """Images that a lifecycle rule took away as a whole are away, as those of a disk that is not mounted."""
    s3_proxy.breaks(lambda passing: passing.answer(404, "NoSuchKey"))
    gone = s3_desk.materialize()
    assert not gone.success
    assert "The images are away" in gone.failure
    (run,) = s3_desk.instance.get_runs()
    assert NO_ATTEMPT in run.tags


def test_an_outage_in_a_training_is_no_attempt(s3_desk, s3_proxy, listing, tmp_path):
    """It is no death of a rank: the run ends as interrupted, with the sentence of the store."""
    variant = "{base: example, data: truth, steps: 1, batch: 4, learning_rate: 0.001, seed: 1}"
    (tmp_path / "variants.yaml").write_text(f"variants:\n  tiny: {variant}\n")
    (s3_desk.settings.home / "example").symlink_to(listing.parent)
    s3_proxy.breaks(lambda passing: passing.answer(403, "InvalidAccessKeyId"))
    down = s3_desk.changed(variants=tmp_path / "variants.yaml").materialize("description_model", key="tiny")
    assert not down.success
    assert "S3 store cannot be used" in down.failure and "checkpoints are kept" in down.failure
    (run,) = s3_desk.instance.get_runs()
    assert NO_ATTEMPT in run.tags
