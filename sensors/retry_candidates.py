"""Which partitions are not as they should be, from what Dagster and the disk say of them.

What lives here: the union of failed materializations, failed checks, interrupted work and missing files, and
what is being worked on. What does not: what is done about each (``retry_decision.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import dagster as dg

from sensors.dagster_internals.runs import RunState
from sensors.partition_history import PartitionHistory


@dataclass(frozen=True)
class Watched:
    """The assets that are watched, upstream first, and what is asked about them.

    keys: their partitions. interrupted: of an asset, the partitions with work on disk that is not published.
    missing: of an asset and the partitions that should be published, those without a file. rows: committed
    for a partition, ever. is_stale: whether what is published of an asset's partition was made under other
    settings. working: partitions that a living process works on. heaviest_first: in which order to try.
    """

    assets: tuple[str, ...]
    keys: frozenset[str]
    interrupted: Callable[[str], Collection[str]]
    missing: Callable[[str, Collection[str]], Collection[str]]
    rows: Callable[[str], int]
    is_stale: Callable[[str, str], bool]
    working: Callable[[], Collection[str]]
    heaviest_first: Callable[[Collection[str]], Sequence[str]]


@dataclass
class Candidate:
    """A partition that is not as it should be. first: the first of the assets that is not.

    runs: finished ones that were to put it right.
    only_file: nothing was launched for it since it was published; only its file is not what it should be.
    """

    first: int
    why: list[str] = field(default_factory=list)
    runs: list[RunState] = field(default_factory=list)
    only_file: bool = True


@dataclass
class Candidates:
    """Partitions by key. busy: those that something works on, or will; they are left alone."""

    found: dict[str, Candidate] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)


def candidates(
    watched: Watched,
    history: PartitionHistory,
    states: Callable[[Collection[str]], Mapping[str, RunState]],
    launching: Collection[str],
) -> Candidates:
    """What is not as it should be. states: runs by id. launching: partitions that the ledger is launching."""
    result = Candidates(busy=set(watched.working()))
    for index, asset in enumerate(watched.assets):
        for key, why, run in _not_materialized(history, asset, states, launching, result.busy):
            one = _add(result, watched, key, index, why)
            if one is not None:
                one.only_file = False
                one.runs += [run] if run is not None else []
        for key, evaluations in history.failing(asset).items():
            why = f"{asset}: check failed: {', '.join(each.check for each in evaluations)}"
            _add(result, watched, key, index, why)
        attempts = history.open_attempts[asset]
        for key in watched.interrupted(asset):
            if key not in attempts:
                one = _add(result, watched, key, index, f"{asset}: interrupted")
                if one is not None:
                    one.only_file = False
        published = [key for key in history.materialized[asset] if key not in attempts]
        for key in watched.missing(asset, published):
            _add(result, watched, key, index, f"{asset}: its file is missing")
    return result


def _add(result: Candidates, watched: Watched, key: str, index: int, why: str) -> Candidate | None:
    if key not in watched.keys:
        return None
    one = result.found.setdefault(key, Candidate(index))
    one.why.append(why)
    return one


def _not_materialized(
    history: PartitionHistory,
    asset: str,
    states: Callable[[Collection[str]], Mapping[str, RunState]],
    launching: Collection[str],
    busy: set[str],
) -> Iterator[tuple[str, str, RunState | None]]:
    """Partitions whose latest run ended without materializing them: key, why, run. Fills ``busy``."""
    attempts = history.open_attempts[asset]
    known = states([one.run_id for one in attempts.values()])
    for key, attempt in list(attempts.items()):
        run = known.get(attempt.run_id)
        if run is None:
            # Deleted: forgotten here too, for what is on disk still tells.
            del attempts[key]
            continue
        if run.status is dg.DagsterRunStatus.NOT_STARTED and key in launching:
            yield key, f"{asset}: its launch was cut short", None
        elif not run.finished:
            busy.add(key)
        elif run.status is dg.DagsterRunStatus.FAILURE or run.interrupted_by is not None:
            how = "was interrupted" if run.interrupted_by else "failed"
            yield key, f"{asset}: run {run.run_id[:8]} {how}", run
