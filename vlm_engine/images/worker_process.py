"""The processes of the worker pool in the run: a template, and the workers that are forked from it.

This module starts them, asks them, ends them, and says how each ended. ``worker_pool`` gives them properties
and decides what a death means; ``worker`` is the program that they run.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from vlm_durable.files.processes import how_it_ended
from vlm_engine.images.images import Output
from vlm_engine.images.worker import FORK, READY, Parcel, Progress, create, receive, send

_START_SECONDS: Final = 180.0
"""To import and load what the output needs: seconds as a rule, minutes on a machine that swaps."""

ENDING_SECONDS: Final = 2.0
_LAST_WORDS: Final = 2000
_SOURCE_ROOT: Final = Path(__file__).resolve().parents[2]

ENVIRONMENT: Final = {
    # Otherwise glibc's malloc returns the pixels of each image to the system and asks for new pages: half of
    # the time to decode a small image.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
_PASSED_ON: Final = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "XDG_CACHE_HOME",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "ATEN_CPU_CAPABILITY", "GLIBC_TUNABLES", "HF_HOME", "HF_HUB_CACHE",
    "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_MODULES_CACHE", "TRANSFORMERS_OFFLINE", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
})  # fmt: skip
_PASSED_ON_PREFIXES: Final = ("LC_", "PYTHON", "MALLOC_")
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})
"""Variables that workers get: those that find programs, a model's processor and certificates. Workers decode
untrusted files, so they get no key, token or password: proxies pass without a password."""

_NO_THREADS: Final = {
    # A process that forks must have no other threads, and workers must not use the model's cores and GPU.
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class WorkerProcess:
    """One worker process, for the thread that serves it."""

    def __init__(self, template: Template, pid: int, connection: socket.socket, progress: Progress) -> None:
        self.template = template
        self.pid = pid
        self._connection = connection
        self._progress = progress
        self._unanswered = 0
        self._since = time.monotonic()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def give(self, tasks: Sequence[Parcel]) -> None:
        """Send tasks: a few bytes each, so its socket always has room. Raises OSError."""
        if not self._unanswered:
            self._since = time.monotonic()  # It was idle.
        for task in tasks:
            send(self._connection, task)
        self._unanswered += len(tasks)

    def answer(self, image_seconds: float) -> Parcel | None:
        """The next answer; None where it has ended. Raises TimeoutError where it hangs."""
        while True:
            _, _, begun = self._progress.read()
            seconds_left = max(begun, self._since) + image_seconds - time.monotonic()
            # Poll even when the time is up: this process may have been stopped while the answer came.
            if self._poll.poll(max(0.0, seconds_left) * 1000):
                parcel = receive(self._connection)
                self._unanswered -= 1
                self._since = time.monotonic()
                return parcel
            if seconds_left <= 0:
                raise TimeoutError

    def position(self) -> tuple[int, int]:
        """The numbers of the task and of the image that it works on, or worked on when it ended."""
        task, image, _ = self._progress.read()
        return task, image

    def kill(self) -> None:
        """Kill it. No other process gets its pid until ``Template.end_of`` has asked for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close its socket. A living worker ends when it next asks for work."""
        self._connection.close()


class Template:
    """The process from which workers are forked. Its methods may be called from several threads."""

    def __init__(self, output: Output) -> None:
        self._control, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)  # A library that prints a lot must not block.
        self._complaints = os.fdopen(read, "rb", buffering=0)
        self._last_words = b""
        self._asking = threading.Lock()
        with template_end:
            # Its own process group: the run handles a Ctrl-C in the terminal and a SIGTERM to its group. No
            # other descriptors: the template must not keep a lock of ours alive.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "vlm_engine.images.worker",
                    str(os.getpid()),
                    str(template_end.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=write,
                pass_fds=(template_end.fileno(),),
                process_group=0,
                env=_environment(),
            )
        os.close(write)
        self._control.settimeout(_START_SECONDS)
        self.ready = False
        """Whether it has loaded the output."""
        with contextlib.suppress(OSError):
            send(self._control, Parcel({"output": np.frombuffer(pickle.dumps(output), np.uint8)}, None))

    def fork(self) -> WorkerProcess:
        """A new worker. Raises OSError where none can be forked."""
        run_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        progress = create(mmap.PAGESIZE)
        try:
            with worker_end, self._asking:
                if not self.ready and self._control.recv(64) != READY:
                    raise ConnectionError("it ended before it was ready")
                self.ready = True
                socket.send_fds(self._control, [FORK], [worker_end.fileno(), progress])
                pid = self._control.recv(64)
                if not pid:
                    raise ConnectionError("it ended")
            return WorkerProcess(self, int(pid), run_end, Progress(progress))
        except BaseException:
            run_end.close()
            raise
        finally:
            os.close(progress)

    def end_of(self, worker: WorkerProcess) -> str:
        """How a worker with a closed socket ended, as the second half of a sentence."""
        worker.kill()
        try:
            with self._asking:
                self._control.send(str(worker.pid).encode())
                code = self._control.recv(64)
            return how_it_ended(int(code)) if code else "ended with the process that started it"
        except OSError:
            return "ended with the process that started it"

    def story(self, error: OSError) -> str:
        """How this process ended, or that it gave no answer, as the second half of a sentence."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return how_it_ended(self._process.wait(1.0))
        return f"gave no answer: {error}"

    def last_line(self) -> str:
        """The last line that it or a worker has written to standard error."""
        with contextlib.suppress(OSError):
            while written := self._complaints.read(1 << 16):
                self._last_words = (self._last_words + written)[-_LAST_WORDS:]
        lines = self._last_words.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def has_ended(self) -> bool:
        """Whether it is gone, and all its workers with it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Close its sockets and pipes, once nobody asks it any more."""
        self._control.close()
        self._complaints.close()

    def end(self) -> None:
        """End it, and with it all workers, at work or not."""
        self._process.kill()
        # A process that storage holds in the kernel ends when the storage answers.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # A thread may wait for its answer.


def _environment() -> Mapping[str, str]:
    # It must find these sources wherever the parent was started, and not the parent's folder (-P).
    path = os.pathsep.join(filter(None, (str(_SOURCE_ROOT), os.environ.get("PYTHONPATH"))))
    passed_on = {name: value for name, value in os.environ.items() if _is_passed_on(name, value)}
    return ENVIRONMENT | passed_on | _NO_THREADS | {"PYTHONPATH": path}


def _is_passed_on(name: str, value: str) -> bool:
    if name.lower() in _PROXIES:
        return "@" not in value
    return name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
