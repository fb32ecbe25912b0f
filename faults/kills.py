"""SIGKILL at every file operation, at random ones, and at any moment; second kills during recovery included.

Each case is one home: it is killed, started again, killed again, and in the end let finish. Fault table
rows 1, 2 and 6.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

from faults.file_operations import Before, FileOperations, Operation, die
from faults.ledger import Ledger
from faults.lives import (
    Life,
    act_in_child,
    live_to_the_end,
    live_until_operation,
    live_until_time,
    random_end,
)
from faults.partition_life import KEY, asset, live
from vlm_durable.versions.version_mark import mark_copies

OPERATIONS = 610
"""A few more than a whole life takes, measured by tests/faults/test_campaign.py."""
RECOVERY_OPERATIONS = 30


def swept(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """The first kill goes through every operation in turn, the second through those of the recovery."""
    home = place / f"swept-{number}"
    ledger, kills = Ledger(home), 0
    lap, at = divmod(number, OPERATIONS)
    torn = (at + lap) % 2 == 1  # Each operation is met whole in one lap, and torn in the next.
    life = ledger.hear(live_until_operation(home, 1 + at, torn=torn))
    kills += life.killed
    if life.killed:
        second = live_until_operation(home, 1 + (at // 2 + lap) % RECOVERY_OPERATIONS, torn=torn)
        kills += ledger.hear(second).killed
    return _finished(ledger, kills)


def at_random(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Kills in a row at random operations, until a life gets through."""
    home = place / f"random-{number}"
    ledger, kills = Ledger(home), 0
    while ledger.hear(live_until_operation(home, **random_end(chance, OPERATIONS))).killed:
        kills += 1
    return _finished(ledger, kills)


def at_any_moment(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Kills from outside at any moment, between two file operations or inside one, until one gets through.

    The moments are drawn from the seed, but what the process is doing then is not: a failure replays as a
    case, not as the same instruction.
    """
    home = place / f"moment-{number}"
    ledger, kills, whole = Ledger(home), 0, _typical_seconds(place)
    while ledger.hear(live_until_time(home, chance.uniform(0.0, chance.choice((0.2, 1.0)) * whole))).killed:
        kills += 1
    return _finished(ledger, kills)


def then_struck(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """A kill at any operation, and then one file of the publication is gone, damaged or cut off.

    Each tenth is killed when the second copy is in place, and loses the published file and its marks.
    """
    home = place / f"then-struck-{number}"
    ledger = Ledger(home, unread=True)
    paths = asset(home).partition(KEY)
    if number % 10 == 0:
        life = act_in_child(
            home, partial(live, home), _die_after(paths.version(0).name, chance.randint(1, 2))
        )
        ledger.hear(life)
        for path in (paths.published, *mark_copies(paths.version_mark)):
            path.unlink()
        return _finished(ledger, int(life.killed))
    life = ledger.hear(live_until_operation(home, chance.randint(1, OPERATIONS), torn=number % 2 == 1))
    files = [paths.published, paths.version(0)]
    for copies in ((paths.record, paths.record_copy), mark_copies(paths.version_mark)):
        if all(copy.exists() for copy in copies):  # The first of all is written before its copy.
            files += copies
    standing = [path for path in files if path.exists()]
    if standing:
        path = chance.choice(standing)
        data = path.read_bytes()
        middle = len(data) // 2
        path.write_bytes(chance.choice((data[:middle], data[:middle] + b"damage" + data[middle + 6 :])))
        if chance.random() < 0.5:
            path.unlink()
    return _finished(ledger, int(life.killed and bool(standing)))


def _die_after(name: str, at: int) -> Before:
    """Die before the first operation after the ``at``-th file was renamed to this name."""
    named = 0

    def before(operation: Operation, operations: FileOperations) -> None:
        nonlocal named
        last = operations.log[-1] if operations.log else None
        named += last is not None and last.name == "replace" and last.paths[1].endswith(f"/{name}")
        if named == at:
            die()

    return before


def _finished(ledger: Ledger, kills: int) -> Counter[str]:
    ledger.close(live_to_the_end(ledger.home))
    shutil.rmtree(ledger.home)
    return Counter(kills=kills, cases=1)


_seconds: list[float] = []


def _typical_seconds(place: Path) -> float:
    """How long a whole life takes here, measured once."""
    if not _seconds:
        home = place / "typical"
        life: Life = live_to_the_end(home)
        shutil.rmtree(home)
        _seconds.append(life.seconds)
    return _seconds[0]
