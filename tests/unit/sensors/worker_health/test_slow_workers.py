"""Workers that are slower than their peers are named; nothing is concluded from a gap in watching."""

from __future__ import annotations

import json
from dataclasses import replace

from resources.alerts.alert import Alert
from resources.processes import boot_id
from resources.state.database import open_state
from resources.state.workers import Phase, Workers
from sensors.health_watch import Watch


def test_a_slow_worker_is_named_after_ten_minutes_and_when_it_keeps_pace(
    tick, watcher, monkeypatch, tmp_path
):
    """30% below its peers without a break: a warning that names device and partition; then its end."""
    with Workers(open_state(tmp_path)).begin(run_id="r0", asset="a", partition="k0", expected=9) as beat:
        made = replace(beat.worker, phase=Phase.WORKING, batch_seconds=10.0)
    working = [
        replace(made, run_id=f"r{n}", partition=f"k{n}", device=f"GPU-{n}", rate=10.0) for n in range(3)
    ]
    rates = {1: 6.0}

    def living(self):
        now = watcher.monotonic()
        return [replace(one, moved=now, rate=rates.get(n, one.rate)) for n, one in enumerate(working)]

    monkeypatch.setattr(Workers, "living", living)
    assert [tick(60) for _ in range(10)] == [[]] * 10
    assert tick(60) == tick(60) == [("worker_slow", "devices/GPU-1/slow")]
    (alert,) = watcher.outbox.open_subjects().values()
    assert (alert.severity, alert.partition, alert.page) == ("warning", "k1", "runs/r1")
    assert "40% slower" in alert.title
    rates[1] = 9.0
    assert tick(60) == []


def test_nobody_stays_slow_when_all_is_done(tick, watcher, clock):
    """What is open is what is wrong now; a moment between two partitions is no end."""
    slow = "devices/GPU-1/slow"
    watcher.outbox.post(Alert("worker_slow", slow, "r1", "warning", "It is slow", "Look.", at=clock.now))
    assert [tick(60) for _ in range(10)] == [[("worker_slow", slow)]] * 10
    assert tick(60) == []


def test_a_gap_in_watching_starts_everybodys_time_anew(clock):
    """After a night's sleep, a reboot, or a cursor that does not read, nothing is concluded from before."""
    watch = Watch(boot=boot_id(), at=1000.0, since=500.0, slow={"r.a": 600.0}, left_out=["GPU-1"])
    cursor = json.dumps(watch.__dict__)
    assert Watch.read(cursor, now=1015.0, unix=1015.0).since == 500.0
    assert Watch.read(cursor, now=2000.0, unix=2000.0).since == 2000.0
    rebooted = Watch.read(cursor.replace(boot_id(), "another boot"), now=20.0, unix=20.0)
    assert (rebooted.since, rebooted.slow, rebooted.left_out) == (20.0, {}, ["GPU-1"])
    for broken in (None, "", "{", '{"other": 1}', "[]"):
        assert Watch.read(broken, now=7.0, unix=7.0).since == 7.0
