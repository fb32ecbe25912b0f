"""What raises no failure of its own: silent sensors, a queue that stands, runs that do not begin to work."""

import dagster as dg
from dagster._core.test_utils import create_run_for_test

from resources.alerts.alert import Alert
from sensors.alerts import Cursor
from sensors.left_out_alerts import NONE_LEFT
from sensors.run_alerts import STANDSTILL_SECONDS
from sensors.ticks import Ticks

NOW = 1_790_000_000.0
KEY = "00007"


def test_another_sensor_that_is_silent_is_told_once_and_then_that_it_ticks(bench):
    """A crashed sensor raises no alert of its own."""
    ticks = Ticks(bench.outbox.state)
    watched = {"file_drift": 30.0}
    scan = bench.scan(assets=["rows"], watched=watched)

    def told(now: float) -> list[str]:
        before = len(bench.outbox.recent(100))
        scan.scan(bench.instance, Cursor(), now=now)
        return [one.what for one in bench.outbox.recent(100)[before:]]

    ticks.record("file_drift", NOW - 4000, interval_seconds=30)
    assert told(NOW) == [], "it was not expected to tick before this process began"
    assert told(NOW + 301) == ["raised"]
    assert told(NOW + 320) == []
    assert list(bench.outbox.open_subjects()) == ["sensor/file_drift"]
    ticks.record("file_drift", NOW + 330, interval_seconds=30)
    assert told(NOW + 340) == ["recovered"]
    assert told(NOW + 360) == []


def test_runs_that_wait_while_none_is_under_way_are_told_once_and_not_in_a_pause(bench):
    """All devices left out, or a coordinator that hangs: nothing fails, and nothing gets on."""
    paused = False
    scan = bench.scan(paused=lambda: paused)
    put_run(bench.instance, dg.DagsterRunStatus.QUEUED)

    def told(cursor: Cursor, now: float) -> tuple[Cursor, list[str]]:
        before = len(bench.outbox.recent(100))
        cursor, _ = scan.scan(bench.instance, cursor, now=now)
        return cursor, [one.what for one in bench.outbox.recent(100)[before:]]

    cursor, events = told(Cursor(), NOW)
    assert events == []
    paused = True
    cursor, events = told(cursor, NOW + 2000)
    assert (cursor.standing_since, events) == (None, [])
    paused = False
    cursor, events = told(cursor, NOW + 2020)
    cursor, events = told(cursor, NOW + 2020 + STANDSTILL_SECONDS + 1)
    assert events == ["raised"]
    cursor, events = told(cursor, NOW + 4000)
    assert events == []
    paused = True
    cursor, events = told(cursor, NOW + 4010)
    assert events == [], "in a pause nothing is started, so nothing is right again"
    paused = False
    put_run(bench.instance, dg.DagsterRunStatus.STARTED)
    cursor, events = told(cursor, NOW + 4020)
    assert events == ["recovered"]


def test_a_queue_that_waits_for_a_device_to_be_taken_back_is_told_by_that_alone(bench):
    """One trouble is one message: every device is left out, and that says what to do."""
    scan = bench.scan()
    put_run(bench.instance, dg.DagsterRunStatus.QUEUED)
    bench.outbox.post(Alert("all_devices_left_out", NONE_LEFT, "1", "error", "None is left", "Look."))
    cursor, _ = scan.scan(bench.instance, Cursor(), now=NOW)
    cursor, _ = scan.scan(bench.instance, cursor, now=NOW + STANDSTILL_SECONDS + 1)
    assert list(bench.outbox.open_subjects()) == [NONE_LEFT]
    bench.outbox.recovered(NONE_LEFT, sentence="One is back.", at=NOW + 1000)
    cursor, _ = scan.scan(bench.instance, cursor, now=NOW + 2000)
    assert list(bench.outbox.open_subjects()) == []
    scan.scan(bench.instance, cursor, now=NOW + 2001 + STANDSTILL_SECONDS)
    (alert,) = bench.outbox.open_subjects().values()
    assert alert.subject == "queue"
    assert "Deployment > Concurrency" in alert.next_step, "a person may have set the pool's limit to 0"


def test_a_run_that_does_not_begin_to_work_is_told_once_and_when_it_goes_on(bench):
    """Its process lives and it has no heartbeat, so that nobody else judges it; a pause is no trouble."""
    working, paused = set(), False
    scan = bench.scan(paused=lambda: paused, working=lambda: working, silence=1800.0)
    here = {".dagster/grpc_info": '{"host": "localhost", "socket": "/a/socket"}'}
    run_id = put_run(bench.instance, dg.DagsterRunStatus.STARTED, {**here, "dagster/partition": KEY})
    # An audit takes its time, and whoever launches elsewhere looks after its own runs.
    put_run(bench.instance, dg.DagsterRunStatus.STARTED, here)
    put_run(bench.instance, dg.DagsterRunStatus.STARTED, {"dagster/partition": KEY})
    cursor = Cursor()

    def told(now: float) -> list[tuple[str, str]]:
        nonlocal cursor
        cursor, _ = scan.scan(bench.instance, Cursor.read(cursor.text()), now=now)
        return [(one.kind, subject) for subject, one in bench.outbox.open_subjects().items()]

    assert told(NOW) == told(NOW + 1800) == []
    paused = True
    assert told(NOW + 1810) == []
    paused = False
    assert told(NOW + 1820) == told(NOW + 3620) == []
    assert told(NOW + 3621) == told(NOW + 3640) == [("run_stuck", f"runs/{run_id}")]
    working.add(run_id)
    assert told(NOW + 3660) == []
    assert [one.what for one in bench.outbox.recent(9)] == ["raised", "recovered"]


def put_run(instance, status: dg.DagsterRunStatus, tags: dict | None = None) -> str:
    """A run in this state, as its row says: a queued one needs a code server otherwise. Its id."""
    import sqlalchemy as db
    from dagster._core.storage.runs.schema import RunsTable

    run = create_run_for_test(instance, job_name="job", tags=tags)
    with instance.run_storage.connect() as connection:
        connection.execute(
            db.update(RunsTable).where(RunsTable.c.run_id == run.run_id).values(status=status.value)
        )
    return run.run_id
