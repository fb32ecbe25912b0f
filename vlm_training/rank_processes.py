"""The processes of a training as its run sees them: started, listened to, asked to stop, fewer when one dies.

What lives here: starting the ranks, their events in order, what the death of one means. What does not: the
program that they run (``rank.py``). They hold the training's lock together with the run, so that a new start
waits until the last of them is gone.
"""

from __future__ import annotations

import contextlib
import json
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

from vlm_durable.files.lock_files import LockFile
from vlm_durable.files.processes import how_it_ended, is_stopped
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_durable.wording import counted
from vlm_training.rank import PEER_LOST, REFUSED, STOPPED, STORE_AWAY
from vlm_training.rank_watch import Doing, Position, StepLimits, StepWatch, held_up_by
from vlm_training.training_plan import TrainingError

_SOURCE_ROOT: Final = Path(__file__).resolve().parents[1]
_LOOK_SECONDS: Final = 0.5
_LAST_WORDS: Final = 2000
_TRIES: Final = 3
"""Deaths in a row without a new step, after which it is no accident."""


class RanksDiedError(RuntimeError):
    """The ranks of a training died again and again; its checkpoints are kept."""


@dataclass
class RankProcesses:
    """The ranks of one training.

    devices: for each rank the value of CUDA_VISIBLE_DEVICES, empty for the CPU. grace: seconds to write a
    checkpoint when they are asked to stop. limits: how long a step may take. An empty event comes where
    nothing happened for half a second.
    """

    folder: Path
    export: Path
    history: Path
    quarantine: Path
    devices: Sequence[str]
    lock: LockFile
    grace: float = 30.0
    limits: StepLimits = field(default_factory=StepLimits)
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def events(self) -> Iterator[Mapping[str, Any]]:
        """What the first rank says, until the training is finished. Ends the ranks when it is left.

        Raises TrainingError where they refuse, with their reason, RanksDiedError, and StoreAwayError
        where the images cannot be fetched.
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
                    raise TrainingError("the reason was told before")  # The caller has raised with it.
                if STORE_AWAY in codes:
                    raise StoreAwayError(f"{self._last_line()} The training's checkpoints are kept.")
                left = sum(code in (PEER_LOST, STOPPED) for code in codes)
                deaths += 1
                gone = "; ".join(
                    f"rank {number} {how_it_ended(code)}"
                    for number, code in enumerate(codes)
                    if code not in (0, PEER_LOST, STOPPED)
                )
                said = f"{gone}. {self._last_line()}".strip()
                if deaths >= _TRIES:
                    raise RanksDiedError(
                        f"The training's processes died {counted(deaths, 'times')} without a new step:"
                        f" {said} Its"
                        f" checkpoints are kept. All they wrote is in {self.folder}/rank-*.log."
                    )
                world = max(1, left)
                yield {"event": "warning", "said": f"{said} Going on with {world} of {len(codes)} ranks."}
        finally:
            self._end()

    def _listen(self, world: int) -> Iterator[Mapping[str, Any]]:
        """Start so many ranks, and give what the first one says until all have ended."""
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
                    said = pipe.read(1 << 16)
                    if not said:
                        break
                    *lines, unread = (unread + said).split(b"\n")
                    for event in map(json.loads, lines):
                        watch.take(event["event"], time.monotonic())
                        yield self._with_device(event)
                elif (still := watch.still(time.monotonic())) is not None:
                    yield self._kill_stuck(still, watch.allowed)
                    watch.take("killed", time.monotonic())
                else:
                    yield {"event": "nothing"}
                # One that has trained to the end is not lost: the first one still saves and evaluates.
                if any(one.poll() not in (None, 0) for one in self._running):
                    lost_at = lost_at or time.monotonic()
                    # Those that wait for one that is gone notice it at once; one that hangs does not.
                    if time.monotonic() - lost_at > self.grace and world > 1:
                        self._kill()
        meeting.unlink(missing_ok=True)

    def _with_device(self, event: dict[str, Any]) -> Mapping[str, Any]:
        return {**event, "device": self.devices[event["rank"]] or "cpu"} if "rank" in event else event

    def _kill_stuck(self, still: float, allowed: float) -> Mapping[str, Any]:
        """Kill the ranks that the others wait for: these go on from the last finished step without them."""
        positions = [
            Position.read(self._position(number)) if one.poll() is None else Position(doing=Doing.UNKNOWN)
            for number, one in enumerate(self._running)
        ]
        stuck = held_up_by(positions, [is_stopped(one.pid) for one in self._running])
        for number in stuck:
            self._running[number].kill()
        named = "; ".join(f"rank {number} was {positions[number].sentence()}" for number in stuck)
        said = f"No step for {still:.0f} s, where {allowed:.0f} s are allowed: {named}. It is killed."
        return self._with_device({"event": "stuck", "said": said, "rank": stuck[0]})

    def _position(self, number: int) -> Path:
        return self.folder / f"rank-{number}.at"

    def _codes(self) -> list[int]:
        """How each has ended. The first is gone: those that do not notice it in time are killed."""
        deadline = time.monotonic() + self.grace
        for one in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        return [one.wait() for one in self._running]

    def _start(self, number: int, world: int, events: int, meeting: Path) -> subprocess.Popen[bytes]:
        visible = self.devices[number]
        # Only the first one tells; a pipe that all have open would not end with it.
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
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": visible,
            "TOKENIZERS_PARALLELISM": "false",
            # The ranks are on this machine, and nobody else's business.
            "GLOO_SOCKET_IFNAME": "lo",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
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
            said = path.read_bytes()[-_LAST_WORDS:].decode(errors="replace").strip().splitlines()
            lines += said[-1:]
        return " ".join(lines)

    def _end(self) -> None:
        """Ask those that run to stop, give them the time to write a checkpoint, and kill what is left."""
        for one in self._running:
            with contextlib.suppress(ProcessLookupError):
                one.send_signal(signal.SIGTERM)
        self._codes()  # It waits for them.
        for path in self.folder.glob("rank-*.at"):  # They name properties, which may be withdrawn.
            with contextlib.suppress(OSError):
                path.unlink()

    def _kill(self) -> None:
        for one in self._running:
            if one.poll() is None:
                one.kill()
                one.wait()
