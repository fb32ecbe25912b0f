"""Makes the process of a run wait for Dagster's Postgres, so that it outlives a restart of the database.

What lives here: the wait for a connection, and calls without it. What does not: our own control state, whose
callers go on without it (``vlm_durable/state/database.py``).

Checked with dagster 1.13.27 and dagster-postgres 0.29.27. Not public: ``retry_pg_connection_fn``, which makes
each connection and gives up after some 11 s. If it goes, a run that meets a longer outage fails, and the
retry schedule takes its partition up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


def wait_for_postgres() -> None:
    """Have this process wait for Dagster's database from now on, instead of failing."""
    from dagster_postgres import utils

    connect = utils.retry_pg_connection_fn

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
