"""The program of the workers: ``worker PARENT_PID SOCKET``.

It is started by exec, imports and loads what the output needs, and then forks a worker for each request:
imports are paid once, and no lock of the run's process is inherited. A worker reads, decodes and makes the
output of one property after another. Both ends of every exchange are in this module. ``worker_pool`` sends
the requests, and decides what happens after a death.

Each message is a few bytes and a descriptor of memory with the content: memory without a name, which the
system frees when its last holder ends, however it ends (look up: memfd_create, file sealing). A worker's
answers are JSON and arrays, never pickles: it decodes untrusted files.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import mmap
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from PIL import Image

from vlm_durable.files.processes import die_with, memory_limit
from vlm_engine.images.images import ImageError, Made, Maker, load_image

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FORK: Final = b"fork"
"""To the template, with the descriptors of a worker's socket and progress: fork a worker. Answer: its pid."""

READY: Final = b"ready"
"""From the template: the output is loaded."""

DECODE_BYTES: Final = 3 << 30
"""Memory that the decoding of a property's images may take beyond the worker's own. The largest image that is
decoded takes 2.1 GB where it is transparent."""

_ALIGNED: Final = 64
"""Bytes: a processor's cache line, and the operand of its widest instruction."""

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LONGEST_MESSAGE = 1 << 16


@dataclass(frozen=True)
class Task:
    """One property to load. given_up: numbers of images that are not opened. number: of the task, from 1.

    fetched: the contents of images come with the task, by their numbers as text; no file is opened.
    """

    number: int
    paths: tuple[str, ...]
    max_pixels: int
    max_images: int
    given_up: tuple[int, ...] = ()
    fetched: bool = False


class Progress:
    """Shares a worker's current image with its parent, in memory of eight bytes a value.

    An image's number is its place among the property's paths; the number of paths stands for the output.
    """

    BYTES: Final = 24

    def __init__(self, descriptor: int) -> None:
        self._values = memoryview(mmap.mmap(descriptor, self.BYTES)).cast("Q")

    def publish(self, task: int, image: int) -> None:
        """Called by the worker before each image, and before the output."""
        self._values[2] = time.monotonic_ns()
        self._values[1] = image
        self._values[0] = task

    def read(self) -> tuple[int, int, float]:
        """The task, the image, and its start by the monotonic clock, which all processes share."""
        task, image, begun = self._values
        return task, image, begun / 1e9


def send(connection: socket.socket, parcel: Parcel) -> None:
    """Send a parcel in one message. Raises OSError."""
    descriptor, address = pack(parcel)
    try:
        socket.send_fds(connection, [address], [descriptor])
    finally:
        os.close(descriptor)


def receive(connection: socket.socket) -> Parcel | None:
    """The next parcel; None where the other side has ended. Raises OSError, ValueError."""
    address, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_MESSAGE, 2)
    try:
        return unpack(descriptors[0], address) if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def main() -> None:
    """Fork workers until the parent ends."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    # A Ctrl-C is for the parent, which commits what is finished and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    control = socket.socket(fileno=descriptor)
    parcel = receive(control)
    if parcel is None:
        return
    make = pickle.loads(parcel.arrays["output"].data).load()  # noqa: S301  # from the run's own process
    gc.collect()
    gc.freeze()  # A collection in a worker would otherwise copy each page that it shares with the others.
    control.send(READY)
    ended: dict[int, int] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _LONGEST_MESSAGE, 2)
        _reap(ended)
        if message == FORK:
            template = os.getpid()
            pid = os.fork()
            if not pid:
                control.close()
                _become_worker(template, descriptors[0], descriptors[1], make)
            for received in descriptors:
                os.close(received)
            control.send(str(pid).encode())
        elif message:
            pid = int(message)
            if pid not in ended:
                ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            control.send(str(ended.pop(pid)).encode())
        else:
            return


def _reap(ended: dict[int, int]) -> None:
    """Note the exit codes of workers that have ended, as Popen gives them, even if nobody asks for them."""
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = waited
            ended[pid] = os.waitstatus_to_exitcode(status)


def _become_worker(template: int, descriptor: int, progress: int, make: Maker) -> NoReturn:
    """Answer until the parent closes the socket."""
    code = 1
    try:
        die_with(template)
        shared = Progress(progress)
        os.close(progress)
        connection = socket.socket(fileno=descriptor)
        while (parcel := receive(connection)) is not None:
            send(connection, _answer(Task(**parcel.note), parcel.arrays, shared, make))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Without the interpreter's cleanup: the imports belong to the template.
        os._exit(code)


def _answer(task: Task, contents: Mapping[str, npt.NDArray[Any]], progress: Progress, make: Maker) -> Parcel:
    watch = _StopWatch()
    images: list[Image.Image] = []
    failed: list[tuple[int, str, str]] = []
    # An image that wants too much memory fails by itself, before the machine runs out of it.
    with memory_limit(DECODE_BYTES):
        for number, path in enumerate(task.paths):
            if len(images) == task.max_images:
                break
            content = contents.get(str(number))
            if number in task.given_up or (task.fetched and content is None):
                continue
            progress.publish(task.number, number)
            watch.begin("reading")
            try:
                image = load_image(
                    path,
                    max_pixels=task.max_pixels,
                    when_read=lambda: watch.begin("decoding"),
                    content=None if content is None else content.tobytes(),
                )
            except ImageError as error:
                failed.append((number, error.kind, str(error)))
            else:
                images.append(image)
    progress.publish(task.number, len(task.paths))
    watch.begin("processing")
    made, refusal = Made(), None
    if images:
        try:
            made = make(images)
        except Exception as error:  # A processor may raise anything, and it is this property's own error.
            refusal = f"{type(error).__name__}: {error}"
    watch.begin("")
    arrays = {f"image {index}": array for index, array in enumerate(made.images)}
    arrays |= {name: array for name, (array, _) in made.tensors.items()}
    return Parcel(
        arrays,
        {
            "number": task.number,
            "seen": len(images),
            "failed": failed,
            "refusal": refusal,
            "images": len(made.images),
            "tensors": {name: join for name, (_, join) in made.tensors.items()},
            "seconds": watch.seconds,
        },
    )


class _StopWatch:
    """Seconds by activity."""

    def __init__(self) -> None:
        self.seconds = {"reading": 0.0, "decoding": 0.0, "processing": 0.0}
        self._activity, self._since = "", time.perf_counter()

    def begin(self, activity: str) -> None:
        now = time.perf_counter()
        if self._activity:
            self.seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now


@dataclass(frozen=True)
class Parcel:
    """A message from one process to another: arrays by name, and a note of JSON values."""

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
    """Return the parcel; its arrays are not copied, and changes to them stay in this process.

    The descriptor may be closed afterwards. Raises OSError or ValueError for memory that ``pack`` did not
    write, whoever sent it.
    """
    import numpy as np

    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("the memory can still change its size")
    start = int.from_bytes(address, "little")
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    content = json.loads(memory[start:])
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.ndarray(shape, _plain(np.dtype(dtype)), buffer=memory, offset=offset)
        for name, dtype, shape, offset in content["arrays"]
    }
    return Parcel(arrays, content["note"])


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.hasobject:
        raise ValueError("an array of pointers is no array of another process")
    return dtype


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


if __name__ == "__main__":
    main()
