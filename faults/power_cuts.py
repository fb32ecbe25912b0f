"""The power goes while a partition is written: on a simulated disk, and on loop-mounted ext4 and XFS.

Fault table rows 4 and 5. A case is one home and a chain of cuts, in recovery too: at a file operation, or at
any moment from outside. After each cut the next life is held to what was acknowledged. The real file systems
write down more than they are asked to, so only the simulated disk notices each missing sync.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from faults.file_operations import die
from faults.kills import OPERATIONS
from faults.ledger import Ledger
from faults.lives import live_to_the_end, live_until_operation, live_until_time, random_end
from faults.lossy_disk import LossyDisk
from faults.mounts import Mount

_CUTS_IN_A_ROW = 4
_LIFE_SECONDS = 0.25
# What a process may say whose disk is gone; anything else, and any acknowledgement, is a broken promise.
_STORAGE_FAILED = frozenset(
    {
        "JournalStorageError",
        "DirectoryNotWritableError",
        "SegmentUnreadableError",
        "JournalLossError",
        "RecordDamagedError",
        "FileDamagedError",
        "CannotRestoreError",
        "DurableWriteError",
        "OSError",
    }
)


def case(how: int) -> Callable[[random.Random, Mount, int], Counter[str]]:
    """A case with this mode of cut (mounts.LOG_FLUSHED, mounts.LOG_LOST)."""

    def run(chance: random.Random, mount: Mount, number: int) -> Counter[str]:
        _clear(mount)
        ledger, cuts = Ledger(mount.path / f"home-{number}", refused=_STORAGE_FAILED), 0

        def cut_and_die() -> None:
            mount.cut(how)
            die()

        for _ in range(chance.randint(1, _CUTS_IN_A_ROW)):
            if chance.random() < 0.75:
                life = live_until_operation(ledger.home, strike=cut_and_die, **random_end(chance, OPERATIONS))
                struck = life.killed
            else:
                moment = chance.uniform(0.0, _LIFE_SECONDS)
                life = live_until_time(ledger.home, moment, strike=lambda: mount.cut(how))
                struck = not life.finished
            cuts += struck
            mount.again()
            ledger.hear(life)
        ledger.refused = frozenset()
        ledger.close(live_to_the_end(ledger.home))
        return Counter({"power cuts": cuts, "cases": 1})

    return run


def simulated(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Kills and power cuts in a row on a disk that keeps only what was made durable, and some of the rest."""
    ledger, cuts = Ledger(place / f"simulated-{number}"), 0
    disk = LossyDisk()
    for _ in range(chance.randint(1, _CUTS_IN_A_ROW)):
        life = live_until_operation(ledger.home, recorded=True, **random_end(chance, OPERATIONS))
        disk.apply_all(life.done)
        if chance.random() < 0.7:
            cuts += 1
            shutil.rmtree(ledger.home, ignore_errors=True)
            disk.after_power_cut(ledger.home, chance if chance.random() < 0.8 else None)
            disk = LossyDisk.holding(ledger.home)
        ledger.hear(life)
    ledger.close(live_to_the_end(ledger.home))
    shutil.rmtree(ledger.home)
    return Counter({"power cuts": cuts, "cases": 1})


def _clear(mount: Mount) -> None:
    """Homes of cases before: a cut may have brought them back."""
    for home in mount.path.glob("home-*"):
        shutil.rmtree(home)
