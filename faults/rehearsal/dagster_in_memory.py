"""Dagster's facts from memory, on a clock that is moved by hand: runs, events and results of checks.

``DagsterFacts`` says what the methods mean.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus

from resources.dagster_names import UNPREFIXED
from sensors.dagster_internals.events import CheckEvaluation, DagsterFacts, MaterializationEvent
from sensors.dagster_internals.runs import FINISHED, LaunchedBackfill, RunState
from vlm_durable.markdown_text import plain

INTERRUPTED = {"dagster/failure_reason": "UNEXPECTED_TERMINATION"}
"""What Dagster says of a run that was ended from outside."""


class SimulatedClock:
    """Seconds that stand still until they are moved."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The second that it is."""
        return self.now


class DagsterInMemory(DagsterFacts):
    """``DagsterFacts`` without an instance: what a simulation asks and tells."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock, self.names = clock, UNPREFIXED
        self.runs: dict[str, RunState] = {}
        self.run_configs: dict[str, Mapping[str, Any]] = {}
        self.processes: dict[str, tuple[int, float]] = {}
        self.awaited: set[str] = set()
        self.backfills: list[LaunchedBackfill] = []
        self.pools: dict[str, int] = {}
        self.held: set[str] = set()
        self.events: dict[str, list[MaterializationEvent]] = {}
        self.evaluations: list[CheckEvaluation] = []
        self._unfinished: dict[str, None] = {}
        self._changed: dict[str, float] = {}
        self._canceling: dict[str, float] = {}
        self._run_numbers, self._ids = itertools.count(1), itertools.count(1)

    def launch(
        self,
        partition: str,
        assets: Sequence[str],
        status: DagsterRunStatus = DagsterRunStatus.STARTED,
        **tags: str,
    ) -> str:
        """Create a run of these assets' partition; gives its id."""
        run_id = f"run-{next(self._run_numbers)}"
        tags = {"dagster/partition": partition, **tags}
        self.runs[run_id] = RunState(run_id, status, self.clock(), None, tags)
        self._changed[run_id] = self.clock()
        self._unfinished[run_id] = None
        for asset in assets:
            planned = MaterializationEvent(partition, run_id, next(self._ids), is_done=False)
            self.events.setdefault(asset, []).append(planned)
        return run_id

    def change(self, run_id: str, status: DagsterRunStatus, **tags: str) -> None:
        """Let a run go to another state."""
        run = self.runs[run_id]
        ended = self.clock() if status in FINISHED else None
        self.runs[run_id] = replace(run, status=status, ended_at=ended, tags={**run.tags, **tags})
        self._changed[run_id] = self.clock()
        if status is DagsterRunStatus.CANCELING:
            self._canceling[run_id] = self.clock()
        if ended is not None:
            self._unfinished.pop(run_id, None)

    def materialize(self, asset: str, partition: str, run_id: str = "") -> None:
        """Say that a partition was materialized."""
        done = MaterializationEvent(partition, run_id, next(self._ids), is_done=True)
        self.events.setdefault(asset, []).append(done)

    def run_states(self, run_ids: Collection[str]) -> dict[str, RunState]:
        """Runs by id."""
        return {run_id: self.runs[run_id] for run_id in run_ids if run_id in self.runs}

    def runs_with_key(self, run_keys: Collection[str]) -> dict[str, RunState]:
        """Runs by run key."""
        if not run_keys:
            return {}
        return {run.run_key: run for run in self.runs.values() if run.run_key and run.run_key in run_keys}

    def latest_runs(self, partitions: Collection[str]) -> dict[str, RunState]:
        """The newest run of each partition."""
        runs = self.runs.values()
        return {run.partition: run for run in runs if run.partition and run.partition in partitions}

    def runs_in(self, statuses: Collection[DagsterRunStatus]) -> list[RunState]:
        """Runs in one of these states."""
        among = self.runs if FINISHED.intersection(statuses) else self._unfinished
        return [self.runs[run_id] for run_id in among if self.runs[run_id].status in statuses]

    def runs_ended_since(self, since: float, statuses: Collection[DagsterRunStatus]) -> list[RunState]:
        """Runs in one of these states that changed since."""
        changed = [run_id for run_id, at in self._changed.items() if at >= since]
        return [
            self.runs[run_id]
            for run_id in changed
            if run_id in self.runs and self.runs[run_id].status in statuses
        ]

    def runs_created_since(self, since: float) -> list[RunState]:
        """Runs that were created since."""
        return [run for run in self.runs.values() if run.created_at >= since]

    def awaited_partitions(self, assets: Sequence[str]) -> set[str]:
        """Those that somebody put into ``awaited``."""
        return set(self.awaited)

    def unfinished_backfills(self, assets: Sequence[str]) -> list[LaunchedBackfill]:
        """Those of ``backfills`` that are unfinished."""
        return [backfill for backfill in self.backfills if backfill.unfinished]

    def backfill(self, backfill_id: str) -> LaunchedBackfill | None:
        """One of ``backfills``."""
        return next((backfill for backfill in self.backfills if backfill.id == backfill_id), None)

    def run_config(self, run_id: str) -> tuple[Mapping[str, Any], str] | None:
        """What somebody put into ``asked``."""
        return (self.run_configs.get(run_id, {}), run_id) if run_id in self.runs else None

    def selections(self, run_ids: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
        """The assets that were planned by each run."""
        known_ids = [event for event in run_ids if event in self.runs]
        assets_of = {
            run_id: sorted(
                asset
                for asset, events in self.events.items()
                if any(event.run_id == run_id for event in events)
            )
            for run_id in known_ids
        }
        return {run_id: ("job", assets) for run_id, assets in assets_of.items()}

    def error_of(self, run_id: str) -> str | None:
        """A sentence."""
        return "It failed."

    def cancel_requested_at(self, run_id: str) -> float | None:
        """When it went to CANCELING."""
        return self._canceling.get(run_id)

    def succeeded_at(self, job: str) -> float | None:
        """None: there are no such jobs."""
        return None

    def process_of(self, run_id: str) -> tuple[int, float] | None:
        """What somebody put into ``processes``."""
        return self.processes.get(run_id)

    def delete_run(self, run_id: str) -> None:
        """Forget a run."""
        del self.runs[run_id]
        self._unfinished.pop(run_id, None)

    def mark_interrupted(self, run_id: str) -> None:
        """Tag a run that has started."""
        run = self.runs.get(run_id)
        if run is not None and run.status in (DagsterRunStatus.STARTING, DagsterRunStatus.STARTED):
            self.change(run_id, run.status, **INTERRUPTED)

    def report_end(self, run_id: str, why: str) -> bool:
        """End a run as failed, or as cancelled."""
        if self.runs[run_id].finished:
            return False
        if not self.end_cancelled(run_id, why):
            self.change(run_id, DagsterRunStatus.FAILURE)
        return True

    def free_slots(self, run_id: str) -> None:
        """Free what a run holds."""
        self.held.discard(run_id)

    def end_cancelled(self, run_id: str, why: str) -> bool:
        """End a run that is being cancelled."""
        if run_id not in self.runs or self.runs[run_id].status is not DagsterRunStatus.CANCELING:
            return False
        self.change(run_id, DagsterRunStatus.CANCELED)
        return True

    def job_has_ended(self, job: str) -> bool:
        """There is no Ray."""
        return False

    def stop_launcher_job(self, job: str) -> None:
        """There is no Ray."""

    def free_slots_of_ended(self) -> list[str]:
        """Free what ended runs hold."""
        freed = sorted(
            run_id for run_id in self.held if run_id not in self.runs or self.runs[run_id].finished
        )
        self.held -= set(freed)
        return freed

    def fit_pool(self, pool: str, *, previous: int, slots: int) -> None:
        """Note a pool's limit."""
        self.pools[pool] = slots

    def newest_event(self) -> int:
        """The id of the latest event."""
        latest = [events[-1].storage_id for events in self.events.values() if events]
        return max([0, *latest, self.newest_evaluation()])

    def newest_evaluation(self) -> int:
        """The id of the latest result of a check."""
        return self.evaluations[-1].storage_id if self.evaluations else 0

    def materializations_since(self, asset: str, cursor: int) -> list[MaterializationEvent]:
        """Events of an asset, after an id."""
        events = self.events.get(asset, [])
        return events[bisect_right(events, cursor, key=lambda event: event.storage_id) :]

    def latest_materialization(self, asset: str) -> tuple[float, Mapping[str, str]] | None:
        """None: assets without partitions are not materialized here."""
        return None

    def materialized_partitions(self, asset: str) -> Collection[str]:
        """Those of which an event says so."""
        return {event.partition for event in self.events.get(asset, []) if event.is_done}

    def latest_results(
        self, assets: Sequence[str] | None = None, *, passed: bool = False
    ) -> Iterator[CheckEvaluation]:
        """The latest result of every check and partition, of these assets or of all."""
        latest = {
            (evaluation.asset, evaluation.check, evaluation.partition): evaluation
            for evaluation in self.evaluations
        }
        chosen = (
            evaluation for evaluation in latest.values() if assets is None or evaluation.asset in assets
        )
        return (evaluation for evaluation in chosen if passed or not evaluation.passed)

    def evaluations_since(self, cursor: int, *, look_back: int = 0) -> tuple[list[CheckEvaluation], int]:
        """Results after an id, and where to go on."""
        first = bisect_right(
            self.evaluations, cursor - look_back, key=lambda evaluation: evaluation.storage_id
        )
        evaluations = self.evaluations[first:]
        return evaluations, max([cursor, *(evaluation.storage_id for evaluation in evaluations)])

    def restore_results(self, run_ids: Collection[str]) -> list[tuple[str, str, str]]:
        """Nothing: no run here plans checks."""
        return []

    def report_evaluation(self, evaluation: dg.AssetCheckEvaluation) -> None:
        """Take note of a result."""
        metadata = {name: str(value.value) for name, value in evaluation.metadata.items()}
        self.evaluations.append(
            CheckEvaluation(
                asset=evaluation.asset_key.to_user_string(),
                check=evaluation.check_name,
                partition=evaluation.partition,
                passed=evaluation.passed,
                severity="WARN" if evaluation.severity is dg.AssetCheckSeverity.WARN else "ERROR",
                description=plain(evaluation.description or ""),
                metadata=metadata,
                run_id="",
                at=self.clock(),
                storage_id=next(self._ids),
            )
        )

    def report_materialization(self, materialization: dg.AssetMaterialization) -> None:
        """Take note of a materialization."""
        if materialization.partition is not None:
            self.materialize(materialization.asset_key.to_user_string(), materialization.partition)
