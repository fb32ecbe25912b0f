"""Power cuts on a simulated disk that keeps only what was made durable: commits, publications, recoveries.

These tests, and not lists of calls, hold each fsync and each sync of a directory.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from faults.ledger import Ledger
from faults.lives import Life, live_to_the_end, live_until_operation
from faults.lossy_disk import LossyDisk
from faults.parts import part_named
from faults.runner import run_case
from tests.support.shares import share_of

STEP = 9
CASES = 40
SHARES = 6


@pytest.fixture(scope="module")
def whole_life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A recorded life from nothing to the second published version, with nothing in its way."""
    life = live_until_operation(tmp_path_factory.mktemp("recorded") / "home", 0, recorded=True)
    assert life.finished
    return life


def assert_survive(home: Path, *lives: Life, chance: random.Random | None = None) -> None:
    """After these lives the power goes; the next life finds all that they were promised."""
    disk, ledger = LossyDisk(), Ledger(home)
    for life in lives:
        disk.apply_all(life.done)
        ledger.hear(life)
    shutil.rmtree(home, ignore_errors=True)
    disk.after_power_cut(home, chance)
    ledger.close(live_to_the_end(home))


def said_at(life: Life, *words: str) -> list[int]:
    """After how many file operations the life said one of these."""
    return [
        at for report, at in zip(life.reports, life.reported_at, strict=True) if report.keys() & set(words)
    ]


@pytest.mark.promise("A row counts as committed", "Finished work stays")
def test_a_cut_after_each_promise_takes_nothing_back(memory_path: Path, whole_life: Life) -> None:
    """Faults 4, 5: what was promised is durable at that moment, without any help from what comes later."""
    promises = said_at(whole_life, "promised", "published", "retired", "finished")
    assert len(promises) == 13
    for cut in promises:
        assert_survive(memory_path / f"cut-{cut}", whole_life.cut_at(cut))


def test_a_cut_anywhere_is_recovered_from(
    memory_path: Path, whole_life: Life, seed: int, rounds: int
) -> None:
    """Faults 4, 5: no start is confused by what else reached the disk, in whatever order."""
    for cut in share_of(range(1, len(whole_life.done), max(1, STEP // rounds)), SHARES):
        chance = random.Random(f"{seed}/{cut}")
        assert_survive(memory_path / f"cut-{cut}", whole_life.cut_at(cut), chance=chance)


def test_a_cut_while_a_journal_is_removed(memory_path: Path, whole_life: Life, seed: int) -> None:
    """Faults 4, 5: rows that were published never come back as rows that are lost."""
    (published, _), (retired, _) = said_at(whole_life, "published"), said_at(whole_life, "retired")
    for cut in share_of(range(published + 1, retired), SHARES):
        for way in range(4 if whole_life.done[cut - 1].name == "unlink" else 1):
            chance = random.Random(f"{seed}/{cut}/{way}")
            assert_survive(memory_path / f"cut-{cut}-{way}", whole_life.cut_at(cut), chance=chance)


def test_a_recovery_makes_durable_what_it_found(memory_path: Path, whole_life: Life) -> None:
    """Faults 4, 5, 6: killed between a name and its sync; the next life takes it from the page cache."""
    names = [at for at, one in enumerate(whole_life.done, start=1) if one.name in ("replace", "link")]
    assert len(names) > 40
    for at in share_of(names, SHARES):
        home = memory_path / f"killed-{at}"
        killed = live_until_operation(home, at + 1, recorded=True)
        assert killed.killed
        assert_survive(home, killed, live_until_operation(home, 0, recorded=True, commits=0))


def test_a_recovery_makes_durable_what_it_found_before_it_builds_on_it(
    memory_path: Path, whole_life: Life, rounds: int
) -> None:
    """Faults 4, 5, 6: the power goes in the recovery itself, after any of its own syncs of a folder.

    What it wrote down is durable then, and what it read in a killed process's page cache may be gone. Struck
    at each name of both retirements, and at every third of the others.
    """
    names = [at for at, one in enumerate(whole_life.done, start=1) if one.name in ("replace", "link")]
    retirements = list(zip(said_at(whole_life, "published"), said_at(whole_life, "retired"), strict=True))
    names = [
        at
        for number, at in enumerate(names)
        if number % 3 < rounds or any(begun < at <= ended for begun, ended in retirements)
    ]
    cuts = 0
    names = share_of(names, SHARES)
    for at in names:
        home = memory_path / f"killed-{at}"
        killed = live_until_operation(home, at + 1, recorded=True)
        recovery = live_until_operation(home, 0, recorded=True, commits=0)
        disk = LossyDisk()
        disk.apply_all(killed.done)
        disk.apply_all([])
        for cut, one in enumerate(recovery.done, start=1):
            changes = one.name == "fsync_directory" and one.paths[0] in disk.waiting
            disk.apply(one)
            if changes:
                cuts += 1
                assert_survive(memory_path / f"killed-{at}-cut-{cut}", killed, recovery.cut_at(cut))
    assert cuts > len(names)


def test_kills_and_cuts_in_a_row(memory_path: Path, seed: int, rounds: int) -> None:
    """Faults 2, 4, 5, 6: what a recovery takes from the page cache of a killed process, it makes durable."""
    part = part_named("power-simulated")
    cases = share_of(range(CASES * rounds), SHARES)
    cuts = sum(run_case(part, number, seed, memory_path)["power cuts"] for number in cases)
    assert cuts > len(cases)
