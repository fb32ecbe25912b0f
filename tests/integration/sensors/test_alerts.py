"""The alerts sensor on a real Dagster instance with a real receiver: from a failing check to the message."""

import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from resources.alerts.alert import Alert
from resources.alerts.delivery import Delivery
from resources.alerts.outbox import Outbox
from resources.alerts.targets import checked_targets
from sensors.alerts import Cursor, Lookout, build_alerts_sensor
from sensors.left_out_alerts import NONE_LEFT
from sensors.run_alerts import STANDSTILL_SECONDS
from sensors.ticks import record_tick

ADDRESS = "http://127.0.0.1:3000"
KEYS = dg.StaticPartitionsDefinition([f"{n:05d}" for n in range(10_000)])
KEY = "00007"
NOW = 1_790_000_000.0
DO = "Put the missing images back."


@dataclass
class Bench:
    """An instance, an asset that does as it is told, and the sensor."""

    instance: dg.DagsterInstance
    home: Path
    receiver: object
    does: str = "well"
    cursor: str | None = None

    def __post_init__(self):
        self.outbox = Outbox(self.home / "alerts")
        self.start_sensor()

    def start_sensor(self):
        """As after a restart of the code server."""
        self.delivery = Delivery(self.outbox, checked_targets([self.receiver.url()]), home=self.home)
        self.sensor = build_alerts_sensor(
            self.delivery,
            assets=["rows"],
            watched={},
            ticks=self.home / "ticks",
            paused=lambda: False,
            working=frozenset,
            silence=1800.0,
            address=lambda: ADDRESS,
        )

    def tick(self) -> str:
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor)
        said = self.sensor(context)
        self.cursor = context.cursor
        return said.skip_message

    def run(self, does: str, *, tags: dict | None = None) -> dg.ExecuteInProcessResult:
        """Materialize the partition: well, with a failing check, with a warning, or with an error."""
        self.does = does
        bench = self
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dg.PreviewWarning)
            spec = dg.AssetCheckSpec("row_count", asset="rows", blocking=True, partitions_def=KEYS)

        @dg.asset(partitions_def=KEYS, check_specs=[spec])
        def rows():
            if bench.does == "error":
                raise dg.Failure("The images of p1 are gone. Put them back.", allow_retries=False)
            found = 19 if bench.does in ("check", "warning") else 20
            result = dg.AssetCheckResult(
                passed=found == 20,
                check_name="row_count",
                severity=dg.AssetCheckSeverity.WARN
                if bench.does == "warning"
                else dg.AssetCheckSeverity.ERROR,
                description=f"Expected 20 rows; found {found}.",
                metadata={"expected": "20 rows", "found": str(found), "what to do": DO},
            )
            if bench.does == "check":
                yield result
                raise dg.Failure("Not published.", allow_retries=False)
            yield dg.Output(None)
            yield result

        done = dg.materialize(
            [rows],
            selection=["rows"],
            partition_key=KEY,
            instance=self.instance,
            tags=tags,
            raise_on_error=False,
        )
        # A failed run says a moment later whether Dagster starts it again; that moment is over here.
        self.settle(done.run_id)
        return done

    def settle(self, run_id: str) -> None:
        """Put the end of a run five seconds back."""
        import sqlalchemy as db
        from dagster._core.storage.runs.schema import RunsTable

        with self.instance.run_storage.connect() as connection:
            connection.execute(
                db.update(RunsTable).where(RunsTable.c.run_id == run_id).values(end_time=time.time() - 5)
            )

    def lines_of(self, number: int) -> list[str]:
        return self.receiver.messages[number]["message"].splitlines()


@pytest.fixture
def bench(tmp_path, receiver) -> Bench:
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        yield Bench(instance, tmp_path / "home", receiver)


def test_a_failing_check_reaches_the_receiver_with_all_that_is_needed_and_then_its_recovery(bench):
    """Partition, expected, found, link and next step, in one tick; told once; a notice when it passes."""
    run = bench.run("check")
    started = time.monotonic()
    bench.tick()
    assert time.monotonic() - started < 30
    assert bench.receiver.titles == [f"row_count failed: rows {KEY}"], "the failed run is told by its check"
    said = bench.lines_of(0)
    for wanted in (
        f"Partition: {KEY}",
        "Expected: 20 rows",
        "Found: 19",
        f"Next step: {DO}",
        f"Look: {ADDRESS}/runs/{run.run_id}",
    ):
        assert wanted in said
    bench.tick()
    bench.start_sensor()
    bench.tick()
    assert len(bench.receiver.messages) == 1
    bench.run("well")
    bench.tick()
    assert bench.receiver.titles[1:] == [f"Right again: row_count failed: rows {KEY}"]
    assert bench.outbox.open_subjects() == {}


def test_a_check_that_fails_at_each_retry_is_told_once_and_then_its_recovery(bench):
    """One trouble is one message, whoever ticks; what comes after the recovery is another."""
    bench.run("check")
    bench.tick()
    for _ in range(2):
        bench.start_sensor()
        last = bench.run("check")
        bench.tick()
    assert bench.receiver.titles == [f"row_count failed: rows {KEY}"]
    (standing,) = bench.outbox.open_subjects().values()
    assert standing.occurrence == last.run_id, "the list of what is wrong links to the latest run"
    bench.run("well")
    bench.tick()
    assert bench.receiver.titles[1:] == [f"Right again: row_count failed: rows {KEY}"]
    bench.run("check")
    bench.tick()
    assert bench.receiver.titles[2:] == [f"row_count failed: rows {KEY}"]


def test_a_warning_is_told_as_a_warning(bench):
    """WARN reaches the person, and does not sound like an error."""
    bench.run("warning")
    bench.tick()
    assert bench.receiver.titles == [f"row_count warns: rows {KEY}"]
    assert bench.receiver.messages[0]["type"] == "warning"


def test_a_result_without_a_run_is_told_with_a_link_to_the_check(bench):
    """What the drift sensor finds on disk has no run: the link is the check's page."""
    bench.instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey("rows"),
            check_name="file_stands",
            passed=False,
            partition=KEY,
            metadata={"expected": "20 rows", "found": "truncated"},
        )
    )
    bench.tick()
    assert bench.receiver.titles == [f"file_stands failed: rows {KEY}"]
    assert f"Look: {ADDRESS}/assets/rows?view=checks&checkDetail=file_stands" in bench.lines_of(0)


def test_a_failed_run_is_told_with_its_error_and_is_right_again_with_the_partition(bench):
    """The asset's own sentence is in the message; a later materialization ends it."""
    run = bench.run("error")
    bench.tick()
    assert bench.receiver.titles == [f"Run failed: rows {KEY}"]
    assert "Found: The images of p1 are gone. Put them back." in bench.lines_of(0)
    assert f"Look: {ADDRESS}/runs/{run.run_id}" in bench.lines_of(0)
    bench.tick()
    assert len(bench.receiver.messages) == 1
    bench.run("well")
    bench.tick()
    assert bench.receiver.titles[1:] == [f"Right again: Run failed: rows {KEY}"]


@pytest.mark.parametrize(
    "tag", [{"dagster/failure_reason": "UNEXPECTED_TERMINATION"}, {"dagster/will_retry": "true"}]
)
def test_what_was_interrupted_or_is_retried_by_dagster_is_not_told(bench, tag):
    """A kill from outside is resumed, a crash is started again: no alert until somebody gives up."""
    run = bench.run("error")
    bench.instance.add_run_tags(run.run_id, tag)
    bench.tick()
    assert bench.receiver.messages == []


def test_a_run_that_has_just_failed_waits_until_it_says_whether_it_is_retried(bench):
    """The status comes a moment before the tag."""
    run = bench.run("error")
    bench.settle(run.run_id)
    import sqlalchemy as db
    from dagster._core.storage.runs.schema import RunsTable

    with bench.instance.run_storage.connect() as connection:
        connection.execute(db.update(RunsTable).values(end_time=time.time() + 1))
    bench.tick()
    assert bench.receiver.messages == []
    bench.settle(run.run_id)
    bench.tick()
    assert len(bench.receiver.messages) == 1


def test_a_tick_that_was_killed_before_it_kept_its_cursor_tells_nothing_twice(bench):
    """The tick is repeated from the old cursor."""
    bench.run("check")
    bench.run("error")
    before = bench.cursor
    bench.tick()
    bench.cursor = before
    bench.start_sensor()
    bench.tick()
    assert len(bench.receiver.messages) == 2
    assert bench.receiver.repeated() == {}


def test_another_sensor_that_is_silent_is_told_once_and_then_that_it_ticks(bench):
    """A crashed sensor raises no alert of its own."""
    ticks = bench.home / "ticks"
    watched = {"file_drift": 30.0}
    lookout = looking_out(bench, assets=["rows"], watched=watched, ticks=ticks)

    def told(now: float) -> list[str]:
        before = len(bench.outbox.recent(100))
        lookout.look(bench.instance, Cursor(), now=now)
        return [one["event"] for one in bench.outbox.recent(100)[before:]]

    record_tick(ticks, "file_drift", NOW - 4000, interval_seconds=30)
    assert told(NOW) == [], "it was not expected to tick before this process began"
    assert told(NOW + 301) == ["raised"]
    assert told(NOW + 320) == []
    assert list(bench.outbox.open_subjects()) == ["sensor/file_drift"]
    record_tick(ticks, "file_drift", NOW + 330, interval_seconds=30)
    assert told(NOW + 340) == ["recovered"]
    assert told(NOW + 360) == []


def test_runs_that_wait_while_none_is_under_way_are_told_once_and_not_in_a_pause(bench):
    """All devices left out, or a coordinator that hangs: nothing fails, and nothing gets on."""
    paused = False
    lookout = looking_out(bench, paused=lambda: paused)
    put_run(bench.instance, dg.DagsterRunStatus.QUEUED)

    def told(cursor: Cursor, now: float) -> tuple[Cursor, list[str]]:
        before = len(bench.outbox.recent(100))
        cursor, _ = lookout.look(bench.instance, cursor, now=now)
        return cursor, [one["event"] for one in bench.outbox.recent(100)[before:]]

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
    lookout = looking_out(bench)
    put_run(bench.instance, dg.DagsterRunStatus.QUEUED)
    bench.outbox.post(Alert("all_devices_left_out", NONE_LEFT, "1", "error", "None is left", "Look."))
    cursor, _ = lookout.look(bench.instance, Cursor(), now=NOW)
    cursor, _ = lookout.look(bench.instance, cursor, now=NOW + STANDSTILL_SECONDS + 1)
    assert list(bench.outbox.open_subjects()) == [NONE_LEFT]
    bench.outbox.recovered(NONE_LEFT, occurrence="2", sentence="One is back.", at=NOW + 1000)
    cursor, _ = lookout.look(bench.instance, cursor, now=NOW + 2000)
    assert list(bench.outbox.open_subjects()) == []
    lookout.look(bench.instance, cursor, now=NOW + 2001 + STANDSTILL_SECONDS)
    assert list(bench.outbox.open_subjects()) == ["queue"]


def test_a_run_that_does_not_begin_to_work_is_told_once_and_when_it_goes_on(bench):
    """Its process lives and it has no heartbeat, so that nobody else judges it; a pause is no trouble."""
    working, paused = set(), False
    lookout = looking_out(bench, paused=lambda: paused, working=lambda: working, silence=1800.0)
    here = {".dagster/grpc_info": '{"host": "localhost", "socket": "/a/socket"}'}
    run_id = put_run(bench.instance, dg.DagsterRunStatus.STARTED, {**here, "dagster/partition": KEY})
    # An audit takes its time, and whoever launches elsewhere looks after its own runs.
    put_run(bench.instance, dg.DagsterRunStatus.STARTED, here)
    put_run(bench.instance, dg.DagsterRunStatus.STARTED, {"dagster/partition": KEY})
    cursor = Cursor()

    def told(now: float) -> list[tuple[str, str]]:
        nonlocal cursor
        cursor, _ = lookout.look(bench.instance, Cursor.read(cursor.text()), now=now)
        return [(one.kind, subject) for subject, one in bench.outbox.open_subjects().items()]

    assert told(NOW) == told(NOW + 1800) == []
    paused = True
    assert told(NOW + 1810) == []
    paused = False
    assert told(NOW + 1820) == told(NOW + 3620) == []
    assert told(NOW + 3621) == told(NOW + 3640) == [("run_stuck", f"runs/{run_id}")]
    working.add(run_id)
    assert told(NOW + 3660) == []
    assert [one["event"] for one in bench.outbox.recent(9)] == ["raised", "recovered"]


def looking_out(bench, **changes) -> Lookout:
    """A lookout of no asset and no sensor, that of a home where nothing works."""
    nothing = {"assets": [], "watched": {}, "ticks": bench.home, "paused": lambda: False}
    return Lookout(bench.outbox, **{**nothing, "working": frozenset, "silence": 1e9, **changes})


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


def test_ten_thousand_failures_at_once_are_one_message_and_then_a_tick_costs_little(bench):
    """The storm is told once, with its count; a tick with ten thousand open and nothing new is cheap."""
    bench.tick()
    fail_everywhere(bench.instance, 10_000)
    bench.tick()
    assert bench.receiver.titles == ["10000 alerts of the kind check_failed"]
    bench.tick()
    started = time.process_time()
    bench.tick()
    spent = time.process_time() - started
    print(f"\na tick with 10,000 open alerts and nothing new: {spent:.3f} s of CPU")
    assert spent < 1.0
    assert len(bench.receiver.messages) == 1


def fail_everywhere(instance, partitions: int) -> None:
    """One result is reported, and its row copied for the other partitions: reporting each takes minutes."""
    import sqlalchemy as db
    from dagster._core.storage.event_log.schema import SqlEventLogStorageTable as Events

    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey("rows"), check_name="row_count", passed=False, partition="00000"
        )
    )
    with instance.event_log_storage.index_connection() as connection:
        newest = db.select(Events).order_by(Events.c.id.desc()).limit(1)
        row = dict(connection.execute(newest).mappings().one())
        del row["id"]
        keys = [f"{number:05d}" for number in range(1, partitions)]
        copies = [
            {**row, "partition": key, "event": row["event"].replace('"00000"', f'"{key}"')} for key in keys
        ]
        connection.execute(db.insert(Events), copies)


def test_with_a_full_disk_one_message_says_that_alerts_cannot_be_written(bench, monkeypatch):
    """The one trouble that cannot be written down is told all the same, once, and the cursor stays."""
    from resources.alerts import alert_log

    def full(*_):
        raise alert_log.AlertLogError(28, "could not add to alerts.jsonl: No space left on device")

    bench.run("check")
    with monkeypatch.context() as patched:
        patched.setattr(alert_log.AlertLog, "append", full)
        for _ in range(2):
            with pytest.raises(alert_log.AlertLogError):
                bench.tick()
    assert bench.receiver.titles == ["Alerts cannot be written down"]
    bench.tick()
    assert bench.receiver.titles[1:] == [f"row_count failed: rows {KEY}"]


def test_a_lost_database_neither_tells_again_nor_keeps_quiet(bench, tmp_path):
    """Dagster's state begins anew: what was told is known, what is new is told."""
    bench.run("check")
    bench.tick()
    (tmp_path / "anew").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "anew")) as anew:
        bench.instance, bench.cursor = anew, None
        bench.start_sensor()
        bench.run("check")
        bench.tick()
        assert len(bench.receiver.messages) == 1
        bench.run("warning")
        bench.tick()
    assert bench.receiver.titles[1:] == [f"row_count warns: rows {KEY}"]
    assert bench.receiver.repeated() == {}


def test_after_a_wiped_history_new_failures_are_told(bench):
    """`dagster run wipe` keeps the sensor's cursor, and the results count from 1 again."""
    for _ in range(3):
        bench.run("check")
    bench.tick()
    told = len(bench.receiver.messages)
    read = Cursor.read(bench.cursor)
    # As far on as a history of some weeks: further than a look goes back.
    bench.cursor = replace(read, evaluations=read.evaluations + 10_000).text()
    bench.instance.run_storage.wipe()
    bench.instance.event_log_storage.wipe()
    bench.run("warning")
    bench.tick()
    assert bench.receiver.titles[told:] == [f"row_count warns: rows {KEY}"]
    bench.tick()
    assert len(bench.receiver.messages) == told + 1


def test_a_full_disk_undoes_no_tick_that_has_told(bench, monkeypatch):
    """The note of the tick comes last: the cursor is kept, and somebody hears of the disk."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sensors.alerts.record_tick", full)
    bench.run("check")
    bench.tick()
    assert bench.receiver.titles == [f"row_count failed: rows {KEY}", "Alerts cannot be written down"]
    assert Cursor.read(bench.cursor).evaluations
