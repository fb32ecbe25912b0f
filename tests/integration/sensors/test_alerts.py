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
FAILED = f"file_stands failed: rows {KEY}"


def test_a_failing_check_reaches_the_receiver_with_all_that_is_needed_and_then_its_recovery(bench):
    """Partition, expected, found, link and next step. It is told once, however often the retries fail."""
    run = bench.run("check")
    bench.tick()
    assert bench.receiver.titles == [f"row_count failed: rows {KEY}"], "the failed run is told by its check"
    lines = bench.lines_of(0)
    for line in (
        f"Partition: {KEY}",
        "Expected: 20 rows",
        "Found: 19",
        f"Next step: {DO}",
        f"Look: {ADDRESS}/runs/{run.run_id}",
    ):
        assert line in lines
    bench.tick()
    bench.start_sensor()
    last = bench.run("check")
    bench.tick()
    assert len(bench.receiver.messages) == 1
    (standing,) = bench.outbox.open_subjects().values()
    assert standing.occurrence == last.run_id, "the list of what is wrong links to the latest run"
    bench.run("well")
    bench.tick()
    assert bench.receiver.titles[1:] == [f"Right again: row_count failed: rows {KEY}"]
    assert bench.outbox.open_subjects() == {}
    bench.run("check")
    bench.tick()
    assert bench.receiver.titles[2:] == [f"row_count failed: rows {KEY}"], "another trouble"


def test_each_trouble_is_told_in_its_own_words(bench):
    """A failed run with the asset's own sentence, a warning as one, a result without a run with its check."""
    run = bench.run("error")
    bench.tick()
    assert bench.receiver.titles == [f"Run failed: rows {KEY}"]
    assert "Found: The images of p1 are gone. Put them back." in bench.lines_of(0)
    assert f"Look: {ADDRESS}/runs/{run.run_id}" in bench.lines_of(0)
    bench.run("warning")
    bench.tick()
    warned = bench.receiver.titles.index(f"row_count warns: rows {KEY}")
    assert bench.receiver.messages[warned]["type"] == "warning"
    assert sorted(bench.receiver.titles[1:])[0] == f"Right again: Run failed: rows {KEY}"
    bench.evaluated()
    bench.tick()
    assert bench.receiver.titles[3:] == [f"file_stands failed: rows {KEY}"]
    assert f"Look: {ADDRESS}/assets/rows?view=checks&checkDetail=file_stands" in bench.lines_of(3)


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

    bench.evaluated()
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
    assert bench.receiver.titles[2:] == [FAILED]


def test_after_a_wiped_history_what_fails_is_told_and_what_passed_is_right_again(bench):
    """`dagster run wipe` keeps the sensor's cursor, and the results count from 1 again."""
    bench.evaluated()
    bench.tick()
    told = [FAILED, f"Right again: {FAILED}", FAILED]
    for passed, titles in ((True, told[:2]), (False, told)):
        read = json.loads(bench.cursor)
        # As far on as a history of some weeks: further than a look goes back.
        bench.cursor = json.dumps(read | {"evaluations": read["evaluations"] + 10_000})
        bench.instance.run_storage.wipe()
        bench.instance.event_log_storage.wipe()
        bench.evaluated(passed=passed)
        bench.tick()
        bench.tick()
        assert bench.receiver.titles == titles


def test_a_full_disk_undoes_no_tick_that_has_told(bench, monkeypatch):
    """The note of the tick comes last: the cursor is kept, and somebody hears of the disk."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sensors.ticks.Ticks.record", full)
    bench.evaluated()
    bench.tick()
    bench.tick()
    assert bench.receiver.titles == [FAILED, "Alerts cannot be written down"]
    assert json.loads(bench.cursor)["evaluations"]
