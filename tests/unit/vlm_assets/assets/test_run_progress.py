"""What is said of a materialization while it runs, and where its time went."""

from __future__ import annotations

from types import SimpleNamespace

import dagster as dg
import pytest
from dagster_postgres.utils import DagsterPostgresException

from tests.support.journals import open_journal, plain_rows
from vlm_assets.assets import run_watch
from vlm_assets.assets.run_watch import DeviceWait, RunProgress, WorkTime
from vlm_assets.services.expected_cost import measure
from vlm_durable.files.layout import Home
from vlm_durable.state.database import open_state
from vlm_durable.state.pause import pause
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.workers import Phase, Workers
from vlm_engine.describing import Spent


@pytest.fixture
def work(tmp_path):
    """A run of two properties at work: its journal, its heartbeat, and what starts to say how far it is."""
    paths, state = Home(tmp_path).asset("a").partition("k"), open_state(tmp_path)
    workers = Workers(state)
    with (
        workers.begin(run_id="r", asset="a", partition="k", expected=2) as beat,
        open_journal(paths, "g", ["p0", "p1"]) as journal,
    ):

        def start(context):
            progress = RunProgress(
                context,
                asset=dg.AssetKey("a"),
                expected=2,
                journal=journal,
                beat=beat,
                state=state,
                may_go_on=lambda: None,
            )
            progress.start()
            return progress

        yield SimpleNamespace(workers=workers, beat=beat, journal=journal, start=start)


def test_a_commit_beside_a_long_batch_is_said_at_once(work, monkeypatch):
    """Its worker has just committed: it is not ended as one that stands still."""
    progress = work.start(dg.build_asset_context())
    before = work.beat.worker.moved
    work.journal.submit(plain_rows(["p0"]))
    work.journal.flush()
    (worker,) = work.workers.living()
    now = worker.started_at + 10.0
    with monkeypatch.context() as later:
        later.setattr(run_watch.time, "time", lambda: now)
        rate = progress.rate
    assert (worker.phase, worker.committed, worker.computed) == (Phase.WORKING, 1, 0)
    assert worker.moved > before
    assert rate == pytest.approx(0.1) == measure([], [worker], now).per_second, "status says the same"


def test_a_device_is_waited_for_as_long_as_runs_work_and_until_a_pause(tmp_path, monkeypatch):
    """Its holder counts while its heartbeat lives. The wait has a heartbeat too, and a pause ends it."""
    monkeypatch.setattr(run_watch, "_WAIT_LOOK_SECONDS", 0.0)
    state = open_state(tmp_path)
    workers = Workers(state)
    with workers.begin(run_id="r", asset="a", partition="k", expected=2) as beat:
        wait = DeviceWait(dg.build_asset_context(), beat, state)
        with workers.begin(run_id="before", asset="a", partition="j", expected=2):
            before = beat.worker.moved
            assert wait({"before"})
            assert (beat.worker.phase, beat.worker.moved > before) == (Phase.WAITING, True)
            assert not wait({"a person's command"})
        assert not wait({"before"}), "its process has ended"
        pause(state, reason="a new driver", now=0.0)
        with pytest.raises(dg.DagsterExecutionInterruptedError):
            wait({"before"})


class AwayContext:
    """Dagster's database is away: whatever is told raises."""

    run = SimpleNamespace(run_id="r")
    partition_key = "k"

    @property
    def log(self):
        raise DagsterPostgresException("too many retries for DB connection")


def test_work_goes_on_while_the_database_is_away(work, monkeypatch):
    """Neither a line of progress nor a pause that cannot be read ends a run, whose rows need no database."""
    progress = work.start(AwayContext())
    monkeypatch.setattr(run_watch, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(run_watch, "pause_of", unreadable)
    progress.advance(1)
    assert progress.computed == 1


def unreadable(state):
    raise ControlStateError("the database does not answer")


SPENT = Spent(model=60.0, validating=1.0, waiting=30.0, reading=50.0, decoding=300.0, preparing=90.0)
WORK = WorkTime(
    SPENT, {"processor": 4.0, "prefill": 15.0, "generation": 38.0}, rows=2.0, commit=3.0, total=100.0
)


def shares(table: str) -> dict[str, str]:
    return {
        cells[1].strip(): cells[3].strip() for line in table.splitlines()[2:] if (cells := line.split("|"))
    }


def test_each_number_can_be_plotted():
    """What Dagster plots over partitions are numbers, under the names that people know."""
    numbers = {name: value.value for name, value in WORK.metadata().items()}
    numbers.pop("where the time went")
    assert numbers == {
        "seconds in model": 60.0,
        "seconds in prefill": 15.0,
        "seconds in generation": 38.0,
        "seconds validating": 1.0,
        "seconds building rows": 2.0,
        "seconds waiting for images": 30.0,
        "seconds waiting for commit": 3.0,
        "seconds reading images": 50.0,
        "seconds decoding images": 300.0,
        "seconds in processor": 94.0,
    }


def test_the_shares_are_those_of_the_whole():
    """The device's time adds up to the whole, and what goes on beside it is told apart."""
    found = shares(WORK.table())
    assert found == {
        "images and prompt (prefill)": "15.0%",
        "answers (generation)": "38.0%",
        "processor, not ahead": "4.0%",
        "validation": "1.0%",
        "model, else": "2.0%",
        "waiting for images": "30.0%",
        "rows": "2.0%",
        "waiting for commit": "3.0%",
        "else": "5.0%",
        "beside it: reading images": "50.0%",
        "beside it: decoding images": "300.0%",
        "beside it: processor": "90.0%",
    }


def test_an_engine_that_tells_nothing_apart():
    """A model server is one line, whatever was validated beside it; nothing at all is no table of errors."""
    found = shares(WorkTime(SPENT, {}, rows=2.0, commit=3.0, total=100.0).table())
    assert found["model"] == "60.0%"
    assert "validation" not in found
    assert shares(WorkTime().table()) == {}
