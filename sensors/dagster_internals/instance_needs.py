"""What the promises need of a Dagster instance that is somebody else's, each with the setting that gives it.

A default instance has all of it: SQLite or Postgres, and runs that start on this machine. Here is also how
the process of a run waits for Dagster's Postgres, so that it outlives a restart of the database.

Checked with dagster 1.13.27 and dagster-postgres 0.29.27. Not public: ``SqlEventLogStorage``,
``SqlRunStorage`` and the classes of launchers. If they go: compare the names of the classes of
``event_log_storage``, ``run_storage`` and ``run_launcher``. Nor is ``retry_pg_connection_fn``, which makes
each connection and gives up after some 11 s: if it goes, a run that meets a longer outage fails, and the
retry schedule takes its partition up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dagster import DagsterInstance
from dagster._core.launcher import DefaultRunLauncher
from dagster._core.launcher.sync_in_memory_run_launcher import SyncInMemoryRunLauncher
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.runs.sql_run_storage import SqlRunStorage

from vlm_durable.commands import command

EXECUTORS = ("in_process", "multiprocess", "multi_or_in_process_executor")
"""Names of the executors whose steps are processes of this machine."""


class UnfitInstanceError(RuntimeError):
    """The instance cannot keep the promises; the message names the setting that is missing."""


def refuse_unfit(instance: DagsterInstance, executor: str | None = None) -> None:
    """Raise UnfitInstanceError where a promise needs another setting.

    executor: the name of the one that a run has; None outside of runs.
    """
    storages = (instance.event_log_storage, SqlEventLogStorage), (instance.run_storage, SqlRunStorage)
    for storage, kind in storages:
        if not isinstance(storage, kind):
            raise UnfitInstanceError(
                f"`storage` of this Dagster is {type(storage).__name__}. The sensors cannot read its tables,"
                " so failed and interrupted partitions would stay as they are. Set `storage` to sqlite or"
                " postgres in dagster.yaml. What is committed is safe."
            )
    if not isinstance(instance.run_launcher, DefaultRunLauncher | SyncInMemoryRunLauncher):
        raise UnfitInstanceError(
            f"`run_launcher` of this Dagster is {type(instance.run_launcher).__name__}. Its runs may start"
            " where neither the locks of the devices nor the home are, so two of them could use one device."
            " Leave `run_launcher` out of dagster.yaml; several machines need"
            f" {command('serve')}. What is committed is safe."
        )
    if executor is not None and executor not in EXECUTORS:
        raise UnfitInstanceError(
            f"The executor of this run is {executor}, whose steps may start where neither the locks of the"
            " devices nor the home are. Set `executor` of the project's dg.Definitions to"
            " dg.multiprocess_executor or dg.in_process_executor. What is committed is safe."
        )


PATIENCE_SECONDS = 600.0
"""Longest wait for one connection. Meanwhile no run counts as dead, and no other could start."""

_does_not_wait: ContextVar[bool] = ContextVar("does_not_wait", default=False)


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within this context, calls to Dagster raise at once if its database is away."""
    token = _does_not_wait.set(True)
    try:
        yield
    finally:
        _does_not_wait.reset(token)


def outlive_outages(instance: DagsterInstance) -> None:
    """Have this process, a run's, wait for the instance's database where that is a Postgres.

    It keeps doing so: a person's process that has materialized a partition by itself does too.
    """
    if type(instance.event_log_storage).__module__.startswith("dagster_postgres."):
        wait_for_postgres()


def wait_for_postgres() -> None:
    """Have this process wait for Dagster's Postgres from now on, not fail. A second call does nothing."""
    from dagster_postgres import utils

    connect = utils.retry_pg_connection_fn
    if connect.__module__ == __name__:
        return

    def patient(make: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        if _does_not_wait.get():
            return connect(make, retry_limit=0)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return connect(make, *arguments, **options)
            except utils.DagsterPostgresException:
                if time.monotonic() >= deadline:
                    raise

    utils.retry_pg_connection_fn = patient  # type: ignore[assignment]  # its arguments are any
