"""A writer that is stopped (SIGSTOP) and wakes after its partition went on without it. Fault table row 14.

The lock of its journal is taken from it, as by a file that is gone or a file system that gave locks up; then
another process finishes the partition, and prunes or withdraws. One that stands still in the middle of a
publication keeps the lock of that: the other is refused by name. What comes out must be as if the one that
wakes had died.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from faults.home_life import materialize, run_command, settings_of
from faults.kills import OPERATIONS
from faults.ledger import Ledger, PromiseBrokenError
from faults.lives import Life, StoppedLife, act_in_child, live_to_the_end
from faults.old_data import Archive, Trial, archive_at
from faults.partition_life import Say
from resources.publishing.partition_files import PartitionFiles
from vlm_assets.catalog.catalog import Catalog

_HALF_WAY = 8
"""The step of a home's history after which two rows of the second partition are committed."""
_RANGE = 1
_WITHDRAWN = 4
"""A property of that partition."""
_REFUSED = frozenset(
    {"FencedError", "JournalLossError", "JournalStorageError", "PartitionBusyError", "PublishedError"}
)
_OPERATIONS = 420
"""A few more than both assets of a partition take from there."""


def finished_without_it(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Another process finished both versions of the partition meanwhile."""
    home = place / f"stopped-{number}"
    ledger = Ledger(home, refused=_REFUSED, wakes=True)
    with StoppedLife(home, 1 + number % OPERATIONS) as writer:
        if writer.is_stopped:
            ledger.hear(writer.said_before())
            _take_lock(home)
            ledger.hear(live_to_the_end(home))
        said = len(writer.said_before().said)
        woken = writer.wake()
        _judge(woken, home)
    if writer.is_stopped:
        del woken.said[:said]
    ledger.hear_woken(woken)
    ledger.refused = frozenset()
    ledger.close(live_to_the_end(home))
    shutil.rmtree(home)
    return Counter({"stopped writers": int(writer.is_stopped), "cases": 1})


def pruned_or_withdrawn(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Another process finished the partition and pruned, or one of its properties was withdrawn."""
    archive = archive_at(place)
    withdraws = number % 2 == 1
    home = place / f"stopped-beside-{number}"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(archive.home(_HALF_WAY), home)
    trial = Trial(home, archive, _HALF_WAY, undisturbed=_withdrawn(archive) if withdraws else None)
    at = 1 + number // 2 * 7 % _OPERATIONS
    with StoppedLife(home, at, partial(_work, home)) as writer:
        if writer.is_stopped:
            _take_lock(home)
            _beside(archive, home, withdraws=withdraws)
        woken = writer.wake()
        _judge(woken, home)
    if not writer.is_stopped:
        shutil.rmtree(home)
        return Counter(cases=1)
    try:
        trial.finish()
    except PromiseBrokenError as broken:
        what = "a withdrawal" if withdraws else "a prune"
        raise PromiseBrokenError(f"stopped before operation {at}, woken after {what}: {broken}") from broken
    shutil.rmtree(home)
    return Counter({"stopped writers": 1, "cases": 1})


def _work(home: Path, say: Say) -> None:
    materialize(settings_of(home), Catalog.open(home).ranges[_RANGE], say)


def _beside(archive: Archive, home: Path, *, withdraws: bool) -> None:
    """What others do while the writer stands still."""

    def act(say: Say) -> None:
        # In this child alone: one that stands still in a publication would be waited for for a minute.
        setattr(PartitionFiles, "locked", _locked_at_once)  # noqa: B010 - in place of a method
        if withdraws:
            archive.history.withdraw(home, _WITHDRAWN)
        else:
            _work(home, say)
            run_command(home, say, ["prune", "--yes"])

    life = act_in_child(home, act)
    if life.error not in (None, "PartitionBusyError"):
        raise PromiseBrokenError(f"beside a stopped writer: {life.error}: {life.message} (home: {home})")


_locked = PartitionFiles.locked


def _locked_at_once(partition: PartitionFiles, wait_seconds: float) -> AbstractContextManager[None]:
    return _locked(partition, min(wait_seconds, 0.2))


def _withdrawn(archive: Archive) -> Path:
    """A home in which the property was withdrawn, and no writer was stopped; made once."""
    home = archive.folder / "withdrawn"
    if not home.exists():
        shutil.copytree(archive.home(_HALF_WAY), home)
        _beside(archive, home, withdraws=True)
    return home


def _take_lock(home: Path) -> None:
    for lock in home.rglob("writer.lock"):
        lock.unlink()


def _judge(woken: Life, home: Path) -> None:
    """The one that wakes ends by itself, or with an error of the product's own, or of the files it lost."""
    if woken.error is not None and not woken.is_ours and woken.error != "FileNotFoundError":
        raise PromiseBrokenError(f"the woken writer ended with {woken.error}: {woken.message} (home: {home})")
