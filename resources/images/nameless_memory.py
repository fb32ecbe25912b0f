"""Memory that processes share and that has no name: when its last holder ends, however it ends, it is free.

What lives here: making it, writing to it, and arrays in it that pass from one process to another. What does
not: which image lies where (``pixel_memory.py``). NumPy is not imported, so that a decode worker starts in
milliseconds. Look up: memfd_create, file sealing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy.typing as npt

IS_THERE: Final = hasattr(os, "memfd_create")
"""Whether this system has it."""

_ALIGNED: Final = 64
"""Bytes: a line of a processor's cache, and its widest instruction's operand."""


def create(name: str, size: int) -> int:
    """A descriptor of ``size`` bytes of zeros; only what is written to takes memory. Raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # Who maps what another makes smaller dies of a SIGBUS.
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` there. Raises OSError, where there is no memory left."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


@dataclass(frozen=True)
class Layout:
    """Where arrays lie in such memory: of each the type, the shape and the offset in bytes."""

    arrays: Mapping[str, tuple[str, tuple[int, ...], int]]
    size: int


def store(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, Layout]:
    """The arrays in new memory: its descriptor, which is the caller's to close. Raises OSError."""
    import numpy as np

    size = 0
    places: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, array in arrays.items():
        places[name] = array.dtype.str, array.shape, size
        size += -(-array.nbytes // _ALIGNED) * _ALIGNED
    descriptor = create("arrays", max(size, 1))
    try:
        for name, (_, _, offset) in places.items():
            write(descriptor, np.ascontiguousarray(arrays[name]).reshape(-1).data.cast("B"), offset)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, Layout(places, max(size, 1))


def stored(descriptor: int, layout: Layout) -> dict[str, npt.NDArray[Any]]:
    """The arrays of ``store``, not copied; they keep the memory. What is written to them stays here.

    The descriptor may be closed afterwards. Raises OSError.
    """
    import numpy as np

    memory = mmap.mmap(descriptor, layout.size, access=mmap.ACCESS_COPY)
    return {
        name: np.ndarray(shape, np.dtype(dtype), buffer=memory, offset=offset)
        for name, (dtype, shape, offset) in layout.arrays.items()
    }
