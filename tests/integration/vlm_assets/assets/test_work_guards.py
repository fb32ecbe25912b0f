"""A run stops before it fills with garbage, and waits for images that are away."""

import shutil
from typing import ClassVar

import psutil
import pyarrow.parquet as pq
import pytest

from resources.dagster_names import NEEDS_PERSON, NO_ATTEMPT, is_tagged
from resources.gpu import GpuResource
from tests.support.listings import read_source, share_images, write_listing
from tests.support.waiting import wait_until
from vlm_assets.assets import description_work, joined_sets
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.config.resource_settings import build_gpu
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_durable.journal.journal import Journal
from vlm_durable.state.workers import Phase, Workers
from vlm_engine.ladder import WINDOW

PROPERTIES = 10
ANSWERED = 56

pytestmark = pytest.mark.usefixtures("scripted_engine")


@pytest.fixture
def disk(desk, listing, tmp_path):
    """A folder of the images of a range, which is catalogued; with its key."""
    ((image, *_), *_) = read_source(listing).values()
    source = tmp_path / "source"
    for number in range(PROPERTIES):
        (source / "disk" / str(number)).mkdir(parents=True)
        shutil.copy(listing.parent / image, source / "disk" / str(number) / "a.png")
    images = {f"d{n}": [f"disk/{n}/a.png"] for n in range(PROPERTIES)}
    listed = write_listing(source / "listing.jsonl", images)
    shutil.rmtree(desk.settings.home)
    (wanted,) = ingest(listed, desk.settings.home, close=True).new_ranges
    return source / "disk", wanted.key


def test_a_run_without_its_images_waits_without_a_device_and_is_no_attempt(desk, disk, no_device):
    """What is not mounted is waited for before a device is taken, and no row is made of it."""
    folder, key = disk
    away = folder.rename(folder.with_name("away"))
    ended = desk.changed(device_wait_seconds=0.1).materialize(key=key, gpu=no_device)
    assert not ended.success
    assert "No images to describe" in ended.failure
    assert "mounted" in ended.failure
    run_id = ended.result.run_id
    assert is_tagged(desk.instance.get_run_by_id(run_id).tags[NO_ATTEMPT], run_id, [DESCRIPTIONS])
    assert committed_rows(desk.settings.descriptions, key) == 0
    away.rename(folder)


def test_a_disk_that_goes_away_in_the_middle_costs_no_property(desk, disk, monkeypatch):
    """What was described stays, what was not has no row, and the next run goes on without a flag."""
    folder, key = disk
    submit = Journal.submit

    def unmount(journal, rows):
        submit(journal, rows)
        if folder.exists():
            folder.rename(folder.with_name("away"))

    small = desk.changed(batch_size=1)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "submit", unmount)
        patched.setattr(description_work, "PREFETCH_BATCHES", 1)
        ended = small.materialize(key=key)
    assert not ended.success
    assert "The images are away" in ended.failure
    assert not ended.checks
    run_id = ended.result.run_id
    assert is_tagged(desk.instance.get_run_by_id(run_id).tags[NO_ATTEMPT], run_id, [DESCRIPTIONS])
    committed = committed_rows(desk.settings.descriptions, key)
    assert 1 <= committed < PROPERTIES
    folder.with_name("away").rename(folder)
    done = small.materialize(key=key)
    assert done.success, done.failure
    assert done.published[0].metadata["restored rows"].value == committed
    rows = pq.read_table(desk.settings.descriptions.partition(key).published).to_pylist()
    assert [row["error_kind"] for row in rows if row["error_kind"] == "missing"] == []
    assert len({row["property_id"] for row in rows}) == PROPERTIES


def test_a_partition_of_garbage_stops_early_and_keeps_what_is_committed(desk, listing, monkeypatch):
    """Stopped after about a window of refused answers, not at its end, where the check would refuse it."""
    many = share_images(listing, "many.jsonl", (f"g{n}" for n in range(ANSWERED)), 1)
    key = ingest(many, desk.settings.home, range_size=ANSWERED).new_ranges[0].key
    cut_off = desk.changed(max_new_tokens=2, batch_size=8)
    stopped = cut_off.materialize(key=key)
    assert not stopped.success
    assert f"of the model's last {WINDOW} answers are no descriptions" in stopped.failure
    assert not stopped.published
    run_id = stopped.result.run_id
    tag = desk.instance.get_run_by_id(run_id).tags[NEEDS_PERSON]
    assert is_tagged(tag, run_id, [DESCRIPTIONS]), "its failed rows are new rows: for a person"
    assert not stopped.checks
    committed = committed_rows(desk.settings.descriptions, key)
    assert WINDOW <= committed < ANSWERED

    monkeypatch.setattr(joined_sets, "INVALID_SHARE", 1.0)
    refused = cut_off.materialize(key=key)
    assert not refused.checks["failed_share"].passed, "worked to its end, and refused by the check"
    assert committed_rows(desk.settings.descriptions, key) == ANSWERED


class DeviceLater(GpuResource):
    """A GPU resource that notes what a run has ready when it asks for a device."""

    phases: ClassVar[list[Phase]] = []

    def lease(self, **given):
        assert self.state is not None
        (worker,) = Workers(self.state).living()
        self.phases.append(worker.phase)
        # They start beside this thread, and nothing but the device is waited for here.
        wait_until(psutil.Process().children, "image workers start before there is a device", seconds=60)
        return super().lease(**given)


def test_a_run_asks_for_a_device_with_all_else_prepared(desk):
    """The next partition waits for the device, and the device for nothing; nobody calls the wait stuck."""
    gpu = DeviceLater(**vars(build_gpu(desk.settings)))
    assert desk.materialize(gpu=gpu).success
    assert gpu.phases == [Phase.WAITING]
