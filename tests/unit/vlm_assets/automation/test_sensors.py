"""The ticks of the sensors and of the schedule as the definitions build them: noted at their end."""

import errno
from datetime import UTC, datetime

import dagster as dg
import pytest

from sensors.failed_partitions import FailedPartitions
from sensors.published_file_drift import DriftWatcher
from sensors.ticks import Ticks
from sensors.worker_health import HealthWatcher
from tests.support.listings import list_properties
from vlm_assets.automation.retries import build_retries
from vlm_assets.automation.sensors import (
    _untouched,
    build_health_watcher,
    build_sensors,
    close_old_tail,
    worker_limits,
)
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import load_settings
from vlm_assets.home_definitions import build_defs
from vlm_durable.state.tables import cancels
from vlm_engine.server.running_server import PATIENCE_SECONDS

NAMES = [
    "failed_partitions_again",
    "failed_partitions_asked",
    "reconciliation",
    "published_file_drift",
    "worker_health",
]


@pytest.fixture
def tick(dataset):
    """Ticks one of them, by name."""
    partitions = dg.StaticPartitionsDefinition(list(dataset.keys))
    retrying = build_retries(dataset.settings, partitions)
    schedule = retrying.schedule
    built = [retrying.sensor, *build_sensors(dataset.settings, dataset.keys)]
    sensors = {one.name: one for one in built}

    def tick(name):
        if name in sensors:
            with dg.DagsterInstance.ephemeral() as instance:
                return sensors[name](dg.build_sensor_context(instance))
        # Dagster hands a schedule no instance that is in memory only.
        with dg.DagsterInstance.local_temp() as instance:
            at = datetime.now(UTC)
            # It opens an instance of its own. One that is left to the garbage collector closes after this
            # one, and leaves this one, closed, as Dagster's current storage to every test that follows.
            with dg.build_schedule_context(instance, scheduled_execution_time=at) as context:
                return schedule(context)

    return tick


@pytest.mark.parametrize("name", NAMES)
def test_a_tick_that_fails_is_not_noted(tick, dataset, monkeypatch, name):
    """One that fails each time must count as silent: a tick is noted when its work is done."""
    ticks = Ticks(control_state(dataset.settings))

    def fail(*_, **__):
        raise RuntimeError("no work was done")

    with monkeypatch.context() as patched:
        patched.setattr(FailedPartitions, "tick", fail)
        patched.setattr("sensors.retry_schedule.pending_request", fail)
        patched.setattr("sensors.reconciliation.report_published", fail)
        patched.setattr(DriftWatcher, "check", fail)
        patched.setattr(HealthWatcher, "check", fail)
        with pytest.raises(RuntimeError, match="no work"):
            tick(name)
    assert ticks.last() == {}
    tick(name)
    assert list(ticks.last()) == [name]


@pytest.mark.parametrize("name", NAMES)
def test_a_note_that_cannot_be_written_stops_no_work(tick, monkeypatch, name):
    """With the disk of the home full, dead runs are ended and stuck workers killed all the same."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Ticks, "record", full)
    assert tick(name).skip_message


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


def test_a_tick_with_nothing_to_tell_leaves_no_file_with_dagster(dataset, tmp_path):
    """Dagster keeps a file for each tick that opens its log, for ever: a month would be a million files."""
    definitions = build_defs(dataset.settings)

    def tick_all(instance, number):
        for sensor in definitions.sensors:
            with dg.SensorEvaluationContext(
                instance_ref=None,
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

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
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
