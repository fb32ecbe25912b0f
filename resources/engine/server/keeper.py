"""The keeper of one model server: starts it, waits until it is well, watches it, ends it when nobody uses it.

What lives here: a program (``python -m resources.engine.server.keeper``, its order as JSON on standard input)
that goes its own way: no signal to the run that started it reaches it, and it has none of the run's files.
What does not: who starts it (``owned_server.py``), what keeps its processes together (``guard.py``). Light
imports only: it is there as long as the server is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from resources.devices.residents import ResidentPaths, ResidentRecord
from resources.engine.server import guard, health
from resources.processes import ProcessIdentity, how_it_ended
from resources.storage.files import write_replacing
from resources.storage.lock_files import LockFile, taken

LOG_BYTES = 64 << 20
"""A log that has grown to this keeps its end, as ``.log.1``, and begins anew."""
_KEPT_BYTES = 4 << 20
_STARTING_LOOK_SECONDS = 0.25
_LOOK_SECONDS = 1.0
_SHORTEST_LOOK_SECONDS = 0.05
_SLACK_SECONDS = 5.0


@dataclass(frozen=True)
class Order:
    """What a keeper is told. ``lock``: the descriptor with the keeper's lock on it, which it inherits.

    ``environment``: all of the server's, but for ``key``, which it gets as ``key_variable``.
    """

    directory: str
    device: str
    lock: int
    what: str
    digest: str
    pin: dict[str, str]
    variables: dict[str, str]
    url: str
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    key: str = field(repr=False)
    key_variable: str
    start_seconds: float
    idle_seconds: float
    grace_seconds: float

    def encode(self) -> bytes:
        """As the keeper reads it."""
        return json.dumps(asdict(self)).encode()


class Keeper:
    """One server's keeper, in a process of its own."""

    def __init__(self, order: Order, umask: int) -> None:
        self._order = order
        self._umask = umask
        self._paths = ResidentPaths(Path(order.directory), order.device)
        own = ProcessIdentity.of(os.getpid())
        assert own is not None
        self._record = ResidentRecord(
            device=order.device,
            what=order.what,
            digest=order.digest,
            pin=order.pin,
            variables=order.variables,
            url=order.url,
            command=tuple(order.command),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            grace_seconds=order.grace_seconds,
            host=socket.gethostname(),
            keeper=own,
        )
        self._alone_since: float | None = None
        self._kept: LockFile | None = None
        self._wakeup, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGTERM, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def run(self) -> None:
        """Start, watch, end."""
        write_replacing(self._paths.key, self._order.key.encode())  # first: whoever reads the record needs it
        self._say(self._record)  # before anything lives that only it can tell of
        guard.become_subreaper()
        with subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                guard.__file__,
                str(self._order.grace_seconds),
                *self._order.command,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=self._order.environment | {self._order.key_variable: self._order.key},
            process_group=0,
            umask=self._umask,
            pass_fds=(self._order.lock,),
        ) as guarding:
            self._say(replace(self._record, group=ProcessIdentity.of(guarding.pid)))
            why = self._watch(guarding)
            self._end(guarding)
        self._paths.key.unlink(missing_ok=True)
        self._say(replace(self._record, state="ended", why=why))

    def _watch(self, guarding: subprocess.Popen[bytes]) -> str:
        """Wait for the cause of an end, and say it."""
        assert guarding.stdout is not None
        told_by_guard = guarding.stdout.fileno()
        deadline = time.monotonic() + self._order.start_seconds
        while True:
            pause = _LOOK_SECONDS if self._record.state == "ready" else _STARTING_LOOK_SECONDS
            pause = min(pause, max(self._order.idle_seconds / 4, _SHORTEST_LOOK_SECONDS))
            readable, _, _ = select.select([told_by_guard, self._wakeup], [], [], pause)
            if self._wakeup in readable:
                return "it was told to end"
            if told_by_guard in readable:
                told = json.loads(guarding.stdout.readline() or b'{"error": "its guard was killed"}')
                if "pid" not in told:
                    return str(told["error"]) if "error" in told else f"it {how_it_ended(int(told['exit']))}"
                self._say(replace(self._record, server=ProcessIdentity.of(told["pid"])))
            if self._was_idle():
                return f"nobody used it for {self._order.idle_seconds:.0f} s"
            if self._record.state == "starting" and self._record.server is not None:
                wrong = health.trouble(self._order.url, self._order.key)
                if wrong is None:
                    self._say(replace(self._record, state="ready"))
                elif wrong.startswith(health.NOT_OUR_KEY):
                    return (
                        f"{wrong}, which it got as {self._order.key_variable}: take every other key out of"
                        " its command (--api-key) and its configuration"
                    )
                elif time.monotonic() >= deadline:
                    return f"it was not ready within {self._order.start_seconds:.0f} s: {wrong}"
            self._care_for_files()

    def _was_idle(self) -> bool:
        """Whether no materialization has held it for long enough; then this process keeps all others away."""
        lock = taken(self._paths.lessee)
        now = time.monotonic()
        if lock is None:
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since >= self._order.idle_seconds:
            self._kept = lock  # until we are gone: who waits for it then finds the device empty
            return True
        lock.close()
        return False

    def _end(self, guarding: subprocess.Popen[bytes]) -> None:
        assert guarding.stdin is not None
        guarding.stdin.close()
        try:
            guarding.wait(self._order.grace_seconds + _SLACK_SECONDS)
        except subprocess.TimeoutExpired:
            guarding.kill()
        # Where the guard was killed, the server died with it, and what the server had started is ours now.
        guard.end_descendants()

    def _care_for_files(self) -> None:
        """Write the record again where it was removed or damaged, and bound the log."""
        with contextlib.suppress(OSError):
            if ResidentRecord.read(self._paths.record) != self._record:
                self._say(self._record)
            if self._paths.log.stat().st_size > LOG_BYTES:
                begin_anew(self._paths.log)

    def _say(self, record: ResidentRecord) -> None:
        self._record = record
        try:
            record.write(self._paths.record)
        except OSError as error:
            # A full disk. Nobody adopts what has no record; it ends when it is idle.
            sys.stderr.write(f"keeper: the record was not written: {error}\n")


def begin_anew(log: Path) -> None:
    """Keep the end of a log as ``.log.1`` and empty it; who has it open goes on appending."""
    with log.open("r+b") as stream:
        stream.seek(-min(_KEPT_BYTES, os.fstat(stream.fileno()).st_size), os.SEEK_END)
        log.with_suffix(".log.1").write_bytes(stream.read())
        stream.truncate(0)


def main() -> None:
    """Read the order, leave the run's session, keep the server."""
    order = Order(**json.load(sys.stdin))
    if os.fork():
        os._exit(0)  # the run has no child to wait for, and no signal of its session finds us
    os.setsid()
    umask = os.umask(0o077)
    log = ResidentPaths(Path(order.directory), order.device).log
    with Path(os.devnull).open("r+b") as nothing, log.open("ab") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
        os.dup2(output.fileno(), 2)
    Keeper(order, umask).run()


if __name__ == "__main__":
    main()
