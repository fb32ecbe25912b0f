"""Events from the rows of Dagster's tables: reads materializations and check results, and reports new ones.

What lives here: reading new events since a cursor. What does not: the alerts about a result (``alerts.py``),
and which results stand (``partition_history.py``).

Checked with dagster 1.13.27. Not public: the tables of events and of check executions, a DELETE in the
latter (``report_evaluation``), and ``get_materialized_partitions``. Public calls read one check at a time or
not at all (``get_event_records`` raises on SQLite), and ``get_status_by_partition`` says neither which run
failed nor whether a result is older than the materialization. If the tables change:
``event_log_storage.get_asset_check_partition_info`` has the latest status of each partition, and
``fetch_materializations`` when each was published. If the DELETE stops working: launch a run of a job with
that one check, for results of runs replace each other. No public call replaces one without a run.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as db
from dagster import AssetCheckEvaluation, AssetKey, AssetMaterialization, DagsterInstance, EventLogEntry
from dagster import DagsterEventType as EventType
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable, SqlEventLogStorageTable
from dagster._serdes import deserialize_value

from resources.dagster_names import UNPREFIXED, DagsterNames
from sensors.dagster_internals.instance_needs import refuse_unfit
from sensors.dagster_internals.launchers import job_launcher_of
from sensors.dagster_internals.runs import InstanceRuns, unix
from vlm_durable.markdown_text import plain

_log = logging.getLogger(__name__)

Row = Mapping[str, Any]
Severity = Literal["WARN", "ERROR"]

FOUND_AT = "found at"
"""Metadata of a result without a run: when it was found. A result reported twice keeps this time."""


@dataclass(frozen=True)
class CheckEvaluation:
    """One result of a check. description, metadata: as text. storage_id: grows with every event."""

    asset: str
    check: str
    partition: str | None
    passed: bool
    severity: Severity
    description: str
    metadata: Mapping[str, str]
    run_id: str
    at: float
    storage_id: int

    @property
    def stops(self) -> bool:
        """Whether it is a failed check that kept, or must keep, the partition from being used."""
        return not self.passed and self.severity == "ERROR"


@dataclass(frozen=True)
class MaterializationEvent:
    """A partition's materialization, planned or done. storage_id: grows with every event of the database."""

    partition: str
    run_id: str
    storage_id: int
    is_done: bool


class DagsterFacts(InstanceRuns):
    """Everything that the sensors read from a Dagster instance and report to it.

    A simulation answers from memory instead, with its own clock (``faults/rehearsal/dagster_in_memory.py``).
    Raises UnfitInstanceError for an instance of somebody else's that cannot be read.
    """

    def __init__(self, instance: DagsterInstance, names: DagsterNames = UNPREFIXED) -> None:
        if names.prefix:
            refuse_unfit(instance)
        super().__init__(instance, names)

    def job_has_ended(self, job: str) -> bool:
        """Whether the launcher says that a job has ended; False if it does not know it or gives no answer."""
        launcher = job_launcher_of(self.instance)
        return launcher is not None and launcher.has_ended(job)

    def stop_launcher_job(self, job: str) -> None:
        """Have the launcher end a job, if it still has it."""
        launcher = job_launcher_of(self.instance)
        if launcher is not None:
            launcher.stop(job)

    def newest_event(self) -> int:
        """The id of the latest event; 0 if there is none."""
        return self._newest()

    def newest_evaluation(self) -> int:
        """The id of the latest check result; 0 if there is none."""
        return self._newest(
            SqlEventLogStorageTable.c.dagster_event_type == EventType.ASSET_CHECK_EVALUATION.value
        )

    def materializations_since(self, asset: str, cursor: int) -> list[MaterializationEvent]:
        """An asset's planned and done materializations of partitions after an event's id, oldest first."""
        events, done = SqlEventLogStorageTable, EventType.ASSET_MATERIALIZATION.value
        query = (
            db.select(events.c.id, events.c.dagster_event_type, events.c.partition, events.c.run_id)
            .where(
                events.c.asset_key == self.names.key(asset).to_string(),
                events.c.dagster_event_type.in_([done, EventType.ASSET_MATERIALIZATION_PLANNED.value]),
                events.c.id > cursor,
                events.c.partition.is_not(None),
            )
            .order_by(events.c.id)
        )
        return [
            MaterializationEvent(
                row["partition"], row["run_id"], row["id"], row["dagster_event_type"] == done
            )
            for row in self._rows(query)
        ]

    def latest_materialization(self, asset: str) -> tuple[float, Mapping[str, str]] | None:
        """When an asset was last materialized (unix seconds), and its metadata as text."""
        entry = self.instance.get_latest_materialization_event(self.names.key(asset))
        if entry is None or entry.asset_materialization is None:
            return None
        metadata = entry.asset_materialization.metadata
        return entry.timestamp, {name: str(value.value) for name, value in metadata.items()}

    def materialized_partitions(self, asset: str) -> Collection[str]:
        """The partitions that Dagster knows as materialized."""
        return self.instance.get_materialized_partitions(self.names.key(asset))

    def report_materialization(self, materialization: AssetMaterialization) -> None:
        """Report a materialization that no run made."""
        key = self.names.key(materialization.asset_key.to_user_string())
        self.instance.report_runless_asset_event(materialization._replace(asset_key=key))

    def evaluations_since(self, cursor: int, *, look_back: int = 0) -> tuple[list[CheckEvaluation], int]:
        """Check results written after ``cursor`` (0: from the start), oldest first, and the new cursor.

        An unreadable row gives no result. A result gets its id when it is written, not when its check is
        planned. ``look_back`` reads that many ids before the cursor again: on Postgres they may have become
        visible since. The caller handles results that it has read before.
        """
        rows = self._rows_of_evaluations(cursor - look_back)
        evaluations = [evaluation for row in rows if (evaluation := _evaluation(row, self.names)) is not None]
        return evaluations, max([cursor, *(row["id"] for row in rows)])

    def latest_results(
        self, assets: Sequence[str] | None = None, *, passed: bool = False
    ) -> Iterator[CheckEvaluation]:
        """The latest result of every check and partition, if it failed.

        assets: only of these; None: of all. passed: also results that passed, but without their text and run,
        because only the events of failed results are read.
        """
        executions = AssetCheckExecutionsTable
        of_these = executions.c.asset_key.in_([self.names.key(asset).to_string() for asset in assets or ()])
        newest = (
            db.select(db.func.max(executions.c.id))
            .where(
                db.true() if assets is None else of_these,
                # A run that ended before its checks leaves them planned for ever: the earlier result stands.
                executions.c.execution_status != "PLANNED",
            )
            .group_by(executions.c.asset_key, executions.c.check_name, executions.c.partition)
        )
        has_failed = executions.c.execution_status == "FAILED"
        query = db.select(
            *(executions.c[name] for name in ("asset_key", "check_name", "partition", "execution_status")),
            executions.c.evaluation_event_storage_id.label("id"),
            executions.c.evaluation_event_timestamp.label("at"),
            db.case((has_failed, executions.c.evaluation_event)).label("event"),
        ).where(executions.c.id.in_(newest), db.true() if passed else has_failed)
        for row in self._rows(query):
            read = _evaluation if row["execution_status"] == "FAILED" else _passed
            if row["id"] is not None and (evaluation := read(row, self.names)) is not None:
                yield evaluation

    def report_evaluation(self, evaluation: AssetCheckEvaluation) -> None:
        """Report a check result that no run made, for one partition. It replaces the earlier one.

        Dagster keeps one such result per check and partition, and refuses the next: a unique index covers
        asset, check, partition and run, and the run is the same empty name for all of them. The earlier event
        stays in its log.
        """
        key = self.names.key(evaluation.asset_key.to_user_string())
        self._replace_evaluation(
            AssetCheckEvaluation(
                asset_key=key,
                check_name=evaluation.check_name,
                partition=evaluation.partition,
                passed=evaluation.passed,
                severity=evaluation.severity,
                description=evaluation.description,
                metadata=evaluation.metadata,
            )
        )

    def _replace_evaluation(self, evaluation: AssetCheckEvaluation) -> None:
        executions = AssetCheckExecutionsTable
        is_earlier = (
            executions.c.asset_key == evaluation.asset_key.to_string(),
            executions.c.check_name == evaluation.check_name,
            executions.c.partition == evaluation.partition,
            executions.c.run_id == "",
        )
        with self._connection() as connection:
            connection.execute(db.delete(executions).where(*is_earlier))
        # If it is killed here, nothing is reported, and the caller has not noted a report.
        self.instance.report_runless_asset_event(evaluation)

    def restore_results(self, run_ids: Collection[str]) -> list[tuple[str, str, str]]:
        """Report again the last result of each check that these runs planned and never evaluated.

        Dagster shows the newest row of a check, so a cancelled run makes the checks of a finished partition
        look skipped. Only results that passed are reported again. Returns asset, check and partition of each.
        """
        if not run_ids:
            return []
        executions = AssetCheckExecutionsTable
        same = (executions.c.asset_key, executions.c.check_name, executions.c.partition)
        newest = db.select(db.func.max(executions.c.id)).group_by(*same)
        planned = db.select(*same).where(
            executions.c.id.in_(newest),
            executions.c.run_id.in_(list(run_ids)),
            executions.c.execution_status == "PLANNED",
        )
        restored = []
        for row in self._rows(planned):
            if row["partition"] is None:
                continue
            is_same = [column == row[column.name] for column in same]
            before = (
                db.select(executions.c.evaluation_event.label("event"))
                .where(*is_same, executions.c.execution_status != "PLANNED")
                .order_by(executions.c.id.desc())
                .limit(1)
            )
            for result in self._rows(before):
                try:
                    event = _entry(result["event"]).dagster_event
                except Exception as error:  # private to Dagster: whatever it raises, the other rows count
                    _log.warning("A check result in Dagster's database cannot be read: %s", error)
                    continue
                evaluation = event.event_specific_data if event else None
                if not isinstance(evaluation, AssetCheckEvaluation) or not evaluation.passed:
                    continue
                asset = self.names.asset(evaluation.asset_key)
                if asset is not None:
                    self._replace_evaluation(evaluation)
                    restored.append((asset, evaluation.check_name, row["partition"]))
        return restored

    def _rows_of_evaluations(self, after: int) -> Sequence[Row]:
        events = SqlEventLogStorageTable
        query = (
            db.select(events.c.id, events.c.event)
            .where(
                events.c.dagster_event_type == EventType.ASSET_CHECK_EVALUATION.value,
                events.c.id > after,
            )
            .order_by(events.c.id)
        )
        return self._rows(query)

    def _connection(self) -> AbstractContextManager[Any]:
        """A connection to the database with events and checks."""
        connection: AbstractContextManager[Any] = self.instance.event_log_storage.index_connection()  # type: ignore[attr-defined]
        return connection

    def _rows(self, query: Any) -> Sequence[Row]:
        """The rows of a query over events and checks."""
        with self._connection() as connection:
            rows: Sequence[Row] = connection.execute(query).mappings().all()
        return rows

    def _newest(self, *conditions: Any) -> int:
        query = db.select(db.func.max(SqlEventLogStorageTable.c.id).label("id")).where(*conditions)
        return int(self._rows(query)[0]["id"] or 0)


def _entry(text: str) -> EventLogEntry:
    """An event as Dagster keeps it."""
    return deserialize_value(text, EventLogEntry)


def _passed(row: Row, names: DagsterNames) -> CheckEvaluation | None:
    """A result that passed, by the columns of its row; None if its asset is another home's."""
    key = AssetKey.from_db_string(row["asset_key"])
    asset = None if key is None else names.asset(key)
    if asset is None:
        return None
    return CheckEvaluation(
        asset=asset,
        check=row["check_name"],
        partition=row["partition"],
        passed=True,
        severity="ERROR",
        description="",
        metadata={},
        run_id="",
        at=unix(row["at"]),
        storage_id=row["id"],
    )


def _evaluation(row: Row, names: DagsterNames) -> CheckEvaluation | None:
    try:
        entry = _entry(row["event"])
    except Exception as error:  # private to Dagster: whatever it raises, the other rows count
        _log.warning("The check result %s in Dagster's database cannot be read: %s", row["id"], error)
        return None
    evaluation = entry.dagster_event.event_specific_data if entry.dagster_event else None
    if not isinstance(evaluation, AssetCheckEvaluation):
        return None
    asset = names.asset(evaluation.asset_key)
    if asset is None:
        return None
    return CheckEvaluation(
        asset=asset,
        check=evaluation.check_name,
        partition=evaluation.partition,
        passed=evaluation.passed,
        severity=evaluation.severity.value,
        description=plain(evaluation.description or ""),
        metadata={name: str(value.value) for name, value in evaluation.metadata.items()},
        run_id=entry.run_id,
        at=entry.timestamp,
        storage_id=row["id"],
    )
