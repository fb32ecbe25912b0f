"""How the partitions of assets stand: attempts, materializations and failed checks, kept between looks.

What lives here: what follows for each partition, read a row at a time and only what is new. What does not:
the rows of checks (``check_results.py``), and what is done about a partition (``retry_decision.py``).

Checked with dagster 1.13.27. Not public: the table of events. The public ``get_status_by_partition`` says
neither which run failed nor whether a check's result is older than the materialization. If the table
changes: ``get_status_by_partition`` for the failed partitions, and ``fetch_materializations`` for when each
was published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagster import AssetKey, DagsterInstance
from dagster import DagsterEventType as EventType

from sensors.dagster_internals.check_results import Evaluation, evaluations_since, latest_failures
from sensors.dagster_internals.tables import Row, event_table, events_where, newest_event

_LOOK_BACK = 200
"""Events read again at each look: on Postgres a lower id may become visible after a higher one."""
_EVALUATIONS_AT_ONCE = 5000


@dataclass(frozen=True)
class OpenAttempt:
    """The latest time that a partition was to be materialized, where it was not (yet)."""

    run_id: str
    storage_id: int


class PartitionHistory:
    """How the partitions of some assets stand, kept between looks so that a look reads only what is new.

    open_attempts, materialized (storage id of the latest materialization), failing (standing evaluations
    with severity ERROR, by check): each by asset and then by partition. A failing evaluation stands until
    the check is evaluated again, or the partition is materialized again.
    """

    def __init__(self, assets: Sequence[str]) -> None:
        self.assets = tuple(assets)
        self._forget()

    def _forget(self) -> None:
        self.open_attempts: dict[str, dict[str, OpenAttempt]] = {asset: {} for asset in self.assets}
        self.materialized: dict[str, dict[str, int]] = {asset: {} for asset in self.assets}
        self._latest: dict[str, dict[tuple[str, str], Evaluation]] = {asset: {} for asset in self.assets}
        self._events_until = 0
        self._checks_until = 0

    def look(self, instance: DagsterInstance) -> None:
        """Read what is new. A database that is younger than the last look is read from its start."""
        newest = newest_event(instance)
        if newest < self._events_until:
            self._forget()
        if self._events_until == newest == self._checks_until:
            return
        for asset in self.assets:
            self._look_at_attempts(instance, asset)
        if not self._events_until:
            for one in latest_failures(instance, self.assets):
                self._take(one)
        else:
            self._look_at_checks(instance)
        self._checks_until = newest
        self._events_until = newest

    def _look_at_checks(self, instance: DagsterInstance) -> None:
        at, look_back = self._checks_until, _LOOK_BACK
        while True:
            found, until = evaluations_since(instance, at, look_back=look_back, limit=_EVALUATIONS_AT_ONCE)
            for one in found:
                self._take(one)
            if until == at:
                return
            at, look_back = until, 0

    def failing(self, asset: str) -> dict[str, list[Evaluation]]:
        """Standing evaluations that stop a partition, by partition."""
        standing: dict[str, list[Evaluation]] = {}
        materialized = self.materialized[asset]
        for (partition, _), one in self._latest[asset].items():
            if one.stops and one.storage_id > materialized.get(partition, 0):
                standing.setdefault(partition, []).append(one)
        return standing

    def _take(self, one: Evaluation) -> None:
        if one.asset not in self._latest or one.partition is None:
            return
        latest = self._latest[one.asset]
        at = (one.partition, one.check)
        known = latest.get(at)
        if known is not None and known.storage_id > one.storage_id:
            return
        # What does not stop anything is remembered by its absence.
        if one.stops:
            latest[at] = one
        else:
            latest.pop(at, None)

    def _look_at_attempts(self, instance: DagsterInstance, asset: str) -> None:
        attempts, materialized = self.open_attempts[asset], self.materialized[asset]
        for row in _materialization_events(instance, asset, self._events_until - _LOOK_BACK):
            partition: str | None = row["partition"]
            if partition is None:
                continue
            if row["dagster_event_type"] == EventType.ASSET_MATERIALIZATION.value:
                materialized[partition] = row["id"]
                attempts.pop(partition, None)
            else:
                attempts[partition] = OpenAttempt(row["run_id"], row["id"])


def _materialization_events(instance: DagsterInstance, asset: str, after: int) -> Sequence[Row]:
    import sqlalchemy as db

    events = event_table()
    kinds = (EventType.ASSET_MATERIALIZATION, EventType.ASSET_MATERIALIZATION_PLANNED)
    query = (
        db.select(events.c.id, events.c.dagster_event_type, events.c.partition, events.c.run_id)
        .where(
            events.c.asset_key == AssetKey(asset).to_string(),
            events.c.dagster_event_type.in_([kind.value for kind in kinds]),
            events.c.id > after,
        )
        .order_by(events.c.id)
    )
    return events_where(instance, query)
