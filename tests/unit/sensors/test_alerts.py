"""What a scan tells of Dagster's facts: failures and their end, silent sensors, a queue that stands."""

import json
import time
from dataclasses import asdict

import dagster as dg
import pytest

from faults.rehearsal.dagster_in_memory import INTERRUPTED, DagsterInMemory, SimulatedClock
from resources.alerts.alert import DAY_SECONDS, Alert
from resources.alerts.outbox import Outbox
from sensors.alerts import (
    RESTORED,
    STANDSTILL_SECONDS,
    AlertScan,
    Cursor,
    alert_of,
    build_alerts_sensor,
)
from sensors.device_health import NONE_LEFT
from sensors.published_file_drift import evaluation
from sensors.ticks import Ticks
from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import pause
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.published import Verification

NOW = 1_790_000_000.0
DAY = 24 * 3600
KEY = "00007"
RUN = f"rows/{KEY}/run"
CHECK = f"rows/{KEY}/file"
HERE = {".dagster/grpc_info": '{"host": "localhost", "socket": "/a/socket"}'}
S = dg.DagsterRunStatus


class Bench:
    """A clock, Dagster from memory, an outbox, and a scan whose cursor is kept as text."""

    def __init__(self, folder):
        self.clock = SimulatedClock(NOW)
        self.dagster = DagsterInMemory(self.clock)
        self.outbox = Outbox(ControlState(folder))
        self.working, self.paused = set(), False
        self.begin()

    def begin(self, **changes) -> AlertScan:
        """A scan of one asset and no sensor, as after a restart; the cursor is Dagster's."""
        nothing = {"assets": ["rows"], "watched": {}, "paused": lambda: self.paused, "silence": 1800.0}
        self.scan = AlertScan(self.outbox, **{**nothing, "working": lambda: self.working, **changes})
        self.cursor = Cursor()
        return self.scan

    def told(self, seconds: float = 20) -> list[str]:
        """What a scan after so many seconds tells."""
        before = len(self.outbox.recent(100))
        self.clock.now += seconds
        kept = Cursor(**json.loads(json.dumps(asdict(self.cursor))))
        self.cursor, _ = self.scan.scan(self.dagster, kept, now=self.clock.now)
        return [f"{one.happening} {one.alert.subject}" for one in self.outbox.recent(100)[before:]]

    @property
    def open(self) -> list[str]:
        """Subjects of the alerts that are open."""
        return list(self.outbox.open_subjects())

    def ends(self, *assets, **tags) -> str:
        """A run of these assets that fails now."""
        run_id = self.dagster.launch(KEY, assets or ["rows"])
        self.dagster.change(run_id, S.FAILURE, **tags)
        return run_id

    def evaluated(self, *, passed=False) -> None:
        """A result of a check."""
        self.dagster.report_evaluation(
            dg.AssetCheckEvaluation(dg.AssetKey("rows"), "file", passed=passed, metadata={}, partition=KEY)
        )

    def new_history(self) -> None:
        """Dagster's database begins anew and counts from 1."""
        self.dagster = DagsterInMemory(self.clock)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_another_sensor_that_is_silent_is_told_once_and_then_that_it_ticks(bench):
    """A crashed sensor raises no alert of its own."""
    ticks = Ticks(bench.outbox.state)
    ticks.record("file_drift", NOW - 4000, interval_seconds=30)
    bench.begin(watched={"file_drift": 30.0})
    assert bench.told(0) == [], "it was not expected to tick before this process began"
    assert bench.told(301) == ["raised sensor/file_drift"]
    assert bench.told() == []
    ticks.record("file_drift", bench.clock.now, interval_seconds=30)
    assert [bench.told(), bench.told()] == [["recovered sensor/file_drift"], []]


def test_runs_that_wait_while_none_is_under_way_are_told_once_and_not_in_a_pause(bench):
    """All devices left out, or a coordinator that hangs: nothing fails, and nothing gets on."""
    bench.dagster.launch(KEY, [], S.QUEUED)
    assert bench.told() == []
    bench.paused = True
    assert (bench.told(2000), bench.cursor.still) == ([], {})
    bench.paused = False
    assert [bench.told(), bench.told(STANDSTILL_SECONDS)] == [[], []]
    assert [bench.told(1), bench.told(2000)] == [["raised queue"], []]
    bench.paused = True
    assert bench.told() == [], "in a pause nothing is started, so nothing is right again"
    bench.paused = False
    bench.dagster.launch(KEY, [])
    assert bench.told() == ["recovered queue"]


def test_a_queue_that_waits_for_a_device_to_be_taken_back_is_told_by_that_alone(bench):
    """One trouble is one message: every device is left out, and that says what to do."""
    bench.dagster.launch(KEY, [], S.QUEUED)
    bench.outbox.post(Alert("all_devices_left_out", NONE_LEFT, "1", "error", "None is left", "Look."))
    assert [bench.told(), bench.told(STANDSTILL_SECONDS + 1)] == [[], []]
    bench.outbox.note_recovery(NONE_LEFT, sentence="One is back.", at=bench.clock.now)
    assert [bench.told(), bench.told(STANDSTILL_SECONDS + 1)] == [[], ["raised queue"]]
    (alert,) = bench.outbox.open_subjects().values()
    assert "Deployment > Concurrency" in alert.next_step, "a person may have set the pool's limit to 0"


def test_a_run_that_does_not_begin_to_work_is_told_once_and_when_it_goes_on(bench):
    """Its process lives and it has no heartbeat, so that nobody else judges it; a pause is no trouble."""
    run_id = bench.dagster.launch(KEY, [], **HERE)
    # An audit takes its time, and whoever launches elsewhere looks after its own runs.
    bench.dagster.launch(None, [], **HERE)
    bench.dagster.launch(KEY, [])
    assert [bench.told(), bench.told(1800)] == [[], []]
    bench.paused = True
    assert bench.told() == []
    bench.paused = False
    assert [bench.told(), bench.told(1800)] == [[], []]
    assert [bench.told(1), bench.told()] == [[f"raised runs/{run_id}"], []]
    assert [alert.kind for alert in bench.outbox.open_subjects().values()] == ["run_stuck"]
    bench.working.add(run_id)
    assert bench.told() == [f"recovered runs/{run_id}"]


def test_a_failed_run_is_told_once_and_is_over_with_the_next_materialization(bench):
    """Days later too, whatever number of looks comes in between. Of several the latest is told."""
    assert bench.told() == []
    _, last = bench.ends(), bench.ends()
    assert bench.told(1) == [], "it has not said yet whether Dagster tries it again"
    assert bench.told() == [f"raised {RUN}"]
    assert bench.outbox.open_subjects()[RUN].occurrence == last
    assert [bench.told(), bench.told(3 * DAY)] == [[], []]
    bench.dagster.materialize("rows", KEY)
    assert bench.told() == [f"recovered {RUN}"]


@pytest.mark.parametrize("tags", [INTERRUPTED, {"dagster/will_retry": "true"}])
def test_what_was_interrupted_or_is_retried_by_dagster_is_not_told(bench, tags):
    """A kill from outside is resumed, a crash is started again: no alert until somebody gives up."""
    bench.ends(**tags)
    assert bench.told() == []


def test_a_failed_run_that_nobody_else_tries_again_says_so(bench):
    """What only a person launches is not left to a schedule; it is over with its result all the same."""
    bench.begin(assets=["rows", "models"], by_hand=["models"])
    for asset in ("rows", "models"):
        bench.ends(asset)
    bench.told()
    steps = {subject: alert.next_step for subject, alert in bench.outbox.open_subjects().items()}
    assert "by itself" in steps[RUN]
    assert "launch it again" in steps[f"models/{KEY}/run"]
    bench.dagster.materialize("models", KEY)
    bench.told()
    assert bench.open == [RUN]


def test_what_was_told_is_told_by_no_other_process_or_history_again(bench):
    """A tick that was killed, a code server that starts, a history that begins anew or is a backup.

    What passed before the alert is no news there; what passed after it is, at a first look too, and so is
    what fails anew, however far on the cursor is.
    """
    bench.evaluated(passed=True)
    bench.told()
    bench.evaluated()
    before = bench.cursor
    assert bench.told() == [f"raised {CHECK}"]
    bench.cursor = before
    assert bench.told() == []
    bench.begin()
    assert bench.told() == []
    del bench.dagster.evaluations[1:]
    bench.begin()
    assert (bench.told(), bench.open) == ([], [CHECK])
    bench.new_history()
    bench.begin()
    bench.evaluated()
    assert (bench.told(), bench.open) == ([], [CHECK])
    far = Cursor(evaluations=10_000)
    for passed in (True, False):
        bench.new_history()
        bench.cursor = far
        bench.evaluated(passed=passed)
        assert bench.told() == [f"{'recovered' if passed else 'raised'} {CHECK}"]
        assert bench.told() == []


def test_what_stands_or_failed_is_told_after_the_clock_was_put_back(bench):
    """In its time, and not a month later; a sensor that had ticked is not called silent at once."""
    bench.begin(watched={"retries": 600.0})
    bench.told(0)
    bench.clock.now += 2 * DAY
    Ticks(bench.outbox.state).record("retries", bench.clock.now, interval_seconds=600)
    bench.dagster.launch(KEY, [], S.QUEUED)
    assert bench.told(0) == []
    bench.ends()
    bench.clock.now -= DAY
    assert bench.told() == [f"raised {RUN}"]
    assert [bench.told(STANDSTILL_SECONDS), bench.told(1)] == [[], ["raised queue"]]
    assert [bench.told(2099), bench.told(1)] == [[], ["raised sensor/retries"]]


def test_a_verdict_that_is_told_twice_is_one_alert(bench):
    """A tick of the drift sensor that died after telling tells it again; seen another time it is another."""
    truncated = Finding(FindingKind.TRUNCATED, "rows", KEY, "a truncated file.")
    for at in (NOW + 0.25, NOW + 0.25, NOW + 60):
        bench.dagster.report_evaluation(evaluation("rows", KEY, Verification(KEY, None, (truncated,)), at))
        bench.clock.now += 20
    results, _ = bench.dagster.evaluations_since(0)
    first, again, later = [alert_of(result).id for result in results]
    assert first == again != later


def test_an_alert_of_a_check_that_says_no_next_step_points_to_no_page_below(bench):
    """The list of alerts and some messages show no page below it: it says where to look by name."""
    bench.evaluated()
    bench.told()
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
    scan = bench.begin(paused=looks_for_long)
    sensor = build_alerts_sensor(scan, delivery, address=lambda: None, clock=bench.clock)
    with dg.DagsterInstance.ephemeral() as instance:
        sensor(dg.build_sensor_context(instance=instance))
    assert delivery.now == NOW + 25


def test_a_restored_control_state_is_told_for_a_day(bench):
    """What was noted since the copy may be missing: not in silence, once, and no longer than a day."""
    # The time of a restoration is the machine's own.
    bench.clock.now = time.time()
    pause(bench.outbox.state, "a copy is made", now=bench.clock.now)
    (bench.outbox.state.directory / "state.db").unlink()
    assert [bench.told(0), bench.told()] == [[f"raised {RESTORED}"], []]
    assert [bench.told(DAY_SECONDS + 40), bench.told()] == [[f"recovered {RESTORED}"], []]
