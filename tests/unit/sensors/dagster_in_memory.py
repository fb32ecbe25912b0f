"""Dagster's facts from memory, on a clock that is moved by hand: runs, events and results of checks."""

import itertools
from dataclasses import replace

import dagster as dg

from sensors.dagster_internals.events import CheckEvaluation, MaterializationEvent
from sensors.dagster_internals.runs import FINISHED, RunState

INTERRUPTED = {"dagster/failure_reason": "UNEXPECTED_TERMINATION"}


class Clock:
    """Seconds that stand still until they are moved."""

    def __init__(self, now=1_000_000.0):
        self.now = now

    def __call__(self):
        return self.now


class DagsterInMemory:
    """``DagsterFacts`` without Dagster: what a simulation asks and tells."""

    def __init__(self, clock):
        self.clock = clock
        self.runs: dict[str, RunState] = {}
        self.asked = {}
        self.processes = {}
        self.awaited = set()
        self.pools = {}
        self.held = set()
        self.events: list[tuple[str, MaterializationEvent]] = []
        self.evaluations: list[CheckEvaluation] = []
        self._changed = {}
        self._run_numbers, self._ids = itertools.count(1), itertools.count(1)

    def launch(self, partition, assets, status=dg.DagsterRunStatus.STARTED, **tags):
        """Create a run of these assets' partition; gives its id."""
        run_id = f"run-{next(self._run_numbers)}"
        tags = {"dagster/partition": partition, **tags}
        self.runs[run_id] = RunState(run_id, status, self.clock(), None, tags)
        self._changed[run_id] = self.clock()
        for asset in assets:
            planned = MaterializationEvent(partition, run_id, next(self._ids), is_done=False)
            self.events.append((asset, planned))
        return run_id

    def change(self, run_id, status, **tags):
        """Let a run go to another state."""
        run = self.runs[run_id]
        ended = self.clock() if status in FINISHED else None
        self.runs[run_id] = replace(run, status=status, ended_at=ended, tags={**run.tags, **tags})
        self._changed[run_id] = self.clock()

    def materialize(self, asset, partition, run_id=""):
        """Say that a partition was materialized."""
        self.events.append((asset, MaterializationEvent(partition, run_id, next(self._ids), is_done=True)))

    def run_states(self, run_ids):
        return {one: self.runs[one] for one in run_ids if one in self.runs}

    def runs_with_key(self, run_keys):
        return {run.run_key: run for run in self.runs.values() if run.run_key in run_keys}

    def runs_in(self, statuses):
        return [run for run in self.runs.values() if run.status in statuses]

    def runs_ended_since(self, since, statuses):
        return [run for run in self.runs_in(statuses) if self._changed[run.run_id] >= since]

    def runs_created_since(self, since):
        return [run for run in self.runs.values() if run.created_at >= since]

    def awaited_partitions(self, assets):
        return set(self.awaited)

    def run_config(self, run_id):
        return (self.asked.get(run_id, {}), run_id) if run_id in self.runs else None

    def selections(self, run_ids):
        of = {run_id: [] for run_id in run_ids if run_id in self.runs}
        for asset, one in self.events:
            of.get(one.run_id, []).append(asset)
        return {run_id: ("job", sorted(set(assets))) for run_id, assets in of.items()}

    def error_of(self, run_id):
        return "It failed."

    def succeeded_at(self, job):
        return None

    def process_of(self, run_id):
        return self.processes.get(run_id)

    def delete_run(self, run_id):
        del self.runs[run_id]

    def mark_interrupted(self, run_id):
        run = self.runs.get(run_id)
        if run is not None and run.status is dg.DagsterRunStatus.STARTED:
            self.change(run_id, run.status, **INTERRUPTED)

    def end_interrupted(self, run_id, why):
        if self.runs[run_id].finished:
            return False
        if not self.end_cancelled(run_id, why):
            self.change(run_id, dg.DagsterRunStatus.FAILURE, **INTERRUPTED)
        self.held.discard(run_id)
        return True

    def end_cancelled(self, run_id, why):
        if run_id not in self.runs or self.runs[run_id].status is not dg.DagsterRunStatus.CANCELING:
            return False
        self.change(run_id, dg.DagsterRunStatus.CANCELED)
        return True

    def free_slots_of_ended(self):
        freed = sorted(one for one in self.held if one not in self.runs or self.runs[one].finished)
        self.held -= set(freed)
        return freed

    def fit_pool(self, pool, *, before, now):
        self.pools[pool] = now

    def newest_event(self):
        return max([0, *(one.storage_id for _, one in self.events), self.newest_evaluation()])

    def newest_evaluation(self):
        return max([0, *(one.storage_id for one in self.evaluations)])

    def materializations_since(self, asset, cursor):
        return [one for name, one in self.events if name == asset and one.storage_id > cursor]

    def latest_materialization(self, asset):
        return None

    def materialized_partitions(self, asset):
        return {one.partition for name, one in self.events if name == asset and one.is_done}

    def latest_failures(self, assets):
        latest = {(one.asset, one.check, one.partition): one for one in self.evaluations}
        return (one for one in latest.values() if one.asset in assets and not one.passed)

    def evaluations_since(self, cursor, *, look_back=0, limit=1000):
        found = [one for one in self.evaluations if one.storage_id > cursor - look_back][:limit]
        return found, max([cursor, *(one.storage_id for one in found)])

    def restore_results(self, run_ids):
        return []

    def report_evaluation(self, found):
        metadata = {name: str(value.value) for name, value in found.metadata.items()}
        asset, severity = found.asset_key.to_user_string(), found.severity.value
        told = (asset, found.check_name, found.partition, found.passed, severity, found.description or "")
        self.evaluations.append(CheckEvaluation(*told, metadata, "", self.clock(), next(self._ids)))

    def report_materialization(self, found):
        self.materialize(found.asset_key.to_user_string(), found.partition)
