"""SIGKILL anywhere between posting and delivery: nothing is lost, and what repeats has the same id."""

import itertools
import random

import pytest

KILLS_A_ROUND = 5


@pytest.mark.parametrize("mode", ["kill", "torn"])
def test_a_kill_at_every_operation_of_posting_loses_nothing_promised(posters, mode):
    """Whatever operation a kill comes before, or in the middle of, what was posted stands, and once."""
    kills = 0
    for at in itertools.count(1):
        home = posters.new_home()
        struck = posters.run(home, numbers=[0, 1, 2], recover=[1], mode=mode, at=at)
        again = posters.run(home, numbers=[0, 1, 2], recover=[1])
        assert again.open == ["subject-0", "subject-2"]
        told = (home / "alerts" / "alerts.jsonl").read_text()
        for id_ in struck.posted:
            assert told.count(f'"event":"raised","id":"{id_}"') == 1, (mode, at)
        if struck.finished:
            break
        kills += 1
    assert kills >= 10, "the sweep met fewer file operations than three posts have"


def test_a_kill_at_every_operation_of_delivery_loses_nothing_and_repeats_at_most_one(
    posters, receiver, stride
):
    """Before, between and after sending and recording: every alert comes; a kill repeats one at most."""
    kills = repeats = 0
    for at in itertools.count(1, stride):
        home = posters.new_home()
        del receiver.messages[:]
        posted = posters.run(home, numbers=[0, 1])
        struck = posters.run(home, numbers=[], deliver=True, mode="kill", at=at)
        posters.run(home, numbers=[], deliver=True)
        assert set(receiver.ids) == set(posted.posted), at
        repeated = sum(count - 1 for count in receiver.repeated().values())
        assert repeated <= 1, (at, receiver.repeated())
        if struck.finished:
            assert repeated == 0
            break
        kills += 1
        repeats += repeated
    assert kills >= 20 / stride
    print(f"\n{kills} kills at operations of delivery: 0 alerts lost, {repeats} repeated with the same id")


def test_many_kills_at_random_moments_lose_nothing_and_repeat_only_with_the_same_id(
    posters, receiver, rounds, seed
):
    """A daemon that is killed again and again while it posts and delivers: all told in the end, counted."""
    choose = random.Random(seed)
    home = posters.new_home()
    numbers = itertools.count()
    promised: set[str] = set()
    recovered = kills = 0
    unfinished: list[int] = []
    while kills < KILLS_A_ROUND * rounds:
        # As a tick that is repeated: what it could not finish it posts again.
        mine = unfinished + [next(numbers) for _ in range(3)]
        struck = posters.run(
            home, numbers=mine, recover=mine[::3], deliver_each=True, after=choose.uniform(0.05, 4.0)
        )
        promised |= set(struck.posted)
        recovered += len(struck.recovered)
        unfinished = [] if struck.finished else mine[len(struck.posted) :]
        kills += struck.killed
    posters.run(home, numbers=unfinished, deliver=True)
    assert promised
    lost = promised - set(receiver.ids)
    assert not lost, (seed, lost)
    assert sum(title.startswith("Right again") for title in set(receiver.titles)) >= recovered, seed
    repeats = sum(count - 1 for count in receiver.repeated().values())
    assert repeats <= kills, (seed, receiver.repeated())
    print(f"\n{kills} kills at random: {len(promised)} alerts, 0 lost, {repeats} repeated with the same id")
