"""Room for images: each lies alone in its place for as long as anything refers to it."""

import gc

import numpy as np
import pytest
from PIL import Image

from resources.images import pixel_memory
from resources.images.nameless_memory import write
from resources.images.pixel_memory import PixelMemory


def put(memory, value):
    offset = memory.reserve()
    write(memory.descriptor, bytes([value]) * 12, offset)
    return memory.image(offset, 2, 2)


@pytest.mark.parametrize(
    "keep",
    [
        lambda image: image,
        lambda image: image[1:],
        lambda image: np.asarray(image)[1:].reshape(-1),
        memoryview,
    ],
    ids=["image", "view", "view of another type", "bytes"],
)
def test_a_place_is_anothers_only_when_nothing_refers_to_it(keep):
    """Guards: a description is of its own images, however long somebody holds a part of one."""
    memory = PixelMemory(max_pixels=4)
    kept = keep(put(memory, 7))
    others = [put(memory, value) for value in range(20, 30)]
    assert set(np.asarray(kept).reshape(-1).tolist()) == {7}
    del others, kept
    gc.collect()
    assert [put(memory, value)[0, 0, 0] for value in range(11)] == list(range(11))
    assert memory._begun == 11


def test_memory_that_was_used_is_used_again():
    """Guards: a partition of any length takes the memory of what is shown at once."""
    memory = PixelMemory(max_pixels=4)
    places = {put(memory, value).place.offset for value in range(50)}
    assert len(places) == 1


def test_a_full_memory_says_so(monkeypatch):
    """Guards: who holds more images than there is room for is not given a place that is taken."""
    monkeypatch.setattr(pixel_memory, "_ROOM", 2 * 4096)
    memory = PixelMemory(max_pixels=4)
    held = [put(memory, 1), put(memory, 2)]
    assert memory.reserve() is None
    del held[0]
    assert memory.reserve() is not None


def test_an_image_there_is_an_array_that_nobody_changes():
    """Guards: NumPy and Pillow take it for what it is; a write into it is refused."""
    image = put(PixelMemory(max_pixels=4), 9)
    assert Image.fromarray(image).tobytes() == b"\x09" * 12
    with pytest.raises(ValueError, match="read-only"):
        image[0] = 1
