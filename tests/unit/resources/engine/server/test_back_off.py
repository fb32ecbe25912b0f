"""How long a server is left alone before it is asked again."""

import random
from datetime import UTC, datetime

import pytest

from resources.engine.server.back_off import MOST_ASKED_SECONDS, asked_seconds, back_off_seconds

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


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
    assert back_off_seconds(1, 86_400.0, chance=chance) <= MOST_ASKED_SECONDS + 0.25


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
    assert asked_seconds(header, now=NOON) == seconds
