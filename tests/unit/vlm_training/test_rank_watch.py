"""A rank that holds the others up is named with what it works on, and no sound one is."""

from pathlib import Path

import pytest

from sensors.progress_judge import ProgressLimits, Reading, Standstill
from vlm_training.rank_watch import (
    Activity,
    Position,
    PositionFile,
    SlowRanks,
    StepWatch,
    blocking_ranks,
    rank_limits,
)


def test_a_rank_says_where_it_is(tmp_path: Path) -> None:
    """Which microbatch, of which properties, and what it does with them."""
    file = PositionFile(tmp_path / "rank-0.at")
    assert Position.read(tmp_path / "rank-0.at") == Position()
    file.begin(["p1", "a longer id"])
    file.enter(Activity.COMPUTING)
    file.begin([f"p{number}" for number in range(7)])
    found = Position.read(tmp_path / "rank-0.at")
    assert (found.round, found.activity) == (2, Activity.LOADING)
    assert found.sentence() == "loading the images of p0, p1, p2, p3, p4 and 2 more"


@pytest.mark.parametrize(
    ("rounds", "activities", "stopped", "stuck"),
    [
        ((3, 3), (Activity.WAITING, Activity.LOADING), (False, False), [1]),
        ((4, 3), (Activity.WAITING, Activity.WAITING), (False, False), [1]),
        ((3, 3), (Activity.WAITING, Activity.WAITING), (False, True), [1]),
        ((3, 3), (Activity.WAITING, Activity.WAITING), (False, False), [0, 1]),
        ((1,), (Activity.COMPUTING,), (False,), [0]),
    ],
)
def test_the_rank_that_the_others_wait_for_is_found(rounds, activities, stopped, stuck) -> None:
    """By what each has begun, what it does, and whether the system lets it run."""
    positions = [Position(number, activity) for number, activity in zip(rounds, activities, strict=True)]
    assert blocking_ranks(positions, stopped) == stuck


def test_a_torn_word_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once more; a rank whose word stays unreadable is not taken for one that has not begun."""
    path, read = tmp_path / "rank-0.at", Path.read_bytes
    PositionFile(path).begin(["p1"])
    words = [b'{"round": 1', read(path)]
    with monkeypatch.context() as torn:
        torn.setattr(Path, "read_bytes", lambda _: words.pop(0))
        assert Position.read(path).round == 1
    path.write_bytes(b'{"round": 2')
    unknown = Position.read(path)
    assert unknown.activity is Activity.UNKNOWN
    assert blocking_ranks([unknown, Position(7, Activity.COMPUTING), Position(8)], [False] * 3) == [1]
    assert blocking_ranks([unknown, unknown], [False, True]) == [1]


def test_a_step_is_read_as_a_worker_is() -> None:
    """A learned time of steps alone; the start and the measuring of an epoch have none."""
    watch = StepWatch(ProgressLimits(least=2.0, most=100.0, loading=1000.0, learned_times=1.5), 0.0)
    assert watch.overdue(1000.0) is None
    assert watch.overdue(1001.0) == Standstill(1001.0, 1000.0)
    watch.note("restored", 10.0)
    assert watch.reading == Reading(10.0, is_paced=True), "no rhythm is known yet"
    for at in (50.0, 51.0, 55.0):
        watch.note("step", at)
    assert watch.reading == Reading(55.0, is_paced=True, learned_seconds=4.0)
    watch.note("warning", 60.0)
    assert watch.overdue(61.0) is None
    assert watch.overdue(61.5) == Standstill(6.5, 6.0), "a warning is no step"
    watch.note("measuring", 62.0)
    assert watch.reading == Reading(62.0, is_paced=True)
    watch.note("epoch", 300.0)
    watch.note("step", 301.0)
    assert watch.reading.learned_seconds == 4.0, "the measuring is no step"
    watch.note("epoch", 302.0)
    watch.note("evaluating", 302.5)
    assert not watch.reading.is_paced, "the finished model is asked about held-out properties"


def test_a_stuck_rank_is_ended_before_its_whole_run_is() -> None:
    """The health sensor has the same judge: it would end all ranks, and name none."""
    of_run = ProgressLimits()
    of_rank = rank_limits(of_run)
    for learned in (0.0, 1.0, 30.0, 1e4):
        reading = Reading(0.0, is_paced=True, learned_seconds=learned)
        assert of_rank.allowed_seconds(reading) < of_run.allowed_seconds(reading)


def test_a_slow_rank_is_named_once_while_it_lasts() -> None:
    """Far above the others' median for long: its number, its seconds and the batch at which it was worst.

    And once when it is over.
    """
    watch, told = SlowRanks(seconds=60.0), list[tuple[str, int, str]]()
    for step in range(100):
        own = 2.0 if step == 30 else 0.5
        told += watch.note([0.2, own], [f"p{step}"], float(step))
    ((event, rank, said),) = told
    assert (event, rank) == ("slow", 1)
    assert "Rank 1 is slow: it needs 0.50 s for a microbatch and the others 0.20 s" in said
    assert "slowest in the batch of p30" in said
    told = [one for step in range(100, 200) for one in watch.note([0.2, 0.2], ["p"], float(step))]
    assert told == [("keeps pace", 1, "Rank 1 keeps pace with the others again.")]


def test_ranks_that_keep_pace_are_not_named() -> None:
    """A little slower, or slow for a moment, is no reason to wake anybody."""
    watch = SlowRanks(seconds=10.0)
    assert not [
        one
        for step in range(300)
        for one in watch.note([0.2, 2.0 if step % 10 == 0 else 0.25], ["p"], float(step))
    ]
