"""Room for decoded images that any process can map: a decode worker writes one, and nobody else copies it.

What lives here: which place is free, and images as arrays that know their place. What does not: the memory
itself (``nameless_memory.py``), and who decodes (``decode_pool.py``).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from resources.images.images import PIXELS_AHEAD
from resources.images.nameless_memory import create

_ROOM: Final = 4 * PIXELS_AHEAD * 3
"""Bytes, as much as waits at both stages before the model, twice as much at the second where many batches are
prepared at once, and what the model looks at: of addresses; memory is what was written to."""


class Place(NamedTuple):
    """Where in its memory an image lies. offset: in bytes."""

    offset: int
    height: int
    width: int

    def image(self, memory: mmap.mmap) -> npt.NDArray[np.uint8]:
        """RGB, of shape (height, width, 3); it keeps the mapping."""
        return np.ndarray((self.height, self.width, 3), np.uint8, buffer=memory, offset=self.offset)


class SharedImage(np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]):
    """An image in a PixelMemory: an array as any other, which cannot be written to.

    Its place is another image's once nothing refers to it any more.
    """

    memory: PixelMemory | None = None
    """None for an array that was made from one, of which nobody knows where it lies."""
    place: Place


class PixelMemory:
    """Equal places for images of up to ``max_pixels``. Raises OSError where the system grants none.

    ``reserve`` is called from one thread; images may go in any.
    """

    def __init__(self, max_pixels: int) -> None:
        page = mmap.PAGESIZE
        self._place_bytes = -(-max_pixels * 3 // page) * page
        self._places = max(1, _ROOM // self._place_bytes)
        size = self._places * self._place_bytes
        self.descriptor = create("pixels", size)
        """Of all of it, for another process."""
        weakref.finalize(self, os.close, self.descriptor)
        self._mapped = mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ)
        # Free places that were used before, the last used last: what is used again has its memory already.
        # No lock: an image may go wherever Python collects what is not needed, in this class too.
        self._free: deque[int] = deque()
        self._begun = 0

    def reserve(self) -> int | None:
        """The offset of a place for an image; None where all are taken."""
        try:
            return self._free.pop()
        except IndexError:
            if self._begun == self._places:
                return None
            self._begun += 1
            return (self._begun - 1) * self._place_bytes

    def release(self, offset: int) -> None:
        """Nothing was written there, and nothing will be."""
        self._free.append(offset)

    def image(self, offset: int, height: int, width: int) -> SharedImage:
        """The image that was written to a reserved place, which is free again when the array is gone."""
        image = SharedImage((height, width, 3), np.uint8, buffer=self._mapped, offset=offset)
        image.memory, image.place = self, Place(offset, height, width)
        weakref.finalize(image, self._free.append, offset).atexit = False
        return image
