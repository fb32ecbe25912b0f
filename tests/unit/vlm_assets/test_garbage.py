"""A partition stops before it fills with garbage, and never because of bad images."""

import dataclasses

import numpy as np
import pytest

from resources.vlm.ladder import Described
from vlm_assets.garbage import WINDOW, AnswerGuard, GarbageOutputError, UnsoundVectorsError, refuse_unsound

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
