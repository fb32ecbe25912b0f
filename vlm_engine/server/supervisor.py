"""The supervisor of one model server: starts it, waits until it is well, ends it when nobody uses it.

It is a program (``python -m vlm_engine.server.supervisor``, its order as JSON on standard input) that
outlives the run that starts it, and shares no session and no open file with it. The run's side is
``owned_server.py``. Light imports only: it lives as long as the server.

It is two processes, so that when either is killed, the other one cleans up:

    run ... reaper ── supervisor ── server ── whatever the server starts

- The run is killed: the server waits for the next run, until it has been idle for too long.
- The server is killed, or ends: the supervisor kills its remaining processes, records the cause, and ends.
- The supervisor is killed: the kernel kills the server. The server's own processes become the
  reaper's children, and it kills them.
- The reaper is killed: the kernel signals the supervisor, which ends the server.
- Both are killed at once: the kernel kills the server. The next run that leases the device kills the rest
  (``vlm_engine/devices/loaded_servers.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlm_durable.files.files import write_replacing
from vlm_durable.files.lock_files import LockFile, acquire_lock
from vlm_durable.files.processes import ProcessIdentity, children, die_with, how_it_ended
from vlm_engine.devices.loaded_servers import ServerFiles, ServerRecord
from vlm_engine.server.model_server import (
    ANOTHER_USER,
    KEY_VARIABLE,
    NOT_OUR_KEY,
    ServerAddress,
    trouble,
)

LOG_BYTES = 64 << 20
"""A log that has grown to this keeps its end, as ``.log.1``, and begins anew."""

_KEPT_BYTES = 4 << 20
_STARTING_LOOK_SECONDS = 0.25
_LOOK_SECONDS = 1.0
_SHORTEST_LOOK_SECONDS = 0.05
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Order:
    """The input of a supervisor.

    about: fields of the record that the run knows. lock: the descriptor of the lock that shows that a server
    lives on the device; both processes inherit it. environment: the server's whole environment, with its key.
    """

    directory: str
    lock: int
    about: Mapping[str, Any]
    environment: Mapping[str, str] = field(repr=False)
    start_seconds: float
    idle_seconds: float

    @property
    def key(self) -> str:
        """The server's key."""
        return self.environment[KEY_VARIABLE]

    @property
    def files(self) -> ServerFiles:
        """The files of the server."""
        return ServerFiles(Path(self.directory), self.about["device"])


class Supervisor:
    """Supervises one server, as a child of the reaper. umask: the server's."""

    def __init__(self, order: Order, *, umask: int) -> None:
        self._order = order
        self._files = order.files
        self._umask = umask
        reaper, own = ProcessIdentity.from_pid(os.getppid()), ProcessIdentity.from_pid(os.getpid())
        assert reaper is not None and own is not None
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._record = ServerRecord(
            **order.about, since=since, host=socket.gethostname(), reaper=reaper, supervisor=own
        )
        self._exit_code: int | None = None
        self._alone_since: float | None = None
        self._lessee_lock: LockFile | None = None
        self._must_end = False
        self._wakeup, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(woken)
        # Handlers, not SIG_IGN: the server would inherit ignored signals, and could then not be ended.
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._take_signal)

    def run(self) -> None:
        """Start, watch, end."""
        write_replacing(self._files.key, self._order.key.encode())  # First: readers of the record need it.
        self._write_record(self._record)  # Before the server: only the record names its processes.
        _become_subreaper()
        own = os.getpid()
        try:
            server = subprocess.Popen(
                self._record.command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env=self._order.environment,
                process_group=0,
                umask=self._umask,
                preexec_fn=lambda: die_with(own),  # Safe: there is one thread.
            )
        except OSError as error:
            why = f"{self._record.command[0]}: {error.strerror}"
        else:
            self._write_record(replace(self._record, server=ProcessIdentity.from_pid(server.pid)))
            why = self._watch(server.pid)
            self._end(server.pid)
        self._files.key.unlink(missing_ok=True)
        self._write_record(replace(self._record, state="ended", why=why))

    def _watch(self, server: int) -> str:
        """Wait for the cause of an end, and return it."""
        deadline = time.monotonic() + self._order.start_seconds
        while True:
            interval = _LOOK_SECONDS if self._record.state == "ready" else _STARTING_LOOK_SECONDS
            self._wait(server, min(interval, max(self._order.idle_seconds / 4, _SHORTEST_LOOK_SECONDS)))
            if self._exit_code is not None:
                return f"it {how_it_ended(self._exit_code)}"
            if self._must_end:
                return "it was told to end" if self._record.reaper.lives() else "its reaper was killed"
            if self._was_idle():
                return f"nobody used it for {self._order.idle_seconds:.0f} s"
            if self._record.state == "starting":
                wrong = trouble(ServerAddress(self._record.url, self._order.key, of_this_user=True))
                if wrong is None:
                    self._write_record(replace(self._record, state="ready"))
                elif wrong.startswith(NOT_OUR_KEY):
                    return (
                        f"{wrong}, which it got as {KEY_VARIABLE}: take every other key out of"
                        " its command (--api-key) and its configuration"
                    )
                elif wrong.startswith(ANOTHER_USER):
                    return f"{wrong}: find it with `ss -tlnp`; the next start takes another port"
                elif time.monotonic() >= deadline:
                    return f"it was not ready within {self._order.start_seconds:.0f} s: {wrong}"
            self._maintain_files()

    def _end(self, server: int) -> None:
        """End the server's process group with patience, and then, without, all that descends from it."""
        if self._exit_code is None:
            os.killpg(server, signal.SIGTERM)
            deadline = time.monotonic() + self._record.grace_seconds
            # A process that has left the group got no signal, and is not waited for.
            with contextlib.suppress(ProcessLookupError):
                while (seconds_left := deadline - time.monotonic()) > 0:
                    self._wait(server, min(seconds_left, _SHORTEST_LOOK_SECONDS))
                    os.killpg(server, 0)  # It raises once the group is empty.
        _end_descendants()

    def _wait(self, server: int, seconds: float) -> None:
        """Wait for a signal; collect the server, and its orphans, that have ended."""
        if select.select([self._wakeup], [], [], seconds)[0]:
            os.read(self._wakeup, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == server:
                    self._exit_code = os.waitstatus_to_exitcode(ended[1])

    def _take_signal(self, number: int, _frame: object) -> None:
        self._must_end |= number == signal.SIGTERM

    def _was_idle(self) -> bool:
        """Whether no run has held it for long enough; then this process keeps all others away."""
        lock = acquire_lock(self._files.lessee)
        now = time.monotonic()
        if lock is None:
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since >= self._order.idle_seconds:
            self._lessee_lock = lock  # Until this process ends: the next holder then finds the device empty.
            return True
        lock.close()
        return False

    def _maintain_files(self) -> None:
        """Write the record again where it was removed or damaged, and bound the log."""
        with contextlib.suppress(OSError):
            if ServerRecord.read(self._files.record) != self._record:
                self._write_record(self._record)
            if self._files.log.stat().st_size > LOG_BYTES:
                begin_anew(self._files.log)

    def _write_record(self, record: ServerRecord) -> None:
        self._record = record
        try:
            record.write(self._files.record)
        except OSError as error:
            # A full disk. Nobody adopts a server without a record; it ends when it is idle.
            sys.stderr.write(f"supervisor: the record was not written: {error}\n")


def begin_anew(log: Path) -> None:
    """Keep the end of a log as ``.log.1`` and empty it; processes that have it open go on appending."""
    with log.open("r+b") as stream:
        stream.seek(-min(_KEPT_BYTES, os.fstat(stream.fileno()).st_size), os.SEEK_END)
        log.with_suffix(".log.1").write_bytes(stream.read())
        stream.truncate(0)


def _become_subreaper() -> None:
    """From now on orphans among this process's descendants become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_descendants() -> None:
    """Kill and collect every descendant of this process, which must be a subreaper."""
    while pids := children():
        for pid in pids:
            # Ended children are collected only here, so no number has passed to another process.
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def main() -> None:
    """Read the order and leave the run's session. This process becomes the reaper, its child supervises."""
    order = Order(**json.load(sys.stdin))
    if os.fork():
        os._exit(0)  # The run has no child to wait for, and signals of its session do not reach us.
    umask = os.umask(0o077)
    with Path(os.devnull).open("r+b") as nothing, order.files.log.open("ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _become_subreaper()
    reaper = os.getpid()
    supervisor = os.fork()
    if not supervisor:
        die_with(reaper, signal.SIGTERM)
        os.setsid()
        Supervisor(order, umask=umask).run()
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.waitpid(supervisor, 0)
    _end_descendants()


if __name__ == "__main__":
    main()
