"""The triage: what is done, interrupted, failed or waiting, what it costs, and in which order it runs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from sensors.retry_ledger import Attempts, DoneAgain, Entry, note_done_again
from vlm_assets.assets import partition_state
from vlm_assets.assets.partition_state import PartitionState, State
from vlm_assets.commands.main import app
from vlm_assets.commands.status_view import view, watch_status
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.home_audit import audit
from vlm_assets.services.repairs import find_repairs
from vlm_assets.services.status import Status, read_status
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.files import seen_files
from vlm_durable.state import tables
from vlm_durable.state.database import open_state
from vlm_durable.state.pause import pause
from vlm_durable.state.workers import Phase, Workers
from vlm_durable.versions import verified_files
from vlm_durable.versions.version_mark import mark_copies
from vlm_engine.devices.left_out import LeftOutDevices
from vlm_engine.model_source import NO_EMBEDDER

LIGHT, HEAVY, MIDDLE, LAST = (f"{start:09d}-{start + 1:09d}" for start in (0, 2, 4, 6))


def status_of(settings: Settings) -> Status:
    chosen = settings.model_copy(update={"devices": "cpu:2"})
    return read_status(chosen, Catalog.open(settings.home))


def described(status: Status) -> dict[str, PartitionState]:
    """The partitions of the descriptions, by key."""
    return {one.key: one for one in status.partitions if one.asset == "property_descriptions"}


def states(status: Status) -> dict[str, State]:
    return {key: partition.state for key, partition in described(status).items()}


def text(status: Status) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(view(status))
    return console.file.getvalue()


def test_without_an_embedder_only_descriptions_are_to_do(uneven: Settings, published) -> None:
    """Describing waits for no embedding model: nothing is left, and a sentence says how to name one."""
    status = status_of(uneven.model_copy(update={"embedding_model": None}))
    assert status.assets == ("property_descriptions",)
    assert not status.keys_left()
    assert NO_EMBEDDER in status.next_steps
    named = status_of(uneven)
    assert named.keys_left()
    assert NO_EMBEDDER not in named.next_steps


def test_after_a_reboot_everything_waits_heaviest_first(uneven: Settings, commit, refuse) -> None:
    """Nothing runs: what is interrupted resumes at its percentage, what waits is in the order of its cost."""
    commit(uneven, HEAVY, 1)
    commit(uneven, MIDDLE, 2)
    refuse(uneven, MIDDLE)
    found = status_of(uneven)
    expected = [State.NOT_STARTED, State.INTERRUPTED, State.REFUSED, State.NOT_STARTED]
    assert list(states(found).values()) == expected
    assert [one.key for one in found.order] == [HEAVY, LAST, LIGHT, MIDDLE]
    interrupted = found.order[0]
    assert (interrupted.percent, interrupted.images_left, interrupted.turn) == (50.0, 8, 1)
    assert found.seconds_left is None
    said = text(found)
    assert f"{HEAVY}: interrupted at 50% (1 of 2): resumes from what is committed" in said
    assert "unknown yet" in said
    assert "1 interrupted: the next run of each goes on" in said


@pytest.mark.parametrize("generation", [None, "another"])
def test_finished_rows_that_no_check_refused_are_interrupted(uneven, commit, refuse, generation) -> None:
    """Stopped between the last commit and publication: it goes on at 100%, and nothing is computed again."""
    commit(uneven, MIDDLE, 2)
    if generation is not None:
        refuse(uneven, MIDDLE, generation=generation)
    status = status_of(uneven)
    (partition,) = [one for one in status.partitions if one.key == MIDDLE and one.images_left is not None]
    assert (partition.state, partition.percent, partition.usable_rows) == (State.INTERRUPTED, 100.0, 2)
    assert partition.images_left == 0
    assert find_repairs(uneven, audit(uneven, Catalog.open(uneven.home))) == []


def test_rate_and_time_left_follow_from_what_is_committed(dataset) -> None:
    """Rows per second of wall time; the time left is that of the rows left at this rate."""
    key = dataset.keys[2]
    for asset in (dataset.settings.descriptions, dataset.settings.embeddings):
        paths = asset.partition(key)
        for path in (paths.published, paths.record, paths.record_copy, *mark_copies(paths.version_mark)):
            path.unlink()
    found = status_of(dataset.settings)
    assert states(found)[key] is State.NOT_STARTED
    # Six properties in ten seconds, from the first to the last; three are left.
    assert found.properties_per_second == pytest.approx(0.6)
    assert found.seconds_left == pytest.approx(5.0)
    assert (found.ok, dict(found.failed_by_kind)) == (5, {"missing": 1})


def test_a_worker_that_lives_is_running_and_tells_its_rate(uneven: Settings) -> None:
    """A heartbeat whose lock is held: running, on its device, from its launch on; afterwards it is not."""
    workers = Workers(open_state(uneven.state_directory))
    with workers.begin(
        run_id="r1", asset="property_descriptions", partition=HEAVY, expected=2, began=time.time() - 100.0
    ) as beat:
        beat.enter(Phase.WORKING, device="cpu-1")
        beat.beat(computed=1, committed=1)
        found = status_of(uneven)
        assert states(found)[HEAVY] is State.RUNNING
        (running,) = [one for one in found.partitions if one.state is State.RUNNING]
        assert (running.percent, running.turn) == (50.0, None)
        device = next(one for one in found.devices if one.id == "cpu-1")
        assert device.partition == HEAVY
        # One row in the hundred seconds since its process was launched; seven are left.
        assert device.properties_per_second == found.properties_per_second == pytest.approx(0.01, rel=0.2)
        assert found.seconds_left == pytest.approx(700, rel=0.2)
        assert "working on cpu-1" in text(found)
    assert states(status_of(uneven))[HEAVY] is State.NOT_STARTED


def test_the_copy_lag_is_of_the_workers_own_clock(uneven: Settings) -> None:
    """Another machine's clock may be an hour behind: its lag is as long as it says."""

    def skewed() -> float:
        return time.time() - 3600.0

    workers = Workers(open_state(uneven.state_directory))
    with workers.begin(
        run_id="r1", asset="property_descriptions", partition=HEAVY, expected=2, clock=skewed
    ) as beat:
        beat.copy(3, skewed() - 50.0)
        found = status_of(uneven)
        assert (found.uncopied, found.uncopied_seconds) == (3, pytest.approx(50.0, abs=5.0))
        beat.copy(0, None)
        found = status_of(uneven)
        assert (found.uncopied, found.uncopied_seconds) == (0, 0.0)


def test_what_needs_a_person_is_said_and_has_no_turn(uneven: Settings) -> None:
    """Given up, failed, cancelled, a device left out, a pause: each with its sentence."""
    state = control_state(uneven)
    entries = {
        HEAVY: Entry(HEAVY, attempts=5, given_up=True),
        MIDDLE: Entry(MIDDLE, attempts=2, not_before=1e9),
    }
    assert Attempts(state).write(entries, read={})
    cancel = tables.cancels.insert().values(partition=LIGHT, run_id="r", at=1.0)
    state.write(lambda connection: connection.execute(cancel))
    pause(state, "the night", now=1e9)
    out = LeftOutDevices(state)
    for run in ("r1", "r2"):
        out.note_failure("cpu-0", occurrence=run, why="It failed.")
    found = status_of(uneven)
    assert states(found) == {
        LIGHT: State.CANCELLED,
        HEAVY: State.GIVEN_UP,
        MIDDLE: State.FAILED,
        LAST: State.NOT_STARTED,
    }
    assert [one.key for one in found.order] == [LAST, MIDDLE]
    said = text(found)
    assert "the night" in said
    assert "failed 2 times in a row without progress" in said
    assert "cpu-0 is left out since it failed 2 times" in " ".join(said.split())


def test_open_alerts_are_said_first_and_no_longer_once_they_are_right(uneven: Settings) -> None:
    """One look tells what needs a person: a silent sensor or a foreign file is the state of no partition."""
    outbox = Outbox(open_state(uneven.state_directory))
    alert = Alert("sensor_silent", "sensor/alerts", "1", "error", "alerts has gone silent", "Look.")
    outbox.post(alert)
    found = status_of(uneven)
    assert found.open_alerts == ("alerts has gone silent",)
    assert found.next_steps[0] == "Open alerts: 1, the latest: alerts has gone silent. `vlm-assets alerts`."
    assert found.next_steps[0] in text(found)
    outbox.note_recovery("sensor/alerts", sentence="It ticks.", at=2.0)
    assert status_of(uneven).open_alerts == ()


def test_what_was_tried_again_in_the_night_and_is_done_is_listed(uneven: Settings) -> None:
    """In the morning one look tells what was retried, for people and for machines; --since asks for more."""
    now = time.time()
    hours_ago = {HEAVY: 3, LIGHT: 5, MIDDLE: 50}
    done = [DoneAgain(key, now - 3600 * ago, ago // 3, "its run crashed") for key, ago in hours_ago.items()]
    note_done_again(control_state(uneven), done, now=now)
    found = status_of(uneven)
    assert [one.key for one in found.done_again] == [LIGHT, HEAVY]
    assert [one["key"] for one in json.loads(json.dumps(found.as_json()))["done_again"]] == [LIGHT, HEAVY]
    assert "Tried again by itself and done since" in text(found)
    assert "after 1 new run; its run crashed" in text(found)
    since = datetime.fromtimestamp(now - 60 * 3600).isoformat(timespec="seconds")
    command = ["status", "--home", str(uneven.home), "--json", "--since", since]
    asked = CliRunner().invoke(app, command)
    assert [one["key"] for one in json.loads(asked.stdout)["done_again"]] == [MIDDLE, LIGHT, HEAVY]


def test_what_is_described_and_not_embedded_is_said(dataset) -> None:
    """Nothing is left to describe: what is left is named all the same, until all of it is published."""
    assert status_of(dataset.settings).next_steps == (
        "Everything is published; `vlm-assets audit --deep` proves it.",
    )
    dataset.embeddings.set_aside(dataset.keys[0])
    steps = status_of(dataset.settings).next_steps
    assert steps[0].startswith("1 described and not embedded yet")


def test_machines_get_everything(uneven: Settings, commit) -> None:
    """--json holds every partition with its cost, turn and percentage."""
    commit(uneven, HEAVY, 1)
    told = json.loads(json.dumps(status_of(uneven).as_json()))
    assert len(told["partitions"]) == 8
    heavy = next(one for one in told["partitions"] if one["key"] == HEAVY)
    assert (heavy["state"], heavy["turn"], heavy["percent"], heavy["images_left"]) == (
        "interrupted",
        1,
        50.0,
        8,
    )
    assert told["next_steps"]


def test_watch_follows_until_ctrl_c(uneven: Settings, commit) -> None:
    """Each look is read anew and shown; Ctrl-C ends it without an error."""
    looks: list[State] = []

    def read() -> Status:
        found = status_of(uneven)
        looks.append(states(found)[HEAVY])
        return found

    def wait(_: float) -> None:
        if len(looks) == 2:
            raise KeyboardInterrupt
        commit(uneven, HEAVY, 1)

    console = Console(file=io.StringIO(), width=120, height=60, force_terminal=True)
    watch_status(read, console, wait=wait)
    assert looks == [State.NOT_STARTED, State.INTERRUPTED]
    assert "at 50% (1 of 2)" in console.file.getvalue()


def test_each_published_file_is_read_once_and_not_again_at_the_next_look(dataset, monkeypatch) -> None:
    """A look at thousands of partitions reads what is new; of each other one it reads the record, once."""
    monkeypatch.setattr(seen_files, "_SETTLED_NS", 0)
    read: Counter[str] = Counter()

    def counted(module: ModuleType, name: str, count: Callable[..., int]) -> None:
        original = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            read[name] += count(*arguments, **named)
            return original(*arguments, **named)

        monkeypatch.setattr(module, name, call)

    counted(verified_files, "judge", lambda path, record, *, deep, asset: int(deep))
    counted(partition_state, "read_record", lambda files: 1)
    both = 2 * len(dataset.keys)
    first = status_of(dataset.settings)
    assert read == {"judge": both, "read_record": both}
    read.clear()
    again = status_of(dataset.settings)
    assert read == {"read_record": both}
    assert again.partitions == first.partitions


def test_what_was_given_up_says_so_in_words(uneven: Settings) -> None:
    """Never the mark by which the retries know what they told last."""
    entries = {
        LIGHT: Entry(LIGHT, attempts=5, given_up=True, told="interrupted"),
        HEAVY: Entry(HEAVY, attempts=1, given_up=True, told="person: 1f2e3d"),
    }
    assert Attempts(control_state(uneven)).write(entries, read={})
    found = described(status_of(uneven))
    for key, times in ((LIGHT, "5 times"), (HEAVY, "once")):
        said = (
            f"needs you: failed {times} in a row without progress. It is not tried again by itself: put that"
            f" right, then {command('run', key)}"
        )
        assert (found[key].state, found[key].note) == (State.GIVEN_UP, said)


def test_a_first_failure_says_when_and_why_it_is_tried_again(uneven: Settings) -> None:
    """What never started is no failure; what a run stopped for is a person's from the first time on."""
    entries = {
        LIGHT: Entry(LIGHT, reckoned="r1", not_before=2e9, why="the disk is full"),
        HEAVY: Entry(HEAVY, reckoned="r2", interruptions=1, not_before=2e9, why="the machine was too busy"),
        MIDDLE: Entry(MIDDLE, reckoned="r3", told="person: r3", why="the answers are garbage"),
    }
    assert Attempts(control_state(uneven)).write(entries, read={})
    found = described(status_of(uneven))
    failed, interrupted, left = (found[key] for key in entries)
    assert (failed.state, interrupted.state) == (State.FAILED, State.NOT_STARTED)
    assert left.state is State.GIVEN_UP
    assert re.search("its last run failed; tried again after 2033-.*, because the disk is full", failed.note)
    assert re.search("interrupted; tried again after 2033-.*, because the machine was", interrupted.note)
    assert re.search(f"needs you: .*garbage.*`vlm-assets run {MIDDLE}", left.note)
    lines = text(status_of(uneven)).splitlines()
    listed = [line for line in lines if line.startswith("property_descriptions ")]
    keys = [line.split()[1].rstrip(":") for line in listed]
    assert sorted(keys) == sorted(entries), "what waits and has not been tried is counted, not listed"


def test_a_refusal_that_needs_a_person_is_told_whole(uneven: Settings, commit, refuse) -> None:
    """What the check says and what to do is not replaced by the shortened error of the run."""
    commit(uneven, LIGHT, 2)
    refuse(uneven, LIGHT)
    entry = Entry(LIGHT, reckoned="r1", told="person: r1", why="the beginning of")
    assert Attempts(control_state(uneven)).write({LIGHT: entry}, read={})
    found = described(status_of(uneven))[LIGHT]
    assert found.state is State.GIVEN_UP
    assert re.search("^needs you: .*: failed_share: 2 of 2 properties failed", found.note)
    assert "the beginning of" not in found.note


def test_a_cpu_slot_is_never_missing(dataset) -> None:
    """`make run` has more slots than the settings alone give: what they made is no lost device's later."""
    for key, device in zip(dataset.keys, ("cpu-0", "cpu-1", "GPU-1"), strict=True):
        dataset.describe(key, lambda rows, device=device: [{**row, "device": device} for row in rows])
    found = read_status(dataset.settings.model_copy(update={"devices": "cpu:1"}), dataset.catalog)
    assert {one.id: one.is_here for one in found.devices} == {"cpu-0": True, "cpu-1": True, "GPU-1": False}


@pytest.mark.parametrize("first", [Phase.WORKING, Phase.PUBLISHING])
def test_a_device_is_shown_with_who_works_on_it_and_not_with_who_still_publishes(dataset, first) -> None:
    """A run gives its device back before it publishes, and the next one has it already."""
    workers = Workers(control_state(dataset.settings))
    phases = {"one": first, "two": Phase.PUBLISHING if first is Phase.WORKING else Phase.WORKING}
    with contextlib.ExitStack() as running:
        for run, phase in phases.items():
            begun = workers.begin(run_id=run, asset="property_descriptions", partition=run, expected=9)
            running.enter_context(begun).enter(phase, device="cpu-0")
        (device,) = read_status(dataset.settings, dataset.catalog).devices
    assert phases[device.partition] is Phase.WORKING
