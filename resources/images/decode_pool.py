"""A pool of decode workers: images in, pixels out, whatever happens to a worker.

What lives here: who decodes what, replacing a worker that died or hangs, and finding the image that does
it. What does not: one process and its pipes (``worker_process``), and putting the images of properties and
batches together (``decode_workers``).

One thread owns all processes and pipes. It starts them too, because Linux sends the parent-death signal when
the *thread* that started a process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Literal

from resources.images.images import ImageError
from resources.images.nameless_memory import IS_THERE
from resources.images.pixel_memory import PixelMemory
from resources.images.worker_process import DecodeTask, Pixels, Seconds, WorkerProcess

ATTEMPTS: Final = 3
"""Workers that an image may take down before it is given up."""

_QUEUED_PER_WORKER = 64
"""One being decoded and others at hand: small ones are a millisecond each, and 8 kept a worker busy for a
third of its time. Where large ones are among them, workers that wait at the end of a batch cost an eighth."""

_TOGETHER_SECONDS = 0.025  # Each look at the workers takes a turn of the interpreter's lock from the model.
_FAILED_STARTS = 5
_START_SECONDS = 120.0  # Tens of milliseconds as a rule; a machine that swaps, or sources on NFS, take long.
_ENDING_SECONDS = 2.0

_log = logging.getLogger(__name__)


class DecodeWorkersError(RuntimeError):
    """The decode workers cannot go on; the message says why and what to do."""


class DecodePool:
    """Keeps ``workers`` worker processes alive and busy with what is submitted, first in, first out."""

    def __init__(self, *, workers: int, max_pixels: int, image_seconds: float) -> None:
        self._wanted = workers
        self._max_pixels = max_pixels
        self._image_seconds = image_seconds
        self.changed = threading.Condition()
        """Notified at each outcome and when ``error`` is set; held while ``DecodeTask.done`` runs."""
        self.error: Exception | None = None
        self._pending: deque[DecodeTask] = deque()
        self._workers: list[WorkerProcess] = []
        self._ended: list[WorkerProcess] = []
        self._memory = _memory_for(max_pixels)
        self._failed_starts = 0
        self._stopping = False
        self._ended_all = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        # A daemon: an interrupt that leaves close() early must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="decode-pool", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now."""
        with self.changed:
            return tuple(worker.process.pid for worker in self._workers)

    def submit(self, tasks: Iterable[DecodeTask]) -> None:
        """Queue images; returns at once."""
        with self.changed:
            self._pending.extend(tasks)
        self._wake()

    def close(self) -> None:
        """End all workers, at work or not, and return when they are gone. Who waits for images is woken."""
        self._stopping = True
        self._wake()
        self._thread.join()
        with self.changed:
            self.error = self.error or DecodeWorkersError("The decode workers were ended.")
            self.changed.notify_all()

    def _wake(self) -> None:
        with self.changed:
            # Once the thread has closed the pipe, its number may belong to any file: write nothing there.
            if not self._ended_all:
                with contextlib.suppress(BlockingIOError):  # A full pipe wakes the thread just as well.
                    os.write(self._wake_write, b"\0")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._start_missing()
                self._dispatch()
                for act in self._wait():
                    act()
                self._end_overdue()
        except Exception as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()
        finally:
            self._end_all()

    def _wait(self) -> list[Callable[[], None]]:
        deadlines = [self._deadline(worker) for worker in self._workers if worker.busy]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        if self._selector.select(timeout):
            # What else comes in these milliseconds is looked at with it.
            time.sleep(_TOGETHER_SECONDS)
        # After a SIGCONT the time is up though answers lie in the pipes: look once more before judging.
        events = self._selector.select(0)
        return [key.data for key, _ in events]

    def _deadline(self, worker: WorkerProcess) -> float:
        return worker.since + (self._image_seconds if worker.ready else _START_SECONDS)

    def _start_missing(self) -> None:
        while len(self._workers) < self._wanted:
            worker = WorkerProcess(self._max_pixels, self._memory)
            self._selector.register(worker.answers, selectors.EVENT_READ, partial(self._hear, worker))
            self._selector.register(worker.complaints, selectors.EVENT_READ, partial(self._overhear, worker))
            with self.changed:
                self._workers.append(worker)

    def _dispatch(self) -> None:
        # The first round gives every idle worker an image before any of them gets one to keep at hand.
        for depth in range(1, _QUEUED_PER_WORKER + 1):
            for worker in self._workers:
                while worker.ready and len(worker.queue) < depth and (task := self._next_task()):
                    try:
                        worker.take(task)
                    except ImageError as error:
                        self._finish([(task, error, (0.0, 0.0))])
        for worker in self._workers:
            self._put_back(*worker.send())

    def _next_task(self) -> DecodeTask | None:
        with self.changed:
            while self._pending:
                task = self._pending.popleft()
                if not task.abandoned.is_set():
                    return task
        return None

    def _put_back(self, *tasks: DecodeTask) -> None:
        with self.changed:
            self._pending.extendleft(reversed(tasks))

    def _finish(self, answers: Iterable[tuple[DecodeTask, Pixels | ImageError, Seconds]]) -> None:
        with self.changed:
            for task, outcome, seconds in answers:
                further = None if task.abandoned.is_set() else task.done(outcome, seconds)
                if further is not None:
                    self._pending.appendleft(further)
            self.changed.notify_all()  # once for all: who waits takes a turn of the interpreter's lock, too

    def _hear(self, worker: WorkerProcess) -> None:
        if worker not in self._workers:
            return
        self._finish(worker.receive())
        if worker.dead:
            self._bury(worker, "kills_worker")
        if worker.ready:
            self._failed_starts = 0

    def _overhear(self, worker: WorkerProcess) -> None:
        if worker in self._workers and not worker.listen():
            self._selector.unregister(worker.complaints)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for worker in [one for one in self._workers if one.busy and now >= self._deadline(one)]:
            self._bury(worker, "timed_out")

    def _bury(self, worker: WorkerProcess, kind: Literal["kills_worker", "timed_out"]) -> None:
        """Take out a worker that died or hangs, and decide about what it was doing."""
        with self.changed:
            self._workers.remove(worker)
        for stream in (worker.answers, worker.complaints):
            with contextlib.suppress(KeyError):
                self._selector.unregister(stream)
        if kind == "timed_out":
            story = f"gave no answer for {self._image_seconds if worker.ready else _START_SECONDS:g} s"
            worker.process.kill()  # And not waited for: blocked storage can hold off even a SIGKILL.
        else:
            story = worker.cause_of_death()
        worker.close()
        self._ended = [one for one in [*self._ended, worker] if not one.has_ended()]
        if not worker.ready:
            self._failed_to_start(story)
        elif not worker.queue:
            _log.warning(
                "Decode worker %d %s while idle; another takes its place.", worker.process.pid, story
            )
        else:
            culprit = worker.queue.popleft()
            # What was only waiting its turn behind it is innocent.
            self._put_back(*worker.queue)
            worker.queue.clear()  # and with it the images of the same properties, which it would hold
            self._blame(culprit, kind, worker.process.pid, story)

    def _blame(
        self, task: DecodeTask, kind: Literal["kills_worker", "timed_out"], pid: int, story: str
    ) -> None:
        task.attempts += 1
        _log.warning(
            "Decode worker %d %s at %s (attempt %d of %d); another takes its place.",
            pid,
            story,
            task.path,
            task.attempts,
            ATTEMPTS,
        )
        if task.attempts < ATTEMPTS:
            self._put_back(task)
            return
        sentence = f"{task.path} was given up after {ATTEMPTS} decode workers; the last one {story}."
        self._finish([(task, ImageError(kind, sentence), (0.0, 0.0))])

    def _failed_to_start(self, story: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _FAILED_STARTS:
            raise DecodeWorkersError(
                f"Decode workers do not start: {_FAILED_STARTS} in a row ended before they were ready. The"
                f" last one {story}. Try `{sys.executable} -c 'import resources.images.decode_worker'`."
            )

    def _end_all(self) -> None:
        with self.changed:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
            worker.close()
        deadline = time.monotonic() + _ENDING_SECONDS
        for worker in [*self._ended, *workers]:
            # One that storage holds in the kernel ends when the storage answers; its death is certain.
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        with self.changed:
            self._ended_all = True
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)


def _memory_for(max_pixels: int) -> PixelMemory | None:
    """None where there is no such memory, or limits of this process are in its way: pipes do as well."""
    if not IS_THERE:
        return None
    try:
        return PixelMemory(max_pixels)
    except OSError as error:
        _log.info("Pixels come through pipes, because there is no memory to share: %s", error)
        return None
