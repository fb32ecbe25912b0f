"""Arrays that pass from one process to another in memory without a name, together with a note about them.

The memory is free when its last holder ends, however it ends: nothing is ever left in ``/dev/shm``. Look up:
memfd_create, file sealing.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ALIGNED: Final = 64
"""Bytes: a processor's cache line, and the operand of its widest instruction."""

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Parcel:
    """What one process hands to another: arrays by name, and a note of JSON values."""

    arrays: Mapping[str, npt.NDArray[Any]]
    note: Any


def create(size: int) -> int:
    """Return a descriptor of ``size`` bytes of zeros, whose size nobody can change. Raises OSError."""
    descriptor = os.memfd_create("arrays", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # A process that maps memory which another makes smaller dies of a SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def pack(parcel: Parcel) -> tuple[int, bytes]:
    """Write a parcel; return its descriptor, which the caller closes, and the address to send with it.

    Raises OSError where there is no memory left.
    """
    import numpy as np

    places: list[tuple[str, str, tuple[int, ...], int]] = []
    size = 0
    for name, array in parcel.arrays.items():
        places.append((name, array.dtype.str, array.shape, size))
        size += -(-array.nbytes // _ALIGNED) * _ALIGNED
    end = json.dumps({"arrays": places, "note": parcel.note}).encode()
    descriptor = create(size + len(end))
    try:
        for name, _, _, offset in places:
            _write(
                descriptor,
                np.ascontiguousarray(parcel.arrays[name]).reshape(-1).view("u1").data,
                offset,
            )
        _write(descriptor, memoryview(end), size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, size.to_bytes(8, "little")


def unpack(descriptor: int, address: bytes) -> Parcel:
    """Return the parcel; its arrays are not copied, and what is written to them stays in this process.

    The descriptor may be closed afterwards. Raises OSError or ValueError for anything that ``pack`` did not
    write, whoever sent it.
    """
    import numpy as np

    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("the memory can still change its size")
    start = int.from_bytes(address, "little")
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    told = json.loads(memory[start:])
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.ndarray(shape, _plain(np.dtype(dtype)), buffer=memory, offset=offset)
        for name, dtype, shape, offset in told["arrays"]
    }
    return Parcel(arrays, told["note"])


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.hasobject:
        raise ValueError("an array of pointers is no array of another process")
    return dtype


def _write(descriptor: int, left: memoryview, offset: int) -> None:
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
