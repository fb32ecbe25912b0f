"""One decode worker as its parent sees it: the process, its three pipes and the images it has in hand.

What lives here: starting the program of ``decode_worker``, sending it images and where to put their pixels,
receiving without ever waiting, and what is known of its death. What does not: which worker gets which image
(``decode_pool``).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from resources.images.decode_worker import FRAME, IMAGE, READY, STORED, encoded_task
from resources.images.images import ImageError
from resources.images.pixel_memory import PixelMemory
from resources.processes import how_it_ended

Pixels = npt.NDArray[np.uint8]
"""RGB, of shape (height, width, 3)."""

Seconds = tuple[float, float]
"""Of reading an image, and of decoding it."""

_SOURCE_ROOT: Final = Path(__file__).resolve().parents[2]
_LAST_WORDS: Final = 2000
_PIPE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
_DYING_SECONDS: Final = 1.0

_KEEPS_FREED_MEMORY: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
"""Has glibc's malloc keep up to 128 MiB that were freed. By itself it gives the pixels of each image back to
the system and asks for others, each page of which is new: half of what a small image takes to decode."""


@dataclass(eq=False)
class DecodeTask:
    """One image to decode."""

    path: str
    done: Callable[[Pixels | ImageError, Seconds], DecodeTask | None]
    """Called once, in the pool's thread, with the outcome and its seconds; may answer with another task."""
    abandoned: threading.Event
    """Set when nobody wants the outcome any more; ``done`` is not called after that."""
    attempts: int = 0


class WorkerProcess:
    """A worker process. All its pipes are non-blocking on this side: a stopped worker holds up nobody.

    memory: for the pixels; None: they come through the pipe, as they do where there is no room in it.
    """

    def __init__(self, max_pixels: int, memory: PixelMemory | None) -> None:
        arguments = [os.getpid(), max_pixels, -1 if memory is None else memory.descriptor]
        # Its own process group: a Ctrl-C in the terminal, or a SIGTERM to the run's group, is the parent's to
        # handle. No descriptor but the pipes and the memory: it must not keep a lock of ours alive.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "resources.images.decode_worker", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            close_fds=True,
            pass_fds=() if memory is None else (memory.descriptor,),
            process_group=0,
            env=environment(),
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._tasks = self.process.stdin.fileno()
        self.answers = self.process.stdout.fileno()
        self.complaints = self.process.stderr.fileno()
        for descriptor in (self._tasks, self.answers, self.complaints):
            os.set_blocking(descriptor, False)
        _widen(self.answers)
        self.queue: deque[DecodeTask] = deque()
        """Images taken and not yet answered; the first is the one being decoded."""
        self._memory = memory
        self._places: deque[int | None] = deque()
        """Offsets in the memory, of the same images."""
        self.ready = False
        self.since = time.monotonic()
        """When it was last heard of, or given something to do."""
        self.dead = False
        """Whether it has ended, and all that it had to say was received."""
        self._last_words = b""
        self._unsent: list[bytes] = []
        """Of the last images in the queue."""
        self._heard = memoryview(b"")
        """What was read and not yet looked at."""
        self._header = bytearray(FRAME.size)
        self._body: Pixels | bytearray | None = None
        self._space = memoryview(self._header)

    @property
    def busy(self) -> bool:
        """Whether an answer is due: its first sign of life, or an image."""
        return not self.ready or bool(self.queue)

    def take(self, task: DecodeTask) -> None:
        """Put an image behind the others in hand; it goes to the worker with the next ``send``.

        Raises:
            ImageError: the path cannot be the name of a file.
        """
        place = self._memory.reserve() if self._memory is not None else None
        try:
            encoded = encoded_task(task.path, place)
        except BaseException:
            self._release(place)
            raise
        if not self.queue:
            self.since = time.monotonic()
        self.queue.append(task)
        self._places.append(place)
        self._unsent.append(encoded)

    def send(self) -> list[DecodeTask]:
        """Send the images that were taken, in few writes; those for which the pipe has no room come back.

        There is none where the pipe is full, or its reader dead.
        """
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                ends = itertools.accumulate(map(len, self._unsent))
                # So many go into the pipe whole or not at all.
                whole = max(1, sum(1 for _ in itertools.takewhile(lambda end: end <= select.PIPE_BUF, ends)))
                os.write(self._tasks, b"".join(self._unsent[:whole]))
                del self._unsent[:whole]
        back: list[DecodeTask] = []
        while self._unsent:
            self._unsent.pop()
            self._release(self._places.pop())
            back.insert(0, self.queue.pop())
        return back

    def receive(self) -> Iterator[tuple[DecodeTask, Pixels | ImageError, Seconds]]:
        """The answers that are complete by now. Afterwards ``dead`` tells whether there will be others."""
        there_is_more = True
        while True:
            if self._space and self._heard:
                count = min(len(self._space), len(self._heard))
                self._space[:count] = self._heard[:count]
                self._space, self._heard = self._space[count:], self._heard[count:]
            elif self._space and there_is_more:
                try:
                    there_is_more = self._hear()
                except BlockingIOError:
                    return
            elif self._space:
                return
            elif self._body is None:
                self._begin_body()
            else:
                answer = self._answer(self._body)
                self._expect_header()
                if answer:
                    yield answer

    def _hear(self) -> bool:
        """Read what is there, into what it is for or aside; whether there may be more."""
        if len(self._space) > _READ_BYTES:
            count = os.readv(self.answers, [self._space])
            self._space = self._space[count:]
            there_is_more = True
        else:
            self._heard = memoryview(os.read(self.answers, _READ_BYTES))
            count = len(self._heard)
            there_is_more = count == _READ_BYTES
        if not count:
            self.dead = True
            return False
        self.since = time.monotonic()
        return there_is_more

    def listen(self) -> bool:
        """Keep the end of what it writes to standard error; False when that has ended."""
        try:
            said = os.read(self.complaints, 1 << 16)
        except BlockingIOError:
            return True
        self._last_words = (self._last_words + said)[-_LAST_WORDS:]
        return bool(said)

    def cause_of_death(self) -> str:
        """How it ended, as the second half of a sentence. For a worker whose answers have ended."""
        try:
            code = self.process.wait(_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "closed its pipe and did not end"
        while self._last_words_left():
            pass
        said = self._last_words.decode(errors="replace").strip()
        last_line = f": {said.splitlines()[-1]}" if said else ""
        return f"{how_it_ended(code)}{last_line}"

    def has_ended(self) -> bool:
        """Whether it writes nowhere any more, so that the places that it was given can be another's."""
        if self.process.poll() is None:
            return False
        while self._places:
            self._release(self._places.popleft())
        return True

    def close(self) -> None:
        """Close the pipes; the process, if it lives, then ends when it next looks for work."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _last_words_left(self) -> bool:
        before = self._last_words
        return self.listen() and self._last_words != before

    def _expect_header(self) -> None:
        self._space = memoryview(self._header)
        self._body = None

    def _begin_body(self) -> None:
        kind, width, height, _, _, length = FRAME.unpack(self._header)
        if kind == IMAGE:
            # Straight into the array that the model will read: no second copy on this side.
            self._body = np.empty((height, width, 3), np.uint8)
            self._space = self._body.reshape(-1).data
        else:
            self._body = bytearray(length)
            self._space = memoryview(self._body)

    def _answer(self, body: Pixels | bytearray) -> tuple[DecodeTask, Pixels | ImageError, Seconds] | None:
        kind, width, height, reading, decoding, _ = FRAME.unpack(self._header)
        if kind == READY:
            self.ready = True
            return None
        task, place = self.queue.popleft(), self._places.popleft()
        if kind == STORED and self._memory is not None and place is not None:
            return task, self._memory.image(place, height, width), (reading, decoding)
        self._release(place)
        if isinstance(body, bytearray):
            told = json.loads(body)
            return task, ImageError(told["kind"], told["error"]), (reading, decoding)
        return task, body, (reading, decoding)

    def _release(self, place: int | None) -> None:
        if self._memory is not None and place is not None:
            self._memory.release(place)


def environment() -> dict[str, str]:
    """Of a process that works ahead of the model."""
    # It must find these sources wherever the parent was started, without the parent's folder (-P).
    path = os.pathsep.join(filter(None, (str(_SOURCE_ROOT), os.environ.get("PYTHONPATH"))))
    return _KEEPS_FREED_MEMORY | os.environ | {"PYTHONPATH": path}


def _widen(pipe: int) -> None:
    """Let an image pass in a few large pieces; where the system refuses, it passes in small ones."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
