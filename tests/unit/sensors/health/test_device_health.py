"""Sick, hot, lost and left-out devices: named once, left out after two failures, and the queue follows."""

from __future__ import annotations

from dataclasses import asdict, replace

import dagster as dg
from dagster._core.instance.config import PoolGranularity
from dagster._core.op_concurrency_limits_counter import GlobalOpConcurrencyLimitsCounter
from dagster._core.storage.dagster_run import RunOpConcurrency

from sensors.device_health import NONE_LEFT, usable_devices
from sensors.health_watch import Watch
from sensors.ticks import Ticks

HOT = "GPU-1 is throttled: it is too hot."
SICK = ("device_sick", "devices/GPU-1")
LEFT_OUT = ("device_left_out", "devices/GPU-1/left out")


@dg.job
def nothing():
    """A job whose runs are only ever pretended to be under way."""


def test_a_sick_device_is_named_once_and_its_recovery_too(tick, machine):
    """Throttling, ECC and the like come from the driver's word; a moment of it leaves nothing out."""
    assert tick() == []
    machine.against["GPU-1"] = [HOT]
    assert tick() == tick() == [SICK]
    machine.against.clear()
    assert tick() == [SICK], "it may come back in a moment"
    assert tick(601) == []


def test_a_device_that_stays_sick_is_left_out(tick, machine, watcher):
    """Ten minutes of it are two failures; a person is told how to take it back, and that it is back."""
    machine.against["GPU-1"] = [HOT]
    tick()
    assert tick(601) == [SICK, LEFT_OUT]
    (alert,) = [one for one in watcher.outbox.open_subjects().values() if one.kind == "device_left_out"]
    assert "--take-back GPU-1" in alert.next_step
    assert alert.actual == HOT
    machine.against.clear()
    tick()
    assert tick(601) == [LEFT_OUT], "sound again, but left out until a person takes it back"
    watcher.devices.left_out.take_back("GPU-1")
    assert tick() == []


def test_a_device_that_throttles_on_and_off_is_not_left_out(tick, machine, watcher):
    """Brief sightings, however many within ten minutes of each other, are one failure and one alert."""
    for _ in range(60):
        machine.against["GPU-1"] = [HOT]
        assert tick() == [SICK]
        machine.against.clear()
        assert tick() == tick() == [SICK]
    assert len(watcher.devices.left_out.records()["GPU-1"].failures) == 1
    assert tick(601) == []
    machine.against["GPU-1"] = [HOT]
    assert tick() == [SICK, LEFT_OUT], "a second time on one day"


def test_that_every_device_is_left_out_is_told_once_and_that_one_is_taken_back(tick, watcher, machine):
    """Each device's own alert says that the others take over: here none does, and all stands still."""
    leave_out(watcher, *(gpu.id for gpu in machine.listed))
    opened = tick()
    assert ("all_devices_left_out", NONE_LEFT) in opened
    alert = watcher.outbox.open_subjects()[NONE_LEFT]
    assert all(f"--take-back {gpu.id}" in alert.next_step for gpu in machine.listed)
    assert "GPU-2 is lost." in alert.actual
    machine.is_lost = True
    assert ("all_devices_left_out", NONE_LEFT) in tick()
    machine.is_lost = False
    tick()
    watcher.devices.left_out.take_back("GPU-2")
    assert ("all_devices_left_out", NONE_LEFT) not in tick()
    told = [one.alert.kind for one in watcher.outbox.recent(50) if one.happening == "raised"]
    assert told.count("all_devices_left_out") == 1
    leave_out(watcher, "GPU-2", runs="34")
    assert ("all_devices_left_out", NONE_LEFT) in tick(), "another time"


def test_a_device_that_a_cluster_gave_is_always_left_to_work_on(machine):
    """It is taken whatever is held against it, so nothing stands still for it."""
    given = replace(machine.listed[0], given=True)
    watch = Watch(devices={given.id: asdict(given)}, configured=[given.id])
    assert usable_devices(watch, [given.id]) == 1
    assert usable_devices(Watch(), ["GPU-1"]) == 1, "it is not known which devices there are"


def test_a_device_that_its_driver_slows_down_is_named_and_used(tick, machine, watcher):
    """A warm room must neither go unsaid nor take out a device that computes what it should."""
    hot = ("device_hot", "devices/GPU-1/hot")
    machine.hot["GPU-1"] = ["GPU-1 is throttled (at 87 °C): its driver slows it down, for it is too hot."]
    assert tick() == tick() == tick(601) == [hot]
    machine.hot.clear()
    assert tick() == tick(300) == [hot], "it may be as hot again in a moment"
    machine.hot["GPU-1"] = ["GPU-1 is throttled."]
    assert tick() == [hot]
    assert len(watcher.outbox.recent(10)) == 1
    machine.hot.clear()
    tick()
    assert tick(601) == []
    assert not watcher.devices.left_out.records()
    machine.hot["GPU-1"] = ["GPU-1 is throttled."]
    assert tick() == [hot], "another time"


def test_a_lost_device_is_named_though_nobody_lists_it(tick, machine):
    """A device that the driver lists no more would otherwise vanish without a word."""
    tick()
    machine.listed = [machine.listed[0], machine.listed[2]]
    assert tick() == [SICK]


def test_a_driver_that_does_not_answer_is_told_once_each_time(tick, machine, watcher):
    """Nothing is known of any device then, and nothing is held against one; the next time is told again."""
    for _ in range(2):
        machine.is_lost = True
        assert tick() == tick() == [("device_sick", "devices")]
        machine.is_lost = False
        assert tick() == []
    assert not watcher.devices.left_out.records()


def test_a_sick_device_that_was_told_of_is_known_though_the_watch_is_lost(watcher, look, machine, clock):
    """After a killed tick or a reboot it is the same trouble: one failure, one alert, and one recovery."""
    machine.against["GPU-1"] = [HOT]
    for _ in range(3):
        look(Watch.read(None, now=clock.now, unix=clock.now))
        clock.now += 15
    assert len(watcher.outbox.recent(10)) == 1
    assert len(watcher.devices.left_out.records()["GPU-1"].failures) == 1
    machine.against.clear()
    watch = Watch.read(None, now=clock.now, unix=clock.now)
    for _ in range(2):
        look(watch)
        watch.at += 600
    assert not watcher.outbox.open_subjects()


def test_a_silence_of_the_driver_is_told_once_though_the_watch_is_lost(watcher, look, machine, clock):
    """A tick that is killed after it told has lost what it remembered."""
    machine.is_lost = True
    for _ in range(3):
        look(Watch.read(None, now=clock.now, unix=clock.now))
        clock.now += 15
    assert len(watcher.outbox.recent(10)) == 1


def leave_out(watcher, *ids, runs="12"):
    """Two failures, of two runs, leave a device out."""
    for device in ids:
        for run in runs:
            watcher.devices.left_out.note_failure(device, occurrence=run, why=f"{device} is lost.")


def test_with_every_device_left_out_the_queue_waits_and_goes_on_by_itself(
    watcher, machine, sense, new_instance
):
    """Else one run after the other would wait for a device and end, for all of the night."""
    with new_instance("dagster") as instance:
        storage = instance.event_log_storage

        def starts_after_tick():
            """Whether Dagster would take a run from its queue."""
            sense(instance)
            counter = GlobalOpConcurrencyLimitsCounter(
                instance,
                [queued],
                [],
                storage.get_concurrency_keys(),
                storage.get_pool_limits(),
                pool_granularity=PoolGranularity.RUN,
            )
            return not counter.is_blocked(queued)

        needs = RunOpConcurrency(root_key_counts={}, has_unconstrained_root_nodes=False, all_pools={"gpu"})
        queued = instance.create_run_for_job(nothing)._replace(run_op_concurrency=needs)
        storage.set_concurrency_slots("gpu", 3)
        assert starts_after_tick()
        leave_out(watcher, *(gpu.id for gpu in machine.listed))
        assert [starts_after_tick(), starts_after_tick()] == [False, False]
        watcher.devices.left_out.take_back("GPU-2")
        assert starts_after_tick()
        assert sense(instance) == 1


def test_the_pool_has_room_for_a_run_that_is_prepared(watcher, machine, sense, new_instance):
    """One run more than devices in use, whichever are left out; none where no device is left."""
    limits = []
    with new_instance("dagster") as instance:
        instance.event_log_storage.set_concurrency_slots("gpu", 4)
        for gpu in machine.listed:
            leave_out(watcher, gpu.id)
            limits.append(sense(instance, prepared=1))
    assert limits == [3, 2, 0]


def test_the_pool_follows_the_devices_in_use(watcher, sense, new_instance):
    """A device left out takes no run; a lower limit that a person set stays theirs."""
    with new_instance("dagster") as instance:
        instance.event_log_storage.set_concurrency_slots("gpu", 3)
        assert sense(instance) == 3
        leave_out(watcher, "GPU-1")
        assert sense(instance) == 2
        instance.event_log_storage.set_concurrency_slots("gpu", 3)
        assert sense(instance) == 2, "a new start had set it for all devices"
        watcher.devices.left_out.take_back("GPU-1")
        assert sense(instance) == 3
        instance.event_log_storage.set_concurrency_slots("gpu", 1)
        leave_out(watcher, "GPU-1", runs="34")
        assert sense(instance) == 1
        watcher.devices.left_out.take_back("GPU-1")
        assert sense(instance) == 1
    assert "worker_health" in Ticks(watcher.outbox.state).last()
