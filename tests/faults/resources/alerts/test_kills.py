"""SIGKILL anywhere between posting and delivery: nothing is lost, and what repeats has the same id."""

import itertools
import random
import re

import pytest

from tests.support.shares import share_of

KILLS_A_ROUND = 3
SHARES = 15
STEPS = 999
"""More than a process has."""


def test_a_kill_at_every_step_of_posting_loses_nothing_promised(posters):
    """Whatever statement or commit a kill comes before, what was posted stands, and once."""
    kills = 0
    for at in share_of(range(1, STEPS), SHARES):
        home = posters.new_home()
        struck = posters.run(home, numbers=[0, 1, 2], recover=[1], at=at)
        again = posters.run(home, numbers=[0, 1, 2], recover=[1])
        assert again.open == ["subject-0", "subject-2"]
        assert len(set(again.raised)) == len(again.raised) == 3, at
        assert set(struck.posted) <= set(again.raised), at
        if struck.finished:
            break
        kills += 1
    assert kills >= 40 / SHARES - 1, "the sweep met fewer steps than three posts have"


def test_a_kill_at_every_step_of_delivery_loses_nothing_and_repeats_at_most_one(posters, receiver):
    """Before, between and after claiming, sending and marking: every alert comes; a kill repeats one."""
    kills = repeats = 0
    for at in share_of(range(1, STEPS), SHARES):
        home = posters.new_home()
        del receiver.messages[:]
        posted = posters.run(home, numbers=[0, 1])
        struck = posters.run(home, numbers=[], deliver=True, send_from_here=True, at=at)
        posters.run(home, numbers=[], deliver=True, send_from_here=True)
        assert set(receiver.ids) == set(posted.posted), at
        repeated = sum(count - 1 for count in receiver.repeated().values())
        assert repeated <= 1, (at, receiver.repeated())
        if struck.finished:
            assert repeated == 0
            break
        kills += 1
        repeats += repeated
    assert kills >= 30 / SHARES - 1
    print(f"\n{kills} kills at steps of delivery: 0 alerts lost, {repeats} repeated with the same id")


@pytest.mark.parametrize(("step", "sent"), share_of([("send", 0), ("mark", 1), ("marked", 1)], 3))
def test_what_was_claimed_is_sent_again_with_the_same_id(posters, receiver, step, sent):
    """A kill between claim and send, between send and mark, and before the mark is durable."""
    home = posters.new_home()
    posted = posters.run(home, numbers=[0], recover=[0])
    assert posters.run(home, numbers=[], deliver=True, kill_before=step).killed
    assert len(receiver.ids) == sent
    posters.run(home, numbers=[], deliver=True)
    assert receiver.ids[:sent] == posted.posted[:sent]
    assert receiver.ids[sent] == posted.posted[0]
    assert receiver.titles[-1] == "Right again: alert 0"
    assert len(receiver.ids) == sent + 2


def test_many_kills_at_random_moments_lose_nothing_and_repeat_only_with_the_same_id(
    posters, receiver, rounds, seed
):
    """A daemon that is killed again and again while it posts and delivers: all told in the end, counted."""
    choose = random.Random(seed)
    home = posters.new_home()
    numbers = itertools.count()
    promised: set[str] = set()
    kills = 0
    unfinished: list[int] = []
    while kills < KILLS_A_ROUND * rounds:
        # As a tick that is repeated: what it could not finish it posts again.
        mine = unfinished + [next(numbers) for _ in range(3)]
        struck = posters.run(
            home, numbers=mine, recover=mine[::3], deliver_each=True, after=choose.uniform(0.05, 4.0)
        )
        promised |= {f"alert {number}" for number in mine[: len(struck.posted)]}
        promised |= {f"Right again: alert {number}" for number in struck.recovered}
        unfinished = [] if struck.finished else mine[len(struck.posted) :]
        kills += struck.killed
    posters.run(home, numbers=unfinished, deliver=True)
    assert promised
    lost = promised - told(receiver)
    assert not lost, (seed, lost)
    repeats = sum(count - 1 for count in receiver.repeated().values())
    assert repeats <= kills, (seed, receiver.repeated())
    print(f"\n{kills} kills at random: {len(promised)} alerts and ends, 0 lost, {repeats} repeated, same id")


def told(receiver) -> set[str]:
    """Everything that was told, by the title that it has by itself; a group names its kinds, each once."""
    titles = set(receiver.titles)
    for number, ends in re.findall(r"1 kind-(\d+)( right again)?", " ".join(titles)):
        titles.add(f"{'Right again: ' if ends else ''}alert {number}")
    return titles
