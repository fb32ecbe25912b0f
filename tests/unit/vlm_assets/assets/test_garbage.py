"""A partition stops before it fills with garbage, and never because of bad images."""

import dataclasses
import logging

import numpy as np
import pytest

from resources.devices.resource import GpuResource
from resources.engine.ladder import Described
from vlm_assets.assets.garbage import (
    WINDOW,
    AnswerGuard,
    GarbageOutputError,
    UnsoundVectorsError,
    refuse_unsound,
)

GOOD = Described("p", 0, "ok", None, None, {}, None, 1, 3, (), 10, 5, "stop", 0.1)
INVALID = dataclasses.replace(
    GOOD, status="failed", error_kind="invalid_json", error="no JSON.", raw_text="!!!!", description=None
)
NO_IMAGE = dataclasses.replace(INVALID, attempts=0, error_kind="unreadable", raw_text=None)


def test_a_sudden_rise_of_invalid_answers_stops_the_partition():
    """Within a window of the rise, whatever came before; the error says what and what to do."""
    guard = AnswerGuard(0.5)
    guard.take([GOOD] * 1000)
    guard.take([INVALID] * (WINDOW // 2))
    with pytest.raises(
        GarbageOutputError, match=r"21 of the model's last 40.*21 invalid_json.*'!!!!'"
    ) as told:
        guard.take([INVALID])
    assert "What is committed stays" in str(told.value)
    assert "retry_failed" in str(told.value)


def test_bad_images_are_no_garbage():
    """An honest dataset with any share of bad images goes on: they never reached the model."""
    guard = AnswerGuard(0.5)
    for _ in range(200):
        guard.take([NO_IMAGE, NO_IMAGE, NO_IMAGE, GOOD, INVALID])


def test_a_few_answers_prove_nothing():
    """The first properties of a run may be the hard ones."""
    AnswerGuard(0.5).take([INVALID] * (WINDOW - 1))


def test_a_person_may_expect_them():
    """With a share of 1 nothing is stopped."""
    AnswerGuard(1.0).take([INVALID] * 1000)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0])
def test_vectors_that_are_none_are_refused_before_they_are_taken(bad):
    """NaN, infinite and zero vectors are named by their properties; sound ones pass."""
    vectors = np.full((3, 4), 0.5, dtype=np.float32)
    refuse_unsound(["a", "b", "c"], vectors, "cpu-0")
    refuse_unsound([], np.empty((0, 4), dtype=np.float32), "cpu-0")
    vectors[1] = bad
    with pytest.raises(UnsoundVectorsError, match=r"1 of 3 vectors computed on GPU-7 .*'b'"):
        refuse_unsound(["a", "b", "c"], vectors, "GPU-7")


def test_a_device_that_computes_no_vectors_is_held_to_account(tmp_path):
    """Once a partition: its retry lands on another device, and a second partition leaves this one out."""
    gpu = GpuResource(leases_directory=str(tmp_path / "leases"), devices="cpu:3")
    first, second, third = gpu.find()

    def embed_unsoundly(device, partition):
        with (
            pytest.raises(UnsoundVectorsError),
            gpu.blamed(device, asset="property_embeddings", partition=partition, log=logging.getLogger()),
        ):
            refuse_unsound(["a", "b"], np.full((2, 4), np.nan, dtype=np.float32), device.id)

    embed_unsoundly(first, "k1")
    embed_unsoundly(first, "k1")
    (failure,) = gpu.left_out().records()[first.id].failures
    assert failure.why == f"2 of 2 vectors computed on {first.id} are zero or not finite (first: 'a', 'b')."
    assert [device.id for device in gpu.leases().devices] == [second.id, third.id, first.id]
    embed_unsoundly(second, "k1")
    assert list(gpu.left_out().records()) == [first.id], "the same elsewhere: it goes with the work"
    embed_unsoundly(first, "k2")
    assert list(gpu.left_out().left_out()) == [first.id]
    embed_unsoundly(second, "k3")
    assert second.id in gpu.left_out().records()
