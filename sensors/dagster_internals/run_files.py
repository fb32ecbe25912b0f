"""Runs that are forgotten, with the files that Dagster's own deletion leaves behind.

What lives here: deleting one run. What does not: which runs nobody needs (``picture_runs.py``). With SQLite,
each run's events are a database of its own, of which Dagster deletes the rows and keeps the file.
"""

from __future__ import annotations

from pathlib import Path

from dagster import DagsterInstance


def forget_run(instance: DagsterInstance, run_id: str) -> None:
    """Delete a finished run, its events and its captured output; what other runs left stays as it is."""
    from dagster._core.storage.event_log import SqliteEventLogStorage

    instance.delete_run(run_id)
    events = instance.event_log_storage
    if isinstance(events, SqliteEventLogStorage):
        for ending in ("", "-wal", "-shm"):
            Path(events.path_for_shard(run_id) + ending).unlink(missing_ok=True)
    instance.compute_log_manager.delete_logs(prefix=[run_id])
