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

from faults.file_operations import Before, FileOperations, Operation, die, strike_at
from faults.home_life import materialize, run_command, settings_of
from faults.kills import OPERATIONS
from faults.ledger import Ledger, PromiseBrokenError
from faults.lives import Life, StoppedLife, act_in_child, live_to_the_end, live_until_operation, stop_here
from faults.old_data import Archive, Trial, archive_at, ended, trial_at
from faults.partition_life import Say, live
from vlm_catalog import catalog_copies
from vlm_catalog.catalog import Catalog
from vlm_durable.files.layout import Home
from vlm_durable.versions.partition_files import PartitionFiles

_HALF_WAY = 8
"""The step of a home's history after which two rows of the second partition are committed."""
_RANGE = 1
_WITHDRAWN = 4
"""A property of that partition."""
_INGESTED = 9
"""The step of a history that ingests two properties more."""
_INGEST_OPERATIONS = 90
_REFUSED = frozenset(
    {"FencedError", "JournalLossError", "JournalStorageError", "PartitionBusyError", "PublishedError"}
)
_OPERATIONS = 420
"""A few more than both assets of a partition take from there."""


def finished_without_it(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Another process finished both versions of the partition meanwhile, or went on with it and ended.

    Each tenth writer names a segment too late: the other has looked, and commits the same rows.
    """
    if number % 10 == 1:
        return _named_too_late(chance, place / f"stopped-{number}")
    home = place / f"stopped-{number}"
    ledger = Ledger(home, refused=_REFUSED, wakes=True)
    with StoppedLife(home, 1 + number % OPERATIONS) as writer:
        if writer.is_stopped:
            ledger.hear(writer.life_so_far())
            _take_lock(home)
            dies_at = chance.randint(1, OPERATIONS) if number % 2 == 1 else 0
            ledger.hear(live_until_operation(home, dies_at))
        reported = len(writer.life_so_far().reports)
        woken = writer.wake()
        _judge(woken, home)
    if writer.is_stopped:
        del woken.reports[:reported]
    ledger.hear_woken(woken)
    ledger.refused = frozenset()
    ledger.close(live_to_the_end(home))
    shutil.rmtree(home)
    return Counter({"stopped writers": int(writer.is_stopped), "cases": 1})


def _named_too_late(chance: random.Random, home: Path) -> Counter[str]:
    """Two starts look and commit the same rows; the first dies when its segment has its name."""
    ledger = Ledger(home, refused=_REFUSED, wakes=True)
    work = partial(live, home, commits=1)
    with StoppedLife(home, 0, work, before=_stop_then_die(2)) as writer:
        ledger.hear(writer.life_so_far())
        _take_lock(home)
        removing = strike_at(1, stop_here, only="unlink")
        with StoppedLife(home, 0, work, before=removing) as other:
            _judge(writer.wake(), home)
            ledger.hear(other.wake())
    ledger.refused = frozenset()
    ledger.close(live_to_the_end(home))
    shutil.rmtree(home)
    return Counter({"stopped writers": int(writer.is_stopped), "cases": 1})


def _stop_then_die(at: int) -> Before:
    """Stop before the ``at``-th link, and die before the operation after it."""
    links = 0

    def before(operation: Operation, operations: FileOperations) -> None:
        nonlocal links
        if links == at:
            die()
        links += operation.name == "link"
        if links == at:
            stop_here()

    return before


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
        work = "a withdrawal" if withdraws else "a prune"
        raise PromiseBrokenError(f"stopped before operation {at}, woken after {work}: {broken}") from broken
    shutil.rmtree(home)
    return Counter({"stopped writers": 1, "cases": 1})


def ingested(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """An ingest stands still, and another process ingests more."""
    archive = archive_at(place)
    with trial_at(archive, place / f"stopped-ingest-{number}", _INGESTED, start=_INGESTED - 1) as trial:
        home, listed = trial.home, archive.history.listed_after(_INGESTED)
        at = 1 + number % _INGEST_OPERATIONS
        with StoppedLife(home, at, lambda say: archive.history.take_in(home, listed - 1)) as writer:
            if writer.is_stopped:
                (Home(home).state / "ingest.lock").unlink(missing_ok=True)
                beside = act_in_child(home, lambda say: _ingest_at_once(archive, home, listed))
                if beside.error is not None and "has been writing the catalogue" not in beside.message:
                    raise PromiseBrokenError(f"beside a stopped ingest: {beside.error}: {beside.message}")
            _judge(writer.wake(), home)
        if not writer.is_stopped:
            return Counter(cases=1)
        return ended(trial, chance, "stopped writers", f"an ingest stopped before operation {at}")


def _ingest_at_once(archive: Archive, home: Path, count: int) -> None:
    # In this child alone: one that stands still while it publishes would be waited for for a minute.
    setattr(catalog_copies, "_WAIT_SECONDS", 0.2)  # noqa: B010 - in place of a constant
    archive.history.take_in(home, count)


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
