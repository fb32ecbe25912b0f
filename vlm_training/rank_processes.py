"""The processes of a training's ranks, as its run handles them.

The run starts the ranks (``rank.py``), reads their events, asks them to stop, and goes on with fewer when one
dies. The ranks hold the training's lock together with the run, so that a new start waits until the last of
them is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sensors.progress_judge import ProgressLimits, Standstill
from vlm_durable.files.lock_files import LockFile
from vlm_durable.files.processes import child_has_ended, end_processes, how_it_ended, is_stopped
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_durable.wording import counted
from vlm_training.rank import PEER_LOST, REFUSED, STOPPED, STORE_AWAY
from vlm_training.rank_watch import Activity, Position, StepWatch, blocking_ranks, rank_limits
from vlm_training.training_plan import TrainingError

_SOURCE_ROOT: Final = Path(__file__).resolve().parents[1]
_LOOK_SECONDS: Final = 0.5
_LAST_BYTES: Final = 2000
_log: Final = logging.getLogger(__name__)

_TRIES: Final = 3
"""The training stops after so many deaths in a row without a new step."""


class RanksDiedError(RuntimeError):
    """The ranks of a training died again and again; its checkpoints are kept."""


@dataclass
class RankProcesses:
    """The ranks of a training.

    devices: for each rank the value of CUDA_VISIBLE_DEVICES, empty for the CPU. grace: seconds to write a
    checkpoint when they are asked to stop. limits: how long a step may take.
    """

    folder: Path
    export: Path
    history: Path
    quarantine: Path
    devices: Sequence[str]
    lock: LockFile
    grace: float = 30.0
    limits: ProgressLimits = field(default_factory=lambda: rank_limits(ProgressLimits()))
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def events(self) -> Iterator[Mapping[str, Any]]:
        """The events of the first rank until the training is finished. Closing the iterator ends the ranks.

        The event ``nothing`` comes when nothing happened for half a second. Raises TrainingError if the ranks
        refuse, RanksDiedError, and StoreAwayError if the images cannot be fetched.
        """
        world, deaths, best = len(self.devices), 0, -1
        try:
            while True:
                for event in self._listen(world):
                    if event.get("event") == "step" and event["step"] > best:
                        best, deaths = event["step"], 0
                    yield event
                codes = self._codes()
                if not any(codes):
                    return
                if REFUSED in codes:
                    raise TrainingError("the last event gave the reason")  # The caller has raised with it.
                if STORE_AWAY in codes:
                    raise StoreAwayError(f"{self._last_line()} The training's checkpoints are kept.")
                survivors = sum(code in (PEER_LOST, STOPPED) for code in codes)
                deaths += 1
                dead = "; ".join(
                    f"rank {number} {how_it_ended(code)}"
                    for number, code in enumerate(codes)
                    if code not in (0, PEER_LOST, STOPPED)
                )
                message = f"{dead}. {self._last_line()}".strip()
                if deaths >= _TRIES:
                    raise RanksDiedError(
                        f"The training's processes died {counted(deaths, 'times')} without a new step:"
                        f" {message} Its"
                        f" checkpoints are kept. All they wrote is in {self.folder}/rank-*.log."
                    )
                world = max(1, survivors)
                message = f"{message} Going on with {world} of {len(codes)} ranks."
                yield {"event": "warning", "message": message}
        finally:
            self._end()

    def _listen(self, world: int) -> Iterator[Mapping[str, Any]]:
        """Start so many ranks, and yield the events of the first until all have ended."""
        read, write = os.pipe()
        meeting = self.folder / f".meeting-{uuid.uuid4().hex[:12]}"
        try:
            self._running = [self._start(number, world, write, meeting) for number in range(world)]
        finally:
            os.close(write)
        yield {"event": "starting"}
        unread, watch = b"", StepWatch(self.limits)
        with os.fdopen(read, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            lost_at: float | None = None
            while True:
                if selector.select(_LOOK_SECONDS):
                    content = pipe.read(1 << 16)
                    if not content:
                        break
                    *lines, unread = (unread + content).split(b"\n")
                    for event in map(json.loads, lines):
                        watch.note(event["event"], time.monotonic())
                        yield self._with_device(event)
                elif (verdict := watch.overdue(time.monotonic())) is not None:
                    yield self._kill_stuck(verdict)
                    watch.note("killed", time.monotonic())
                else:
                    yield {"event": "nothing"}
                # A rank that has trained to the end is not lost: the first rank still saves and evaluates.
                if any(process.poll() not in (None, 0) for process in self._running):
                    lost_at = lost_at or time.monotonic()
                    # Ranks that wait for a dead rank notice it at once. A rank that hangs does not.
                    if time.monotonic() - lost_at > self.grace and world > 1:
                        self._kill()
        meeting.unlink(missing_ok=True)

    def _with_device(self, event: dict[str, Any]) -> Mapping[str, Any]:
        return {**event, "device": self.devices[event["rank"]] or "cpu"} if "rank" in event else event

    def _kill_stuck(self, verdict: Standstill) -> Mapping[str, Any]:
        """Kill the ranks that the others wait for. The others go on from the last finished step."""
        positions = [
            Position.read(self._position(number))
            if process.poll() is None
            else Position(activity=Activity.UNKNOWN)
            for number, process in enumerate(self._running)
        ]
        stuck = blocking_ranks(positions, [is_stopped(process.pid) for process in self._running])
        for number in stuck:
            self._running[number].kill()
        names = "; ".join(f"rank {number} was {positions[number].sentence()}" for number in stuck)
        message = (
            f"No step for {verdict.seconds:.0f} s, where {verdict.allowed_seconds:.0f} s are allowed:"
            f" {names}. It is killed."
        )
        return self._with_device({"event": "stuck", "message": message, "rank": stuck[0]})

    def _position(self, number: int) -> Path:
        return self.folder / f"rank-{number}.at"

    def _codes(self) -> list[int]:
        """Wait until all have ended, and return their exit codes. After the grace, the rest are killed."""
        if not self._have_ended(self.grace):
            self._kill()
        return [process.wait() for process in self._running]

    def _start(self, number: int, world: int, events: int, meeting: Path) -> subprocess.Popen[bytes]:
        visible = self.devices[number]
        # Only the first rank sends events. A pipe that all ranks have open would not end with the first.
        pipe = events if number == 0 else os.open(os.devnull, os.O_WRONLY)
        arguments = {
            "--export": self.export,
            "--history": self.history,
            "--quarantine": self.quarantine,
            "--meeting": meeting,
            "--rank": number,
            "--world": world,
            "--events": pipe,
            "--parent": os.getpid(),
            "--device": "cuda" if visible else "cpu",
        }
        self._position(number).unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, (str(_SOURCE_ROOT), os.environ.get("PYTHONPATH"))))
        # Python's tracker outlives a rank, and its warning would hide the last line of the log.
        warnings = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker")))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": visible,
            "TOKENIZERS_PARALLELISM": "false",
            # All ranks are on this machine.
            "GLOO_SOCKET_IFNAME": "lo",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONWARNINGS": warnings,
        }
        command = [sys.executable, "-P", "-m", "vlm_training.rank", str(self.folder)]
        with (self.folder / f"rank-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *(str(part) for pair in arguments.items() for part in pair)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(pipe, self.lock.fileno()),
                # A Ctrl-C in the terminal is the run's to handle.
                process_group=0,
                env=environment,
            )
        if number:
            os.close(pipe)
        return process

    def _last_line(self) -> str:
        lines: list[str] = []
        for path in sorted(self.folder.glob("rank-*.log")):
            last_lines = path.read_bytes()[-_LAST_BYTES:].decode(errors="replace").strip().splitlines()
            lines += last_lines[-1:]
        return " ".join(lines)

    def _end(self) -> None:
        """Ask the ranks to stop, give them the time to write a checkpoint, and kill those that remain."""
        if not end_processes(self._send, self._have_ended, grace=self.grace):
            _log.error("%s", self._outlived())
        for path in self.folder.glob("rank-*.at"):  # They name properties, which may be withdrawn.
            with contextlib.suppress(OSError):
                path.unlink()

    def _kill(self) -> None:
        """Kill the ranks that still live. Raises RanksDiedError if one does not end."""
        if not end_processes(self._send, self._have_ended, grace=None):
            raise RanksDiedError(self._outlived())

    def _outlived(self) -> str:
        pids = ", ".join(str(process.pid) for process in self._running if process.poll() is None)
        return (
            f"Processes of the training do not end, though they were killed: {pids}. They hang in the driver"
            " (`nvidia-smi`, the kernel log): reset the device, or reboot. The checkpoints are kept."
        )

    def _send(self, number: signal.Signals) -> None:
        for process in self._running:
            process.send_signal(number)

    def _have_ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        return all(
            child_has_ended(process, max(0.0, deadline - time.monotonic())) for process in self._running
        )
