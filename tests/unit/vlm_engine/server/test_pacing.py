"""The limit on requests at once, the slots that hold to it, and how long a server is left alone."""

import asyncio
import random
from collections import deque
from datetime import UTC, datetime

import pytest

from vlm_engine.server.chat_completions import RequestLimits
from vlm_engine.server.pacing import (
    MOST_RETRY_AFTER_SECONDS,
    AdaptiveLimit,
    Slot,
    back_off_seconds,
    retry_after_seconds,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def limit(clock):
    return AdaptiveLimit(32, clock=clock)


def answer(limit, clock, *, full=True, images=10, seconds=0.5, asked_at=None):
    clock.now += 1.0
    asked_at = clock.now - 0.5 if asked_at is None else asked_at
    limit.answered(Slot(asked_at, full), images=images, first_token_seconds=seconds)


def test_limit_doubles_a_round_until_the_first_refusal_and_then_creeps(limit, clock):
    """A fast server is filled within seconds; one that refused once is asked for one more at a time."""
    for _ in range(12):
        answer(limit, clock)
    assert limit.requests == 16
    clock.now += 1
    limit.refused(Slot(clock.now, full=False))
    assert limit.requests == 8
    for _ in range(8):
        answer(limit, clock)
    assert limit.requests == 8
    answer(limit, clock)
    assert limit.requests == 9


@pytest.mark.parametrize(
    ("most", "seconds", "requests"),
    [(128, 0.0, 32), (128, 0.3, 32), (128, 1.2, 32), (128, 5.4, 7), (128, 60.0, 4), (16, 0.3, 16)],
)
def test_the_first_token_opens_the_limit(clock, most, seconds, requests):
    """A fast server has 32 requests after one prompt, and a slow one no more than it answers in time."""
    limit = AdaptiveLimit(most, clock=clock, patience=120.0)
    limit.first_token(seconds)
    assert limit.requests == requests
    limit.first_token(0.01)
    assert limit.requests == requests, "one token opens it"


def test_what_was_asked_of_an_idle_server_is_no_measure(clock):
    """Guards: the requests before the opening made the queue of the others look slow, and cut the limit."""
    limit = AdaptiveLimit(128, clock=clock, patience=120.0)
    limit.first_token(0.3)
    for _ in range(4):
        limit.answered(Slot(-1.0, full=True), images=10, first_token_seconds=0.3)
    assert limit.requests == 36
    for place in range(1, 29):
        answer(limit, clock, seconds=0.3 * place, full=False, asked_at=0.0)
    assert limit.requests == 36


def test_a_refusal_or_a_new_process_is_not_opened(limit, clock):
    """What showed that four are too much, or died of what was asked at once, gets no 32 at once."""
    clock.now = 1.0
    limit.refused(Slot(1.0, full=False))
    limit.first_token(0.01)
    assert limit.requests == 2
    limit.start_anew()
    limit.first_token(0.01)
    assert limit.requests == 4
    for _ in range(4):
        answer(limit, clock)
    assert limit.requests == 8


def test_requests_refused_together_cut_once(limit, clock):
    """A burst of 429s from one overload halves the limit once, not down to one."""
    for _ in range(28):
        answer(limit, clock)
    assert limit.requests == 32
    asked_at = clock.now
    clock.now += 1
    for _ in range(32):
        limit.refused(Slot(asked_at, full=False))
    assert limit.requests == 16


def test_limit_stays_between_one_and_most(limit, clock):
    """Whatever happens, one request is under way, and never more than the settings allow."""
    for _ in range(20):
        clock.now += 1
        limit.refused(Slot(clock.now, full=False))
    assert limit.requests == 1
    limit.start_anew()
    for _ in range(100):
        answer(limit, clock)
    assert limit.requests == 32
    assert AdaptiveLimit(2, clock=clock).requests == 2


def test_limit_grows_only_where_it_was_reached(limit, clock):
    """Answers of a half-empty server prove nothing about more requests."""
    for _ in range(20):
        answer(limit, clock, full=False)
    assert limit.requests == 4


def test_queueing_in_the_server_shrinks_the_limit(limit, clock):
    """First tokens that wait in the server's own line take the limit back before anything times out."""
    for _ in range(28):
        answer(limit, clock, seconds=0.5)
    answer(limit, clock, seconds=5.0)
    assert limit.requests == 28
    answer(limit, clock, seconds=5.0, asked_at=clock.now - 3)
    assert limit.requests == 28, "asked before the last cut"


def test_many_images_are_no_queue(limit, clock):
    """A property with twelve images takes longer than one with a single image, and that is no overload."""
    answer(limit, clock, images=1, seconds=0.5)
    answer(limit, clock, images=12, seconds=6.0)
    assert limit.requests == 6


def test_answers_out_of_a_cache_call_no_other_slow(limit, clock):
    """One in ten at once, or a whole round at the start: the limit stays where a steady server had it."""
    for _ in range(32):
        answer(limit, clock, seconds=0.0)
    for number in range(600):
        answer(limit, clock, seconds=0.1 if number % 10 == 0 else 2.5)
    assert limit.requests >= 30


def test_answer_that_tells_no_time_counts_as_an_answer(limit, clock):
    """What was asked again or is empty neither slows nor stops the growth."""
    for _ in range(28):
        answer(limit, clock, seconds=None)
    assert limit.requests == 32
    answer(limit, clock, seconds=5.0)
    assert limit.requests == 32, "it is the first that tells"


def test_slower_server_is_believed_in_time(limit, clock):
    """One lucky answer does not call the server slow for ever."""
    answer(limit, clock, seconds=0.05)
    for _ in range(600):
        answer(limit, clock, seconds=1.5)
    assert limit.requests >= 30


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 10))


async def turns(number=5):
    for _ in range(number):
        await asyncio.sleep(0)


def holder(limit, entered, leave, *, alone=False, name=None):
    async def hold():
        async with limit.slot(alone=alone):
            entered.append(name)
            await leave.wait()

    return asyncio.create_task(hold())


@pytest.mark.parametrize(
    ("prompt_seconds", "step_seconds", "first_requests"),
    [(0.06, 0.004, 32), (0.3, 0.008, 32), (5.4, 0.03, 7)],
    ids=["2B on an H100", "7B on an H100", "7B on a small GPU"],
)
def test_a_server_has_enough_to_do_and_not_too_much(clock, prompt_seconds, step_seconds, first_requests):
    """By default a server computes prompts without a pause, and answers each before it is given up as silent.

    By arithmetic: prompts one after another, and beside each 0.12 s of them a step of all answers (128
    tokens).
    """
    limits, properties = RequestLimits(), 600
    limit = AdaptiveLimit(limits.most_at_once, clock=clock, patience=limits.token_seconds)
    asked, at_once, waiting, answering = 0, 0, deque(), []
    while waiting or answering or asked < properties:
        while asked < properties and (under_way := len(waiting) + len(answering)) < limit.requests:
            asked += 1
            waiting.append((clock.now, under_way + 1 >= limit.requests))
        began = clock.now
        if waiting:
            asked_at, full = waiting.popleft()
            clock.now += prompt_seconds
            seconds = clock.now - asked_at
            assert seconds < limits.token_seconds
            limit.first_token(seconds)
            at_once = at_once or limit.requests
            answering.append((128.0, asked_at, full, seconds))
        else:
            clock.now += step_seconds
        steps = max(1, (clock.now - began) // 0.12)
        answering = [(left - steps, *of) for left, *of in answering]
        for _, asked_at, full, seconds in [one for one in answering if one[0] <= 0]:
            limit.answered(Slot(asked_at, full), images=10, first_token_seconds=seconds)
        answering = [one for one in answering if one[0] > 0]
    assert at_once == first_requests
    assert properties * prompt_seconds / clock.now > 0.92  # the first ones, of which there are few, included


def test_slots_admit_no_more_than_the_limit_in_order(limit):
    """Requests wait for leave in the order in which they came."""

    async def scenario():
        entered = []
        leave = [asyncio.Event() for _ in range(6)]
        tasks = [holder(limit, entered, leave[number], name=number) for number in range(6)]
        await turns()
        assert entered == [0, 1, 2, 3]
        leave[2].set()
        await turns()
        assert entered == [0, 1, 2, 3, 4]
        for event in leave:
            event.set()
        await asyncio.gather(*tasks)
        assert entered == list(range(6))

    run(scenario())


def test_the_first_token_lets_waiting_requests_in(limit):
    """Nobody waits for a whole answer once the server has shown that it answers."""

    async def scenario():
        entered, leave = [], asyncio.Event()
        tasks = [holder(limit, entered, leave, name=number) for number in range(40)]
        await turns()
        assert len(entered) == 4
        limit.first_token(0.3)
        await turns()
        assert entered == list(range(32))
        leave.set()
        await asyncio.gather(*tasks)

    run(scenario())


def test_request_that_may_do_harm_is_alone(limit):
    """What may have killed the server takes no other request with it the next time."""

    async def scenario():
        entered = []
        first, alone, last = asyncio.Event(), asyncio.Event(), asyncio.Event()
        tasks = [
            holder(limit, entered, first, name="before"),
            holder(limit, entered, alone, alone=True, name="alone"),
            holder(limit, entered, last, name="after"),
        ]
        await turns()
        assert entered == ["before"]
        first.set()
        await turns()
        assert entered == ["before", "alone"]
        alone.set()
        last.set()
        await asyncio.gather(*tasks)
        assert entered == ["before", "alone", "after"]

    run(scenario())


def test_cancelled_waiting_leaves_no_hole(limit):
    """A run that is ended in the middle does not cost the others a place."""

    async def scenario():
        entered, leave = [], asyncio.Event()
        tasks = [holder(limit, entered, leave, name=number) for number in range(4)]
        waiting = holder(limit, entered, leave, name="cancelled", alone=True)
        behind = holder(limit, entered, leave, name="behind")
        await turns()
        tasks[0].cancel()  # its place is given to nobody: the next in line wants to be alone
        waiting.cancel()
        await turns()
        assert entered == [0, 1, 2, 3, "behind"]
        leave.set()
        await asyncio.gather(*tasks, waiting, behind, return_exceptions=True)
        async with limit.slot(alone=True):
            pass

    run(scenario())


def test_waiting_doubles_up_to_a_bound_and_differs():
    """Requests refused together do not come back together, and nobody waits for hours."""
    chance = random.Random(1)
    waits = [[back_off_seconds(tries, None, chance=chance) for _ in range(20)] for tries in (1, 2, 3, 20)]
    for wait, most in zip(waits, (0.5, 1.0, 2.0, 30.0), strict=True):
        assert all(most / 2 <= one <= most for one in wait)
        assert len(set(wait)) == 20


def test_what_the_server_asks_for_is_kept():
    """Nobody comes back before the time that the server named; a day is not waited for."""
    chance = random.Random(1)
    waits = [back_off_seconds(1, 7.0, chance=chance) for _ in range(20)]
    assert all(7.0 <= one <= 7.25 for one in waits)
    assert back_off_seconds(1, 86_400.0, chance=chance) <= MOST_RETRY_AFTER_SECONDS + 0.25


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("-4", 0.0),
        ("soon", None),
        ("inf", None),
        ("nan", None),
        ("Thu, 01 Jan 2026 12:00:30 GMT", 30.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(header, seconds):
    """Both forms of the header are read, and nonsense in it is no error."""
    assert retry_after_seconds(header, now=NOON) == seconds
