"""What a scan tells of Dagster's facts: failures and their end, silent sensors, a queue that stands."""

import json
import time
from dataclasses import asdict

import dagster as dg
import pytest

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from resources.alerts.alert import DAY_SECONDS, Alert
from resources.alerts.outbox import Outbox
from sensors.alerts import RESTORED, STANDSTILL_SECONDS, AlertScan, Cursor, build_alerts_sensor
from sensors.device_health import NONE_LEFT
from sensors.ticks import Ticks
from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import pause

NOW = 1_790_000_000.0
KEY = "00007"
HERE = {".dagster/grpc_info": '{"host": "localhost", "socket": "/a/socket"}'}
S = dg.DagsterRunStatus


class Bench:
    """A clock, Dagster from memory, and an outbox."""

    def __init__(self, folder):
        self.clock = SimulatedClock(NOW)
        self.dagster = DagsterInMemory(self.clock)
        self.outbox = Outbox(ControlState(folder))

    def scan(self, **changes) -> AlertScan:
        """A scan of no asset and no sensor, with no heartbeat anywhere."""
        nothing = {"assets": [], "watched": {}, "paused": lambda: False}
        return AlertScan(self.outbox, **{**nothing, "working": frozenset, "silence": 1e9, **changes})


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_another_sensor_that_is_silent_is_told_once_and_then_that_it_ticks(bench):
    """A crashed sensor raises no alert of its own."""
    ticks = Ticks(bench.outbox.state)
    watched = {"file_drift": 30.0}
    scan = bench.scan(assets=["rows"], watched=watched)

    def told(now: float) -> list[str]:
        before = len(bench.outbox.recent(100))
        scan.scan(bench.dagster, Cursor(), now=now)
        return [one.happening for one in bench.outbox.recent(100)[before:]]

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
    bench.dagster.launch(KEY, [], S.QUEUED)

    def told(cursor: Cursor, now: float) -> tuple[Cursor, list[str]]:
        before = len(bench.outbox.recent(100))
        cursor, _ = scan.scan(bench.dagster, cursor, now=now)
        return cursor, [one.happening for one in bench.outbox.recent(100)[before:]]

    cursor, events = told(Cursor(), NOW)
    assert events == []
    paused = True
    cursor, events = told(cursor, NOW + 2000)
    assert (cursor.still, events) == ({}, [])
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
    bench.dagster.launch(KEY, [])
    cursor, events = told(cursor, NOW + 4020)
    assert events == ["recovered"]


def test_a_queue_that_waits_for_a_device_to_be_taken_back_is_told_by_that_alone(bench):
    """One trouble is one message: every device is left out, and that says what to do."""
    scan = bench.scan()
    bench.dagster.launch(KEY, [], S.QUEUED)
    bench.outbox.post(Alert("all_devices_left_out", NONE_LEFT, "1", "error", "None is left", "Look."))
    cursor, _ = scan.scan(bench.dagster, Cursor(), now=NOW)
    cursor, _ = scan.scan(bench.dagster, cursor, now=NOW + STANDSTILL_SECONDS + 1)
    assert list(bench.outbox.open_subjects()) == [NONE_LEFT]
    bench.outbox.note_recovery(NONE_LEFT, sentence="One is back.", at=NOW + 1000)
    cursor, _ = scan.scan(bench.dagster, cursor, now=NOW + 2000)
    assert list(bench.outbox.open_subjects()) == []
    scan.scan(bench.dagster, cursor, now=NOW + 2001 + STANDSTILL_SECONDS)
    (alert,) = bench.outbox.open_subjects().values()
    assert alert.subject == "queue"
    assert "Deployment > Concurrency" in alert.next_step, "a person may have set the pool's limit to 0"


def test_a_run_that_does_not_begin_to_work_is_told_once_and_when_it_goes_on(bench):
    """Its process lives and it has no heartbeat, so that nobody else judges it; a pause is no trouble."""
    working, paused = set(), False
    scan = bench.scan(paused=lambda: paused, working=lambda: working, silence=1800.0)
    run_id = bench.dagster.launch(KEY, [], **HERE)
    # An audit takes its time, and whoever launches elsewhere looks after its own runs.
    bench.dagster.launch(None, [], **HERE)
    bench.dagster.launch(KEY, [])
    cursor = Cursor()

    def told(now: float) -> list[tuple[str, str]]:
        nonlocal cursor
        cursor, _ = scan.scan(bench.dagster, Cursor(**json.loads(json.dumps(asdict(cursor)))), now=now)
        return [(one.kind, subject) for subject, one in bench.outbox.open_subjects().items()]

    assert told(NOW) == told(NOW + 1800) == []
    paused = True
    assert told(NOW + 1810) == []
    paused = False
    assert told(NOW + 1820) == told(NOW + 3620) == []
    assert told(NOW + 3621) == told(NOW + 3640) == [("run_stuck", f"runs/{run_id}")]
    working.add(run_id)
    assert told(NOW + 3660) == []
    assert [one.happening for one in bench.outbox.recent(9)] == ["raised", "recovered"]


def test_a_failed_run_is_told_once_and_is_over_with_the_next_materialization(bench):
    """Days later too, and whatever number of looks comes in between."""
    scan, cursor = bench.scan(assets=["rows"]), Cursor()

    def told(seconds: float) -> list[str]:
        nonlocal cursor
        before = len(bench.outbox.recent(100))
        bench.clock.now += seconds
        cursor, _ = scan.scan(bench.dagster, cursor, now=bench.clock.now)
        return [one.happening for one in bench.outbox.recent(100)[before:]]

    run_id = bench.dagster.launch(KEY, ["rows"])
    assert told(20) == []
    bench.dagster.change(run_id, S.FAILURE)
    assert told(1) == [], "it has not said yet whether Dagster tries it again"
    assert told(20) == ["raised"]
    assert list(bench.outbox.open_subjects()) == [f"rows/{KEY}/run"]
    assert told(20) == told(3 * 24 * 3600) == []
    bench.dagster.materialize("rows", KEY)
    assert told(20) == ["recovered"]


def test_an_older_backup_of_the_history_makes_nothing_right_again(bench):
    """What passed before the alert is no news; what passed after it is, at a first look too."""

    def evaluated(*, passed: bool) -> None:
        found = dg.AssetCheckEvaluation(
            dg.AssetKey("rows"), "file", passed=passed, metadata={}, partition=KEY
        )
        bench.clock.now += 20
        bench.dagster.report_evaluation(found)

    def opened() -> list[str]:
        bench.scan().scan(bench.dagster, Cursor(), now=bench.clock.now)
        return list(bench.outbox.open_subjects())

    evaluated(passed=True)
    evaluated(passed=False)
    assert opened() == [f"rows/{KEY}/file"]
    del bench.dagster.evaluations[1:]
    assert opened() == [f"rows/{KEY}/file"]
    evaluated(passed=True)
    assert opened() == []


def test_an_alert_of_a_check_that_says_no_next_step_points_to_no_page_below(bench):
    """The list of alerts and some messages show no page below it: it says where to look by name."""
    bench.dagster.report_evaluation(
        dg.AssetCheckEvaluation(dg.AssetKey("rows"), "file", passed=False, metadata={}, partition=KEY)
    )
    bench.scan().scan(bench.dagster, Cursor(), now=bench.clock.now)
    (alert,) = bench.outbox.open_subjects().values()
    assert "Dagster" in alert.next_step
    assert "below" not in alert.next_step


def test_what_a_process_sends_is_its_own_from_when_it_delivers_not_from_when_it_began_to_look(bench):
    """After a long scan another process would take what is being sent for abandoned, and send it too."""

    class Delivered:
        sentence = ""

        def deliver(self, *, now: float, **_):
            self.now = now
            return self

    def looks_for_long() -> bool:
        bench.clock.now += 25
        return False

    delivery = Delivered()
    sensor = build_alerts_sensor(
        bench.scan(paused=looks_for_long), delivery, address=lambda: None, clock=bench.clock
    )
    with dg.DagsterInstance.ephemeral() as instance:
        sensor(dg.build_sensor_context(instance=instance))
    assert delivery.now == NOW + 25


def test_of_the_failed_runs_of_a_partition_the_latest_is_told(bench):
    """After a daemon was down, a run that was tried again since is no trouble of its own."""
    first, last = (bench.dagster.launch(KEY, ["rows"]) for _ in range(2))
    for run_id in (first, last):
        bench.dagster.change(run_id, S.FAILURE)
    bench.clock.now += 20
    bench.scan(assets=["rows"]).scan(bench.dagster, Cursor(), now=bench.clock.now)
    assert [one.alert.occurrence for one in bench.outbox.recent(9)] == [last]


def test_a_failed_run_that_nobody_else_tries_again_says_so(bench):
    """What only a person launches is not left to a schedule; it is over with its result all the same."""
    scan = bench.scan(assets=["rows", "models"], by_hand=["models"])
    for asset in ("rows", "models"):
        bench.dagster.change(bench.dagster.launch(KEY, [asset]), S.FAILURE)
    bench.clock.now += 20
    cursor, _ = scan.scan(bench.dagster, Cursor(), now=bench.clock.now)
    said = {one.subject: one.next_step for one in bench.outbox.open_subjects().values()}
    assert "by itself" in said[f"rows/{KEY}/run"]
    assert "launch it again" in said[f"models/{KEY}/run"]
    bench.dagster.materialize("models", KEY)
    bench.clock.now += 20
    scan.scan(bench.dagster, cursor, now=bench.clock.now)
    assert list(bench.outbox.open_subjects()) == [f"rows/{KEY}/run"]


def test_a_restored_control_state_is_told_for_a_day(bench):
    """What was noted since the copy may be missing: not in silence, once, and no longer than a day."""
    # The time of a restoration is the machine's own.
    state, scan, now = bench.outbox.state, bench.scan(), time.time()
    pause(state, "a copy is made", now=now)
    (state.directory / "state.db").unlink()
    for at in (now, now + 20):
        scan.scan(bench.dagster, Cursor(), now=at)
        assert RESTORED in bench.outbox.open_subjects()
    for at in (now + DAY_SECONDS + 60, now + DAY_SECONDS + 80):
        scan.scan(bench.dagster, Cursor(), now=at)
    assert bench.outbox.open_subjects() == {}
    assert [one.happening for one in bench.outbox.recent(9)] == ["raised", "recovered"]
