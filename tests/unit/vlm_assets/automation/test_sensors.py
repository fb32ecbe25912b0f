"""The ticks of the sensors and of the schedule as the definitions build them: noted at their end."""

import errno
from datetime import UTC, datetime

import dagster as dg
import pytest

from sensors.failed_partitions import FailedPartitions
from sensors.ticks import Ticks
from tests.support.listings import list_properties
from vlm_assets.automation.retries import build_retries
from vlm_assets.automation.sensors import (
    _untouched,
    build_health_watcher,
    close_old_tail,
    worker_limits,
)
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import load_settings
from vlm_assets.home_definitions import build_defs
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.tables import cancels
from vlm_engine.server.running_server import PATIENCE_SECONDS


def test_a_tick_of_the_schedule_that_fails_is_not_noted_and_a_note_that_fails_stops_no_work(
    dataset, monkeypatch, new_instance
):
    """A schedule that fails each time counts as silent; with a full disk the work is done all the same."""
    ticks = Ticks(control_state(dataset.settings))
    schedule = build_retries(dataset.settings, dg.StaticPartitionsDefinition(list(dataset.keys))).schedule

    def fail(*_, **__):
        raise RuntimeError("no work was done")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    # Dagster hands a schedule no instance that is in memory only. It opens an instance of its own. One that
    # is left to the garbage collector closes after this one, and leaves this one, closed, as Dagster's
    # current storage to every test that follows.
    with (
        new_instance("dagster") as instance,
        dg.build_schedule_context(instance, scheduled_execution_time=datetime.now(UTC)) as context,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(FailedPartitions, "tick", fail)
            with pytest.raises(RuntimeError, match="no work"):
                schedule(context)
        with monkeypatch.context() as patched:
            patched.setattr(Ticks, "record", full)
            assert schedule(context).skip_message
        assert ticks.last() == {}
        schedule(context)
    assert list(ticks.last()) == ["failed_partitions_again"]


def test_what_a_person_cancelled_is_not_started_as_new(dataset):
    """Also where its run was deleted since: nothing of it is on disk, and only the cancel says so."""
    settings, new = dataset.settings, "000000900-000000999"

    def cancel(connection):
        connection.execute(cancels.insert().values(partition=new, run_id="r", at=1.0))

    assert _untouched(settings, [new]) == [new]
    control_state(settings).write(cancel)
    assert _untouched(settings, [new]) == []


def test_a_stuck_worker_gets_the_settings_grace_to_commit(dataset):
    """As long as any other run that is told to end: killed before, it would lose finished rows."""
    settings = dataset.settings.model_copy(update={"grace_seconds": 77.0, "stuck_seconds": 88.0})
    watcher = build_health_watcher(settings)
    assert (watcher.ender.grace, watcher.limits.most) == (77.0, 88.0)


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:1/v1"])
def test_a_worker_that_waits_for_its_server_is_left_to_the_engine(dataset, url):
    """Whatever a model may take to load: a start, or an outage, is given up by the engine, never as stuck."""
    seconds = {"model_load_seconds": 500.0}
    server = dataset.settings.model_copy(update={"engine": "server", "server_url": url, **seconds})
    assert worker_limits(server).loading > (500.0 if url is None else PATIENCE_SECONDS)
    own = dataset.settings.model_copy(update=seconds)
    assert worker_limits(own).loading == 500.0
    assert worker_limits(server).least > 3 * server.server_token_seconds > worker_limits(own).least


def test_a_tick_with_nothing_to_tell_leaves_no_file_with_dagster(dataset, tmp_path, new_instance):
    """Dagster keeps a file for each tick that opens its log, for ever: a month would be a million files."""
    definitions = build_defs(dataset.settings)

    def tick_all(instance, number):
        for sensor in definitions.sensors:
            with dg.SensorEvaluationContext(
                instance_ref=instance.get_ref(),
                last_tick_completion_time=None,
                last_run_key=None,
                cursor=None,
                repository_name=None,
                instance=instance,
                log_key=["ticks", sensor.name, number],
            ) as context:
                sensor.evaluate_tick(context)
        for schedule in definitions.schedules:
            with dg.ScheduleEvaluationContext(
                instance_ref=instance.get_ref(),
                scheduled_execution_time=datetime.now(UTC),
                repository_name=None,
                schedule_name=schedule.name,
                log_key=["ticks", schedule.name, number],
            ) as context:
                schedule.evaluate_tick(context)

    with new_instance("dagster") as instance:
        # The first look at the files has much to tell.
        tick_all(instance, "first")
        tick_all(instance, "second")
    ticked = {one.name for one in (*definitions.sensors, *definitions.schedules)}
    assert Ticks(control_state(dataset.settings)).last().keys() == ticked
    assert list(tmp_path.rglob("second.*")) == []


def test_a_tail_is_closed_when_its_first_property_has_waited_long_enough(tmp_path):
    """Not a moment before: what is closed is a partition for ever."""
    home = tmp_path / "home"
    ingest(list_properties(tmp_path, 7), home, range_size=5)
    settings = load_settings(home=home, run_new_ranges_after_hours=1.0)
    since = Catalog.open(home).header.tail.since
    assert close_old_tail(settings, now=since + 3599.0) is None
    assert "The last 2 properties have waited long enough" in close_old_tail(settings, now=since + 3601.0)
    assert len(Catalog.open(home).ranges) == 2
    assert close_old_tail(settings, now=since + 9e9) is None, "there is no tail any more"
