"""A run's process waits for Dagster's Postgres, and what is told in passing does not."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster_postgres import PostgresEventLogStorage, utils
from sqlalchemy.exc import OperationalError

from sensors.dagster_internals import instance_needs
from sensors.dagster_internals.instance_needs import (
    outlive_outages,
    wait_for_postgres,
    without_waiting,
)


class Postgres:
    """Away for so many attempts to connect."""

    def __init__(self, away: int) -> None:
        self.away = away
        self.asked = 0

    def connect(self) -> str:
        self.asked += 1
        if self.asked <= self.away:
            raise OperationalError("", {}, Exception("refused"))
        return "connected"


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that passed in waiting. What is replaced for the process is put back."""
    waited: list[float] = []
    monkeypatch.setattr(utils, "retry_pg_connection_fn", utils.retry_pg_connection_fn)
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(waited))
    return waited


def test_a_run_outlives_a_database_that_is_away_for_minutes(waited: list[float]) -> None:
    """Dagster's own patience ends after some 11 s, and a run that failed then would wait for its schedule."""
    with pytest.raises(utils.DagsterPostgresException):
        utils.retry_pg_connection_fn(Postgres(away=60).connect)
    assert sum(waited) < 20
    wait_for_postgres()
    assert utils.retry_pg_connection_fn(Postgres(away=60).connect) == "connected"
    assert sum(waited) > 90


def test_a_run_waits_where_its_instance_has_a_postgres(waited: list[float]) -> None:
    """With Dagster's own launcher too; twice is once, and another database changes nothing."""
    impatient = utils.retry_pg_connection_fn
    with dg.DagsterInstance.ephemeral() as instance:
        outlive_outages(instance)
    assert utils.retry_pg_connection_fn is impatient
    on_postgres: Any = SimpleNamespace(event_log_storage=object.__new__(PostgresEventLogStorage))
    outlive_outages(on_postgres)
    patient = utils.retry_pg_connection_fn
    assert patient(Postgres(away=60).connect) == "connected"
    outlive_outages(on_postgres)
    assert utils.retry_pg_connection_fn is patient


def test_the_wait_has_an_end(waited: list[float]) -> None:
    """A database that never comes back holds no device for ever."""
    wait_for_postgres()
    with pytest.raises(utils.DagsterPostgresException):
        utils.retry_pg_connection_fn(Postgres(away=10**9).connect)
    assert instance_needs.PATIENCE_SECONDS <= sum(waited) < instance_needs.PATIENCE_SECONDS + 30


def test_what_is_told_in_passing_does_not_wait(waited: list[float]) -> None:
    """A line of progress holds up no model."""
    wait_for_postgres()
    postgres = Postgres(away=1)
    with without_waiting(), pytest.raises(utils.DagsterPostgresException):
        utils.retry_pg_connection_fn(postgres.connect)
    assert (postgres.asked, waited) == (1, [])
    assert utils.retry_pg_connection_fn(postgres.connect) == "connected"
