"""The state of the partitions of assets: attempts, materializations and failed checks, kept between reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sensors.dagster_internals.events import CheckEvaluation, DagsterFacts, MaterializationEvent
    from sensors.dagster_internals.runs import RunState

LOOK_BACK = 200
"""So many events are read again each time: on Postgres a lower id may become visible after a higher one."""


class PartitionHistory:
    """The state of the partitions of some assets, kept so that an update reads only new events.

    open_attempts: the latest attempt after which the partition was not materialized (yet). materialized: the
    storage id of the latest materialization. Both by asset and then by partition. A failed evaluation stands
    until its check is evaluated again, or the partition is materialized again.
    """

    def __init__(self, assets: Sequence[str]) -> None:
        self.assets = tuple(assets)
        self._forget()

    def _forget(self) -> None:
        self.open_attempts: dict[str, dict[str, MaterializationEvent]] = {asset: {} for asset in self.assets}
        self.materialized: dict[str, dict[str, int]] = {asset: {} for asset in self.assets}
        self._latest: dict[str, dict[tuple[str, str], CheckEvaluation]] = {asset: {} for asset in self.assets}
        self._until = 0

    def update(self, dagster: DagsterFacts) -> None:
        """Read new events. A database that is younger than the last update is read from its start."""
        newest = dagster.newest_event()
        if newest < self._until:
            self._forget()
        if self._until == newest:
            return
        for asset in self.assets:
            self._read_attempts(dagster, asset)
        evaluations: Iterable[CheckEvaluation] = dagster.latest_results(self.assets)
        if self._until:
            evaluations, _ = dagster.evaluations_since(self._until, look_back=LOOK_BACK)
        for evaluation in evaluations:
            self._note_evaluation(evaluation)
        self._until = newest

    def open_runs(self, dagster: DagsterFacts, keys: Collection[str]) -> list[tuple[str, RunState]]:
        """The last run of each of these partitions, with its key, if it has not materialized its asset."""
        attempts = [
            attempt
            for of_asset in self.open_attempts.values()
            for attempt in of_asset.values()
            if attempt.partition in keys
        ]
        runs = dagster.run_states({attempt.run_id for attempt in attempts})
        return [(attempt.partition, runs[attempt.run_id]) for attempt in attempts if attempt.run_id in runs]

    def failing(self, asset: str) -> dict[str, list[CheckEvaluation]]:
        """Standing evaluations that stop a partition, by partition."""
        standing: dict[str, list[CheckEvaluation]] = {}
        materialized = self.materialized[asset]
        for (partition, _), evaluation in self._latest[asset].items():
            if evaluation.stops and evaluation.storage_id > materialized.get(partition, 0):
                standing.setdefault(partition, []).append(evaluation)
        return standing

    def _note_evaluation(self, evaluation: CheckEvaluation) -> None:
        if evaluation.asset not in self._latest or evaluation.partition is None:
            return
        latest = self._latest[evaluation.asset]
        check = (evaluation.partition, evaluation.check)
        before = latest.get(check)
        if before is not None and before.storage_id > evaluation.storage_id:
            return
        # Only evaluations that stop a partition are kept.
        if evaluation.stops:
            latest[check] = evaluation
        else:
            latest.pop(check, None)

    def _read_attempts(self, dagster: DagsterFacts, asset: str) -> None:
        attempts, materialized = self.open_attempts[asset], self.materialized[asset]
        for event in dagster.materializations_since(asset, self._until - LOOK_BACK):
            if event.is_done:
                materialized[event.partition] = event.storage_id
                attempts.pop(event.partition, None)
            else:
                attempts[event.partition] = event
