"""Two homes over one real S3 store: either goes on where the other one published."""

from dataclasses import replace

import dagster as dg
import pytest

from resources.store import bucket as bucket_module
from resources.store.bucket import client
from sensors.dagster_internals.runs import NO_ATTEMPT
from vlm_assets.catalog.catalog import Catalog, CatalogMissingError
from vlm_assets.catalog.ingest import ingest
from vlm_assets.catalog.stored_catalog import (
    CatalogTakenError,
    OtherCatalogInStoreError,
    pull_catalog,
    put_catalog,
)
from vlm_assets.definitions import build_defs

KEY = "000000000-000000007"


@pytest.fixture
def machines(desk, bucket, tmp_path):
    """Two machines with homes of their own; the first one has the catalogue."""
    first = desk.changed(store=bucket, device_wait_seconds=0.1)
    second = first.changed(home=tmp_path / "second")
    return first, replace(second, instance=dg.DagsterInstance.ephemeral())


def test_a_new_machine_needs_the_store_alone(machines, listing):
    """It takes catalogue and finished partitions from there, computes none of them again, and goes on."""
    first, second = machines
    ingest(listing, first.settings.home, store=first.settings.store)
    assert first.materialize().success
    with pytest.raises(CatalogMissingError):
        Catalog.open(second.settings.home)
    build_defs(second.settings)
    assert len(Catalog.open(second.settings.home).ranges) == 2
    embedded = second.materialize("property_embeddings")
    assert embedded.success, embedded.failure
    done = second.materialize()
    assert done.success, done.failure
    assert second.file.read_bytes() == first.file.read_bytes()
    assert "No device was needed" in done.published[0].metadata["verified"].value


def test_a_store_that_is_down_stops_a_run_before_it_takes_a_device(machines, listing, s3_proxy, monkeypatch):
    """Without the place of record no partition is begun; it is no attempt, and nothing is lost."""
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 1)
    client.cache_clear()
    first, _ = machines
    s3_proxy.breaks(lambda passing: passing.answer(503, "SlowDown"))
    down = first.materialize()
    assert not down.success
    assert "No store to work from" in down.failure
    (run,) = first.instance.get_runs()
    assert NO_ATTEMPT in run.tags
    assert Catalog.open(first.settings.home).rows == 16


def test_a_store_that_goes_down_before_publication_is_no_attempt(machines, s3_proxy, monkeypatch):
    """A finished partition waits for the store; the next run publishes what is committed."""
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 1)
    client.cache_clear()
    first, _ = machines
    pull_catalog(first.settings.home, first.settings.store)
    gone_down = []

    def breaks(passing):
        # A finished partition asks for its key before it is published.
        gone_down.extend([passing.path] if passing.path.endswith(KEY) else [])
        return bool(gone_down) and passing.answer(503, "SlowDown")

    s3_proxy.breaks(breaks)
    down = first.materialize()
    assert "No store to publish in" in down.failure
    (run,) = first.instance.get_runs()
    assert NO_ATTEMPT in run.tags
    assert not first.file.exists()
    s3_proxy.heal()
    again = first.materialize()
    assert again.success, again.failure
    assert again.published[0].metadata["restored rows"].value == 8


def test_two_ingests_at_once_number_no_property_twice(machines, listing, bucket):
    """The second one to reach the store changes nothing, there or here, and says what to do."""
    first, second = machines
    there = pull_catalog(first.settings.home, bucket)
    pull_catalog(second.settings.home, bucket)
    data = Catalog.open(first.settings.home).path.read_bytes()
    put_catalog(bucket, data + b" ", over=there)
    with pytest.raises(CatalogTakenError, match="Do the same again"):
        put_catalog(bucket, data + b"  ", over=there)


def test_another_home_is_refused_at_the_same_prefix(machines, listing, bucket, tmp_path):
    """A second home that points there by mistake is named, and neither catalogue is changed."""
    first, _ = machines
    pull_catalog(first.settings.home, bucket)
    ingest(listing, tmp_path / "other")
    for ask in (
        lambda: pull_catalog(tmp_path / "other", bucket),
        lambda: ingest(listing, tmp_path / "other", store=bucket),
    ):
        with pytest.raises(OtherCatalogInStoreError, match="a prefix of its own"):
            ask()
