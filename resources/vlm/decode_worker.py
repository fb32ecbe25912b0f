"""The program of one decode worker: ``python -m resources.vlm.decode_worker PARENT_PID MAX_PIXELS``.

What lives here: the loop that takes the path of an image from standard input and answers with its pixels on
standard output, and the bytes of that exchange. What does not: starting, replacing and ending workers
(``decode_pool``). A program of its own, and not a fork or ``multiprocessing``: it inherits no lock, runs no
``__main__`` of its parent's a second time, and imports nothing but Pillow.
"""

from __future__ import annotations

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

from resources.vlm.images import ImageError, load_image

TASK_LENGTH: Final = struct.Struct("<H")
"""Before each path on standard input: its length in bytes."""

LONGEST_TASK: Final = 4096
"""PIPE_BUF on Linux: a shorter write goes into the pipe whole or not at all."""

FRAME: Final = struct.Struct("<BIIddQ")
"""Before each answer: what it is, width, height, seconds of reading and of decoding, bytes that follow."""

READY: Final = 0
IMAGE: Final = 1
"""Followed by width * height * 3 bytes of RGB."""
FAILURE: Final = 2
"""Followed by a JSON object of ``kind`` and ``error``."""

_PR_SET_PDEATHSIG = 1


def encoded_task(path: str) -> bytes:
    """The bytes that ask a worker for one image.

    Raises:
        ImageError: of kind ``missing``, where no file can have such a name.
    """
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ImageError("missing", f"{path!r} cannot be the name of a file: {error}.") from error
    if len(name) > LONGEST_TASK - TASK_LENGTH.size:
        raise ImageError("missing", f"{path[:80]}… is {len(name)} bytes long: no file can have such a name.")
    return TASK_LENGTH.pack(len(name)) + name


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
    parent, max_pixels = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    # A Ctrl-C is for the parent, which commits what is finished and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    # What a library prints must not end up between the pixels.
    answers = os.dup(1)
    os.dup2(2, 1)
    _write(answers, FRAME.pack(READY, 0, 0, 0.0, 0.0, 0))
    tasks = sys.stdin.buffer
    while length := tasks.read(TASK_LENGTH.size):
        path = _read_path(tasks, TASK_LENGTH.unpack(length)[0])
        for part in _answer(path, max_pixels):
            _write(answers, part)


def _answer(path: Path, max_pixels: int) -> tuple[bytes, bytes]:
    watch = StopWatch()
    try:
        image = load_image(path, max_pixels=max_pixels, when_read=watch.read)
        pixels = image.tobytes()
    except ImageError as error:
        text = json.dumps({"kind": error.kind, "error": str(error)}).encode()
        return FRAME.pack(FAILURE, 0, 0, *watch.seconds(), len(text)), text
    return FRAME.pack(IMAGE, image.width, image.height, *watch.seconds(), len(pixels)), pixels


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
