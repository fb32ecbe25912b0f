"""SIGKILL at every file operation, at random ones, and at any moment; second kills during recovery included.

Each case is one home: it is killed, started again, killed again, and in the end let finish. Fault table
rows 1, 2 and 6.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

from faults.ledger import Ledger
from faults.lives import Life, live_to_the_end, live_until_operation, live_until_time, random_end

OPERATIONS = 610
"""A few more than a whole life takes, measured by tests/faults/test_campaign.py."""
RECOVERY_OPERATIONS = 30


def swept(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """The first kill goes through every operation in turn, the second through those of the recovery."""
    home = place / f"swept-{number}"
    ledger, kills = Ledger(home), 0
    torn = number % 2 == 1
    life = ledger.hear(live_until_operation(home, 1 + number % OPERATIONS, torn=torn))
    kills += life.killed
    if life.killed:
        second = live_until_operation(home, 1 + number // OPERATIONS % RECOVERY_OPERATIONS, torn=torn)
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
