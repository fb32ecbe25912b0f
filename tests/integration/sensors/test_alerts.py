"""The alerts sensor on a real Dagster instance with a real receiver: from a failing check to the message."""

import json
import time

import dagster as dg
import pytest

from tests.support.calls import calls_in
from vlm_durable.state.database import ControlState
from vlm_durable.state.sqlite_file import ControlStateError

ADDRESS = "http://127.0.0.1:3000"
KEY = "00007"
DO = "Put the missing images back."


def test_a_failing_check_reaches_the_receiver_with_all_that_is_needed_and_then_its_recovery(bench):
    """Partition, expected, found, link and next step, in one tick; told once; a notice when it passes."""
    run = bench.run("check")
    bench.tick()
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


def test_ten_thousand_failures_at_once_are_one_message_and_then_a_tick_costs_little(bench):
    """The storm is told once, with its count; a tick with ten thousand open and nothing new is cheap."""
    bench.tick()
    fail_everywhere(bench.instance, 10_000)
    bench.tick()
    assert bench.receiver.titles == ["Alerts: 10000 check_failed"]
    bench.tick()
    started = time.process_time()
    bench.tick()
    spent = time.process_time() - started
    print(f"\na tick with 10,000 open alerts and nothing new: {spent:.3f} s of CPU")
    assert calls_in(bench.tick) < 15 * 10_000
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

    def full(*_, **__):
        raise ControlStateError(28, "state.db cannot be used now: No space left on device")

    bench.run("check")
    with monkeypatch.context() as patched:
        patched.setattr(ControlState, "write", full)
        for told in [], ["Alerts cannot be written down"], ["Alerts cannot be written down"]:
            with pytest.raises(ControlStateError):
                bench.tick()
            assert bench.receiver.titles == told, "once, and not where the database was only busy for once"
        put_back = time.time() - 7200
        with patched.context() as clock:
            clock.setattr(time, "time", lambda: put_back)
            with pytest.raises(ControlStateError):
                bench.tick()
        assert len(bench.receiver.titles) == 2, "a clock that is put back mutes nothing"
    bench.tick()
    assert bench.receiver.titles[2:] == [f"row_count failed: rows {KEY}"]


def test_a_lost_database_neither_tells_again_nor_keeps_quiet(bench, new_instance):
    """Dagster's state begins anew: what was told is known, what is new is told."""
    bench.run("check")
    bench.tick()
    with new_instance("anew") as anew:
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
    read = json.loads(bench.cursor)
    # As far on as a history of some weeks: further than a look goes back.
    bench.cursor = json.dumps(read | {"evaluations": read["evaluations"] + 10_000})
    bench.instance.run_storage.wipe()
    bench.instance.event_log_storage.wipe()
    bench.run("warning")
    bench.tick()
    assert bench.receiver.titles[told:] == [f"row_count warns: rows {KEY}"]
    bench.tick()
    assert len(bench.receiver.messages) == told + 1


def test_what_passed_between_a_wiped_history_and_the_first_look_at_it_is_right_again(bench):
    """Its alert would stay open for ever: a first look goes by what stands, and this no longer does."""
    for _ in range(3):
        bench.run("check")
    bench.tick()
    bench.instance.run_storage.wipe()
    bench.instance.event_log_storage.wipe()
    bench.cursor = json.dumps(json.loads(bench.cursor) | {"evaluations": 10_000})
    bench.run("well")
    bench.tick()
    assert bench.receiver.titles[1:] == [f"Right again: row_count failed: rows {KEY}"]
    assert bench.outbox.open_subjects() == {}


def test_a_full_disk_undoes_no_tick_that_has_told(bench, monkeypatch):
    """The note of the tick comes last: the cursor is kept, and somebody hears of the disk."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sensors.ticks.Ticks.record", full)
    bench.run("check")
    bench.tick()
    bench.tick()
    assert bench.receiver.titles == [f"row_count failed: rows {KEY}", "Alerts cannot be written down"]
    assert json.loads(bench.cursor)["evaluations"]
