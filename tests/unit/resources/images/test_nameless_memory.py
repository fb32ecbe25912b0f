"""Memory that has no name: what is put there comes out, and nobody who maps it dies of another's doing."""

import os

import numpy as np
import pytest

from resources.images.nameless_memory import create, store, stored

ARRAYS = {
    "pixels": np.random.default_rng(1).standard_normal((2, 3, 5)).astype(np.float32),
    "ids": np.arange(7, dtype=np.int64),
    "turned": np.arange(12, dtype=np.int32).reshape(3, 4).T,
    "none": np.zeros((0, 4), np.float32),
    "one": np.array(True),
}


@pytest.mark.parametrize("names", [list(ARRAYS), ["none"], []])
def test_arrays_come_out_as_they_went_in(names):
    """Guards: tensors of a process are the thread's: values, types and shapes, also of what is empty."""
    descriptor, layout = store({name: ARRAYS[name] for name in names})
    found = stored(descriptor, layout)
    os.close(descriptor)
    assert list(found) == names
    for name in names:
        assert found[name].dtype == ARRAYS[name].dtype
        np.testing.assert_array_equal(found[name], ARRAYS[name])


def test_what_a_model_writes_into_its_tensors_stays_its_own():
    """Guards: tensors can be written to, as those of a processor can; nobody else sees that."""
    descriptor, layout = store({"ids": ARRAYS["ids"]})
    stored(descriptor, layout)["ids"][:] = 0
    np.testing.assert_array_equal(stored(descriptor, layout)["ids"], ARRAYS["ids"])
    os.close(descriptor)


def test_no_other_process_can_take_it_away():
    """Guards: who reads what a process of its own makes smaller is not ended by a SIGBUS."""
    descriptor = create("test", 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
