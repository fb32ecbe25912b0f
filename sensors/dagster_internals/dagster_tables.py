"""Dagster's private tables, and reading rows of them: the one module that names them.

What lives here: the tables, the two databases that they are in, the forms of a time and of an event. What
does not: what is asked of them (the modules beside this one). Imported inside functions: SQLAlchemy and
Dagster's storage cost a tenth of a second that no step needs.

Checked with dagster 1.13.27, on SQLite and on Postgres. If a table or a column changes, the tests of this
folder (``tests/integration/sensors/test_dagster_internals.py``) fail, and each module beside this one says
what replaces what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from dagster import DagsterInstance, EventLogEntry

Row = Mapping[str, Any]


def event_table() -> Any:
    """All events of runs, and those without a run."""
    from dagster._core.storage.event_log.schema import SqlEventLogStorageTable

    return SqlEventLogStorageTable


def check_table() -> Any:
    """The results of checks, and those that are planned."""
    from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable

    return AssetCheckExecutionsTable


def run_table() -> Any:
    """Runs, without their tags."""
    from dagster._core.storage.runs.schema import RunsTable

    return RunsTable


def tag_table() -> Any:
    """The tags of runs."""
    from dagster._core.storage.runs.schema import RunTagsTable

    return RunTagsTable


def of_events(instance: DagsterInstance) -> AbstractContextManager[Any]:
    """A connection to the database with events and checks."""
    found: AbstractContextManager[Any] = instance.event_log_storage.index_connection()  # type: ignore[attr-defined]
    return found


def of_runs(instance: DagsterInstance) -> AbstractContextManager[Any]:
    """A connection to the database with runs and their tags."""
    found: AbstractContextManager[Any] = instance.run_storage.connect()  # type: ignore[attr-defined]
    return found


def events_where(instance: DagsterInstance, query: Any) -> Sequence[Row]:
    """The rows of a query over events and checks."""
    with of_events(instance) as connection:
        rows: Sequence[Row] = connection.execute(query).mappings().all()
    return rows


def entry_of(text: str) -> EventLogEntry:
    """An event as Dagster keeps it."""
    from dagster._serdes import deserialize_value

    return deserialize_value(text, EventLogEntry)


def unix(stamp: datetime) -> float:
    """Seconds of a time that the database keeps in UTC without saying so."""
    return stamp.replace(tzinfo=UTC).timestamp()


def naive(seconds: float) -> datetime:
    """A time as the database keeps it, of whole seconds."""
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None, microsecond=0)
