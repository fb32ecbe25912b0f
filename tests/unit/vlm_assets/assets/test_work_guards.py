"""A partition stops before it fills with garbage; a disk that is not mounted is not taken for lost images."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from resources.gpu import GpuResource
from tests.support.listings import write_listing
from tests.support.trials import described
from vlm_assets.assets.property_embeddings import refuse_unsound
from vlm_assets.assets.run_watch import WHOLE_RANGE, ImagesAwayError, ImagesWatch
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_engine.devices.find import Device
from vlm_engine.devices.left_out import ImpossibleResultError
from vlm_engine.images.images import ImageFailure, LoadedProperty
from vlm_engine.ladder import WINDOW, AnswerGuard, Described, GarbageOutputError, describe_batch


@dataclass
class Shelf:
    """Properties with two images each, one of them never there; ``sizes``: properties of each range."""

    folder: Path

    def fill(self, *sizes: int) -> None:
        images, first = dict[str, list[str]](), 0
        for size in sizes:
            for number in range(first, first + size):
                images[f"p{number}"] = [f"images/{number}/a.jpg", f"images/{number}/b.jpg"]
                self.image(number).parent.mkdir(parents=True)
                self.image(number).write_bytes(b"x")
            first += size
            listing = write_listing(self.folder / "listing.jsonl", images)
            ingest(listing, self.folder / "home", range_size=1000, close=True)

    def image(self, number: int) -> Path:
        return self.folder / "images" / str(number) / "a.jpg"

    def watch(self, number: int = 0, *, range_may_be_gone: bool = False) -> ImagesWatch:
        catalog = Catalog.open(self.folder / "home")
        wanted = catalog.ranges[number]
        return ImagesWatch(catalog, wanted, catalog.slice(wanted), range_may_be_gone)

    def described(self, number: int, name: str = "a", kind: str = "missing") -> Described:
        failed = (ImageFailure(f"images/{number}/{name}.jpg", kind, "gone"),)
        loaded = LoadedProperty(f"p{number}", number, [], 0, failed, 0.0)
        return describe_batch(None, None, [loaded], 1)[0]

    def unmount(self) -> None:
        (self.folder / "images").rename(self.folder / "away")


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "denied", "io_error"])
def test_a_disk_that_is_away_stops_the_range_and_says_what_to_do(shelf, kind):
    """Not one image of the catalogue can be read: no row is made of that."""
    shelf.fill(3, 2)
    watch = shelf.watch()
    watch.raise_if_away()
    shelf.unmount()
    with pytest.raises(ImagesAwayError, match=r"No such file.*mounted.*--update"):
        watch.judge_batch([shelf.described(0, kind=kind)])
    with pytest.raises(ImagesAwayError):
        shelf.watch().raise_if_away()


def test_an_image_that_never_was_there_is_no_alarm(shelf):
    """What the ingest could not read already is a failed row as ever, wherever the disk is."""
    shelf.fill(3)
    watch = shelf.watch()
    shelf.unmount()
    watch.judge_batch([shelf.described(0, "b"), shelf.described(1, kind="unreadable")])


def test_images_that_are_gone_while_others_are_there_are_rows(shelf):
    """A listing that was deleted costs its own row, and is not waited for."""
    shelf.fill(3)
    shelf.image(1).unlink()
    shelf.watch().judge_batch([shelf.described(1)])


def test_an_image_that_was_away_and_is_back_makes_no_failed_row(shelf):
    """The disk went and came between the decoding and the look: the batch is not taken."""
    shelf.fill(3)
    with pytest.raises(ImagesAwayError, match="for a moment"):
        shelf.watch().judge_batch([shelf.described(1)])
    shelf.watch().judge_batch([shelf.described(1, kind="io_error")])  # as of a bad sector, which stays one


def test_a_small_range_may_be_deleted_and_a_large_one_is_asked_about(shelf):
    """One property alone in its range must not hold it up for ever; a whole disk below the root must."""
    shelf.fill(1, WHOLE_RANGE)
    shelf.image(0).unlink()
    shelf.watch(0).judge_batch([shelf.described(0)])
    shelf.watch(0).raise_if_away()
    for number in range(WHOLE_RANGE):
        shelf.image(1 + number).unlink()
    shelf.image(0).write_bytes(b"x")
    with pytest.raises(ImagesAwayError):
        shelf.watch(1).raise_if_away()
    shelf.watch(1, range_may_be_gone=True).raise_if_away()
    shelf.unmount()
    with pytest.raises(ImagesAwayError):
        shelf.watch(1, range_may_be_gone=True).raise_if_away()


GOOD = described(0, {})
INVALID = dataclasses.replace(
    GOOD, status="failed", error_kind="invalid_json", error="no JSON.", raw_text="!!!!", description=None
)
NO_IMAGE = dataclasses.replace(INVALID, attempts=0, error_kind="unreadable", raw_text=None)


def test_a_sudden_rise_of_invalid_answers_stops_the_partition():
    """Within a window of the rise, whatever came before; the error says what and what to do."""
    guard = AnswerGuard(0.5)
    guard.count([GOOD] * 1000)
    guard.count([INVALID] * (WINDOW // 2))
    with pytest.raises(
        GarbageOutputError, match=r"21 of the model's last 40.*21 invalid_json.*'!!!!'"
    ) as told:
        guard.count([INVALID])
    assert "What is committed stays" in str(told.value)
    assert "retry_failed" in str(told.value)


@pytest.mark.parametrize(("kind", "failures"), [("impossible_scores", 1), ("invalid_json", 0)])
def test_answers_without_numbers_are_held_against_the_device(tmp_path, kind, failures):
    """Once, on the first device alone: the next may do the same, and then it is the model."""
    refused = [dataclasses.replace(INVALID, error_kind=kind)] * WINDOW
    gpu = GpuResource(leases_directory=str(tmp_path / ".state" / "leases"))
    for name in ("GPU-1", "GPU-2"):
        device = Device(name, "cuda", "GPU", None, name)
        with (
            pytest.raises(GarbageOutputError),
            gpu.blame(device, asset="a", partition="0", log=logging.getLogger()),
        ):
            AnswerGuard(0.5).count(refused)
    records = gpu.left_out_devices().records()
    assert [len(records[name].failures) for name in records] == [1] * failures
    assert all("NaN or infinity for 40 of the last 40" in one.failures[0].why for one in records.values())


def test_bad_images_are_no_garbage():
    """An honest dataset with any share of bad images goes on: they never reached the model."""
    guard = AnswerGuard(0.5)
    for _ in range(200):
        guard.count([NO_IMAGE, NO_IMAGE, NO_IMAGE, GOOD, INVALID])


def test_a_few_answers_prove_nothing():
    """The first properties of a run may be the hard ones."""
    AnswerGuard(0.5).count([INVALID] * (WINDOW - 1))


def test_a_person_may_expect_them():
    """With a share of 1 nothing is stopped."""
    AnswerGuard(1.0).count([INVALID] * 1000)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0])
def test_vectors_that_are_none_are_refused_before_they_are_taken(bad):
    """NaN, infinite and zero vectors are named by their properties; sound ones pass."""
    vectors = np.full((3, 4), 0.5, dtype=np.float32)
    refuse_unsound(["a", "b", "c"], vectors, "cpu-0")
    refuse_unsound([], np.empty((0, 4), dtype=np.float32), "cpu-0")
    vectors[1] = bad
    with pytest.raises(ImpossibleResultError, match=r"1 of 3 vectors computed on GPU-7 .*'b'"):
        refuse_unsound(["a", "b", "c"], vectors, "GPU-7")


def test_a_device_that_computes_no_vectors_is_held_to_account(tmp_path):
    """Once a partition: its retry lands on another device, and a second partition leaves this one out."""
    gpu = GpuResource(leases_directory=str(tmp_path / "leases"), devices="cpu:3")
    first, second, third = gpu.find()

    def embed_unsoundly(device, partition):
        with (
            pytest.raises(ImpossibleResultError),
            gpu.blame(device, asset="property_embeddings", partition=partition, log=logging.getLogger()),
        ):
            refuse_unsound(["a", "b"], np.full((2, 4), np.nan, dtype=np.float32), device.id)

    embed_unsoundly(first, "k1")
    embed_unsoundly(first, "k1")
    (failure,) = gpu.left_out_devices().records()[first.id].failures
    assert failure.why == f"2 of 2 vectors computed on {first.id} are zero or not finite (first: 'a', 'b')."
    assert [device.id for device in gpu.leases().devices] == [second.id, third.id, first.id]
    embed_unsoundly(second, "k1")
    assert list(gpu.left_out_devices().records()) == [first.id], "the same elsewhere: it goes with the work"
    embed_unsoundly(first, "k2")
    assert list(gpu.left_out_devices().left_out()) == [first.id]
    embed_unsoundly(second, "k3")
    assert second.id in gpu.left_out_devices().records()
