"""The program of one decode worker: ``decode_worker PARENT_PID MAX_PIXELS MEMORY``.

What lives here: the loop that takes the path of an image from standard input, writes its pixels where it was
told to and answers on standard output, and the bytes of that exchange. What does not: starting, replacing and
ending workers (``decode_pool``), and which place is whose (``pixel_memory``). A program of its own, and not a
fork or ``multiprocessing``: it inherits no lock, runs no ``__main__`` of its parent's a second time, and
imports nothing but Pillow.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import BinaryIO, Final

from resources.images.images import ImageError, load_image
from resources.images.nameless_memory import write

TASK: Final = struct.Struct("<HQ")
"""Before each path on standard input: its length in bytes, and the offset in the memory for its pixels."""

NOWHERE: Final = (1 << 64) - 1
"""In place of an offset: the pixels come through the pipe. Instead of the memory's descriptor: -1."""

LONGEST_TASK: Final = 4096
"""PIPE_BUF on Linux: a shorter write goes into the pipe whole or not at all."""

FRAME: Final = struct.Struct("<BIIddQ")
"""Before each answer: what it is, width, height, seconds of reading and of decoding, bytes that follow."""

READY: Final = 0
IMAGE: Final = 1
"""Followed by width * height * 3 bytes of RGB."""
FAILURE: Final = 2
"""Followed by a JSON object of ``kind`` and ``error``."""
STORED: Final = 3
"""Its width * height * 3 bytes of RGB are in the memory."""

LESS_THAN_THE_MODEL: Final = 10
"""Niceness of what works ahead: where cores are few, the model's own process is not to wait for one."""

_PR_SET_PDEATHSIG = 1


def encoded_task(path: str, offset: int | None) -> bytes:
    """The bytes that ask a worker for one image, at this offset of the memory or through the pipe.

    Raises:
        ImageError: of kind ``missing``, where no file can have such a name.
    """
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ImageError("missing", f"{path!r} cannot be the name of a file: {error}.") from error
    if len(name) > LONGEST_TASK - TASK.size:
        raise ImageError("missing", f"{path[:80]}… is {len(name)} bytes long: no file can have such a name.")
    return TASK.pack(len(name), NOWHERE if offset is None else offset) + name


class StopWatch:
    """Tells the reading of an image from its decoding."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._read: float | None = None

    def read(self) -> None:
        """The file is read."""
        self._read = time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        """Seconds of reading and of decoding until now; of a file that could not be read, all are reading."""
        now = time.perf_counter()
        read = now if self._read is None else self._read
        return read - self._started, now - read


def main() -> None:
    """Answer until standard input ends or the parent dies."""
    parent, max_pixels, memory = map(int, sys.argv[1:4])
    die_with(parent)
    # A Ctrl-C is for the parent, which commits what is finished and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(LESS_THAN_THE_MODEL)
    warnings.simplefilter("ignore")
    # What a library prints must not end up between the pixels.
    answers = os.dup(1)
    os.dup2(2, 1)
    _write(answers, FRAME.pack(READY, 0, 0, 0.0, 0.0, 0))
    tasks = sys.stdin.buffer
    while task := tasks.read(TASK.size):
        length, offset = TASK.unpack(task)
        path = _read_path(tasks, length)
        for part in _answer(path, max_pixels, memory, offset):
            _write(answers, part)


def _answer(path: Path, max_pixels: int, memory: int, offset: int) -> tuple[bytes, bytes]:
    watch = StopWatch()
    try:
        image = load_image(path, max_pixels=max_pixels, when_read=watch.read)
        pixels = image.tobytes()
    except ImageError as error:
        text = json.dumps({"kind": error.kind, "error": str(error)}).encode()
        return FRAME.pack(FAILURE, 0, 0, *watch.seconds(), len(text)), text
    kind = IMAGE
    if offset != NOWHERE:
        # Written and not mapped: nothing that goes wrong while decoding reaches the images of others.
        with contextlib.suppress(OSError):
            write(memory, pixels, offset)
            kind, pixels = STORED, b""
    return FRAME.pack(kind, image.width, image.height, *watch.seconds(), len(pixels)), pixels


def _read_path(tasks: BinaryIO, length: int) -> Path:
    return Path(os.fsdecode(tasks.read(length)))


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before we asked.
    if os.getppid() != parent:
        sys.exit("The process that started this worker is gone.")


if __name__ == "__main__":
    main()
