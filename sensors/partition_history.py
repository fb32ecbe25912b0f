"""How the partitions of assets stand: attempts, materializations and failed checks, kept between looks.

What lives here: what follows for each partition, from what is new alone. What does not: reading it
(``dagster_internals/events.py``), and what is done about a partition (``failed_partitions.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sensors.dagster_internals.events import CheckEvaluation, DagsterFacts, MaterializationEvent

LOOK_BACK = 200
"""Events read again at each look: on Postgres a lower id may become visible after a higher one."""


class PartitionHistory:
    """How the partitions of some assets stand, kept between looks so that a look reads only what is new.

    open_attempts: when each was last to be materialized and was not (yet). materialized: the storage id of
    the latest materialization. failing: standing evaluations with severity ERROR. Each by asset and then by
    partition. A failing evaluation stands until its check is evaluated again, or the partition is
    materialized again.
    """

    def __init__(self, assets: Sequence[str]) -> None:
        self.assets = tuple(assets)
        self._forget()

    def _forget(self) -> None:
        self.open_attempts: dict[str, dict[str, MaterializationEvent]] = {asset: {} for asset in self.assets}
        self.materialized: dict[str, dict[str, int]] = {asset: {} for asset in self.assets}
        self._latest: dict[str, dict[tuple[str, str], CheckEvaluation]] = {asset: {} for asset in self.assets}
        self._until = 0

    def look(self, dagster: DagsterFacts) -> None:
        """Read what is new. A database that is younger than the last look is read from its start."""
        newest = dagster.newest_event()
        if newest < self._until:
            self._forget()
        if self._until == newest:
            return
        for asset in self.assets:
            self._look_at_attempts(dagster, asset)
        if not self._until:
            for evaluation in dagster.latest_results(self.assets):
                self._take(evaluation)
        else:
            for evaluation in dagster.evaluations_since(self._until, look_back=LOOK_BACK)[0]:
                self._take(evaluation)
        self._until = newest

    def failing(self, asset: str) -> dict[str, list[CheckEvaluation]]:
        """Standing evaluations that stop a partition, by partition."""
        standing: dict[str, list[CheckEvaluation]] = {}
        materialized = self.materialized[asset]
        for (partition, _), evaluation in self._latest[asset].items():
            if evaluation.stops and evaluation.storage_id > materialized.get(partition, 0):
                standing.setdefault(partition, []).append(evaluation)
        return standing

    def _take(self, evaluation: CheckEvaluation) -> None:
        if evaluation.asset not in self._latest or evaluation.partition is None:
            return
        latest = self._latest[evaluation.asset]
        place = (evaluation.partition, evaluation.check)
        before = latest.get(place)
        if before is not None and before.storage_id > evaluation.storage_id:
            return
        # What does not stop anything is remembered by its absence.
        if evaluation.stops:
            latest[place] = evaluation
        else:
            latest.pop(place, None)

    def _look_at_attempts(self, dagster: DagsterFacts, asset: str) -> None:
        attempts, materialized = self.open_attempts[asset], self.materialized[asset]
        for event in dagster.materializations_since(asset, self._until - LOOK_BACK):
            if event.is_done:
                materialized[event.partition] = event.storage_id
                attempts.pop(event.partition, None)
            else:
                attempts[event.partition] = event
