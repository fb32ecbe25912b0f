"""The control state in a real Postgres: what several machines share."""

import subprocess
import sys

import pytest
import sqlalchemy as sa

from tests.support.control_states import ROUNDS, THREADS, count_by_threads, with_version
from vlm_durable.state import tables
from vlm_durable.state.database import ControlState, open_state
from vlm_durable.state.sqlite_file import ControlStateError

_COUNT = """
import sys
from pathlib import Path
import sqlalchemy as sa
from vlm_durable.state import tables
from vlm_durable.state.database import ControlState
state = ControlState(Path("/nowhere"), sys.argv[1])
def count(connection):
    at = connection.execute(sa.select(tables.pause.c.since)).scalar()
    connection.execute(tables.pause.delete())
    connection.execute(tables.pause.insert().values(id=1, since=(at or 0) + 1, reason="because"))
for _ in range(25):
    state.write(count)
"""


def test_no_change_of_many_processes_is_lost_and_all_begin_at_once(postgres_url):
    """Several machines start at the same moment on an empty database, and count on the same row."""
    processes = [subprocess.Popen([sys.executable, "-c", _COUNT, postgres_url]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    state = ControlState(None, postgres_url)
    assert state.read(lambda connection: connection.execute(sa.select(tables.pause.c.since)).scalar()) == 100
    tick = tables.workers.insert().values(name="x", record={"at": 1.0})
    state.beat(lambda connection: connection.execute(tick))
    assert len(state.read_beats(lambda connection: connection.execute(sa.select(tables.workers)).all())) == 1


def test_a_schema_of_another_version_is_refused(postgres_url):
    """Neither read nor changed: the sentence says how a cluster begins anew."""
    ControlState(None, postgres_url).write(with_version(tables.VERSION - 1))
    with pytest.raises(ControlStateError, match="Set it to an empty database"):
        ControlState(None, postgres_url).read(lambda connection: None)


def test_a_postgres_that_is_away_is_named_without_its_password(tmp_path):
    """The sentence goes into logs."""
    state = ControlState(tmp_path, "postgresql+psycopg2://someone:secret@127.0.0.1:1/nothing")
    with pytest.raises(ControlStateError, match="does not answer") as away:
        state.read(lambda connection: connection.execute(sa.select(tables.pause)).all())
    assert "secret" not in str(away.value)


def test_a_postgres_that_fails_over_is_an_outage(postgres_url):
    """A server that has become read-only is waited for as one that is away is; nothing ends by it."""

    def write(connection):
        connection.execute(sa.text("SET TRANSACTION READ ONLY"))
        connection.execute(tables.workers.delete())

    with pytest.raises(ControlStateError, match="read-only"):
        ControlState(None, postgres_url).beat(write)


def test_threads_of_one_process_share_it(postgres_url, tmp_path):
    """The daemon of a cluster looks with four sensors at once, which begin on an empty database."""
    assert count_by_threads(lambda: open_state(tmp_path, postgres_url)) == THREADS * ROUNDS
