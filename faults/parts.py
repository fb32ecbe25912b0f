"""The parts of the campaign: what each promises, how often it runs, and what it needs.

What lives here: the list. What does not: a part's cases (kills.py, flips.py, old_data.py and others) and
running them (runner.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faults import (
    care_killed,
    failing_calls,
    flips,
    full_disks,
    joined_sets,
    kills,
    old_data,
    power_cuts,
    several_files,
    state_copies,
    stopped_writers,
    stored,
    stored_models,
    trained_models,
)
from faults.mounts import LOG_FLUSHED, LOG_LOST

Case = Callable[[random.Random, Any, int], Counter[str]]


@dataclass(frozen=True)
class Part:
    """``unit`` is what is counted towards ``target``. ``mount``: file system it needs of its own, as root.

    server: whether it needs a real S3 server.
    """

    name: str
    rows: str
    promise: str
    unit: str
    target: int
    case: Case
    mount: str | None = None
    server: bool = False


# A quiet core takes the whole in about an hour. A case of a whole home costs half a second of it, so there
# are some ten for each kind of file; a case of one partition costs a tenth of a second, and one of Dagster's
# runs half of one each.
PARTS = (
    Part("kills-swept", "1, 6", "killed at every operation, and again in recovery: committed rows exact",
         "kills", 3000, kills.swept),
    Part("kills-random", "1, 2, 6", "killed at random operations, in a row: committed rows exact",
         "kills", 4000, kills.at_random),
    Part("kills-any-moment", "2", "killed from outside at any moment, in a row: committed rows exact",
         "kills", 4000, kills.at_any_moment),
    Part("kills-then-struck", "1, 13", "killed, and one file of the publication lost: the other copy serves",
         "kills", 600, kills.then_struck),
    Part("flips", "10, 11, 13", "a flipped bit in any file is found, and nothing else is taken for it",
         "flips", 12000, flips.anywhere),
    Part("journal-files", "11, 12", "files of a journal struck together: all its rows, or the loss is named",
         "strikes", 6000, flips.several),
    Part("power-simulated", "4, 5", "power cut on a disk that keeps what it must and no more: rows exact",
         "power cuts", 3000, power_cuts.simulated),
    Part("failing-recovery", "6, 7, 8", "EIO or ENOSPC at an operation of a recovery: named, rows exact",
         "failed calls", 600, failing_calls.in_recovery),
    Part("failing-reads", "8", "EIO or a wrong bit at a reading, once: named, rows exact",
         "failed calls", 400, failing_calls.reading_in_recovery),
    Part("no-memory", "27", "no memory at any operation of a life: named, committed rows exact",
         "failed calls", 1000, failing_calls.out_of_memory),
    Part("stopped-writer", "14", "a writer wakes after others finished its partition: rows exact",
         "stopped writers", 500, stopped_writers.finished_without_it),
    Part("stopped-beside-care", "14", "a writer wakes after prune or withdraw: as if it had died",
         "stopped writers", 100, stopped_writers.pruned_or_withdrawn),
    Part("stopped-ingest", "14", "an ingest wakes after another ingested more: as if it had died",
         "stopped writers", 60, stopped_writers.ingested),
    Part("old-files", "24", "older valid files put back: the same end, or a true sentence and its command",
         "old files", 300, old_data.put_back),
    Part("exchanged-files", "25", "files exchanged between partitions, assets, generations, homes: the same",
         "exchanges", 200, old_data.exchange),
    Part("sectors", "26", "4 KiB zeroed, or exchanged within and between files: the same",
         "sectors", 200, old_data.sectors),
    Part("several-files", "29", "files of a catalogue or a partition struck together: the same",
         "strikes", 200, several_files.struck),
    Part("failing-repairs", "30", "EIO or ENOSPC while a catalogue is put right or ingested: the same",
         "failed calls", 120, several_files.failing),
    Part("care-killed", "28", "prune, repair, withdraw, export killed at any operation: done again, the same",
         "kills", 240, care_killed.killed),
    Part("trained-models", "24, 28", "a model killed or put back: the newest counts, or a sentence names it",
         "strikes", 300, trained_models.struck),
    Part("joined-sets", "32", "two sets of a run killed or failing: rows of both exact, each published",
         "strikes", 160, joined_sets.in_memory),
    Part("state-copies", "33", "the control state killed, damaged, gone or old: copied changes or a pause",
         "strikes", 200, state_copies.struck),
    Part("stored-partitions", "22, 23", "machines over a store, killed, lost, overtaken, objects gone: exact",
         "strikes", 80, stored.struck, server=True),
    Part("stored-models", "22, 23", "models over a store, killed, lost, overtaken, objects gone: the newest",
         "strikes", 40, stored_models.struck, server=True),
    Part("power-ext4-log-flushed", "4", "power cut, log flushed: committed rows exact",
         "power cuts", 300, power_cuts.case(LOG_FLUSHED), "ext4"),
    Part("power-ext4-log-lost", "5", "power cut, log lost: committed rows exact",
         "power cuts", 300, power_cuts.case(LOG_LOST), "ext4"),
    Part("power-xfs-log-flushed", "4", "power cut, log flushed: committed rows exact",
         "power cuts", 300, power_cuts.case(LOG_FLUSHED), "xfs"),
    Part("power-xfs-log-lost", "5", "power cut, log lost: committed rows exact",
         "power cuts", 300, power_cuts.case(LOG_LOST), "xfs"),
    Part("full-ext4", "7", "a disk really full: named, nothing lost, goes on when there is room",
         "full disks", 100, full_disks.full, "ext4"),
    Part("full-xfs", "7", "a disk really full: named, nothing lost, goes on when there is room",
         "full disks", 100, full_disks.full, "xfs"),
    Part("full-tmpfs", "7", "a memory file system really full: the same",
         "full disks", 100, full_disks.full, "tmpfs"),
    Part("read-only-ext4", "8", "remounted read-only: named, nothing lost, goes on when writable",
         "read-only file systems", 50, full_disks.read_only, "ext4"),
    Part("read-only-xfs", "8", "remounted read-only: named, nothing lost, goes on when writable",
         "read-only file systems", 50, full_disks.read_only, "xfs"),
    Part("joined-sets-ext4", "32", "power cut, or a disk really full, under two sets of a run: the same",
         "strikes", 80, joined_sets.on_a_disk, "ext4"),
)  # fmt: skip


def part_named(name: str) -> Part:
    """The part of this name. Raises KeyError, which lists all names."""
    for part in PARTS:
        if part.name == name:
            return part
    raise KeyError(f"no part is called {name!r}; there are {', '.join(part.name for part in PARTS)}")
