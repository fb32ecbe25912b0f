"""Intervals: published values, and the coverage that they promise."""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import numpy as np
import pytest
from scipy.special import gammaln

from vlm_assets.services.intervals import Difference, mean_share, paired_difference, wilson

CHANCES = (0.5, 0.7, 0.8, 0.9, 0.95)


def difference_of(better: int, worse: int, of: int) -> Difference:
    """The difference where so many of ``of`` pairs differ, each with yes or no."""
    same = of - better - worse
    return paired_difference([1] * better + [0] * worse + [1] * same, [0] * better + [1] * worse + [1] * same)


def test_the_interval_of_a_share_is_wilsons() -> None:
    """Known values; none of ten is no certainty, and nothing of nothing is none."""
    half, none = wilson(5, 10), wilson(0, 10)
    assert (round(half.low, 4), round(half.high, 4)) == (0.2366, 0.7634)
    assert (none.share, none.low, round(none.high, 4)) == (0.0, 0.0, 0.2775)
    # Newcombe (Statistics in Medicine 1998, 17:857-872), table I, method 3.
    for count, of, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ):
        share = wilson(count, of)
        assert (round(share.low, 4), round(share.high, 4)) == (low, high)
    assert (wilson(0, 0).sentence(), mean_share([]).sentence()) == ("none", "none")


@pytest.mark.parametrize(
    ("better", "worse", "of", "low", "high"),
    [
        # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables, chapter 8: the data of
        # Bentur et al. 2009 (1, 1, 7, 12) and of Cavo et al. 2012 (59, 6, 16, 80).
        (1, 7, 21, -0.517, -0.026),
        (6, 16, 161, -0.124, -0.0054),
    ],
)
def test_the_interval_of_a_difference_is_tangos(better, worse, of, low, high) -> None:
    """The values of a textbook, in both directions."""
    forth, back = difference_of(better, worse, of), difference_of(worse, better, of)
    digits = 4 if of > 100 else 3
    assert (round(forth.low, digits), round(forth.high, digits)) == (low, high)
    assert (back.low, back.high) == pytest.approx((-forth.high, -forth.low))
    assert forth.by == pytest.approx((better - worse) / of)


def test_without_a_difference_the_interval_is_even_and_says_so() -> None:
    """Identical answers: both may be the better one, by z squared over n and z squared (derived by hand)."""
    even = difference_of(0, 0, 50)
    assert even.sentence() == "no difference seen (-7.1% to +7.1%)"
    assert even.high == -even.low == pytest.approx(1.959964**2 / (50 + 1.959964**2))
    assert difference_of(3, 3, 50).sentence().startswith("+0.0% (-"), "answers differ, and neither is better"
    assert difference_of(50, 0, 50).high == pytest.approx(1.0)
    assert paired_difference([], []).sentence() == ""


def test_a_difference_is_covered_as_often_as_it_says() -> None:
    """Of all outcomes, by their exact chance: 94 to 96% on the mean, 92% everywhere."""
    covered = []
    for of in (20, 30, 50):
        counts = [(b, c) for b in range(of + 1) for c in range(of + 1 - b)]
        limits = np.array(
            [(one.low, one.high) for one in itertools.starmap(difference_of, [(*x, of) for x in counts])]
        )
        better, worse = np.array(counts).T
        ways = gammaln(of + 1) - gammaln(better + 1) - gammaln(worse + 1) - gammaln(of - better - worse + 1)
        for first, second, related in itertools.product(CHANCES, CHANCES, (0.0, 0.3, 0.6)):
            both = first * second + related * math.sqrt(first * second * (1 - first) * (1 - second))
            up, down = first - both, second - both
            if min(up, down) < 0.01:
                continue
            chance = np.exp(
                ways
                + better * np.log(up)
                + worse * np.log(down)
                + (of - better - worse) * np.log(1 - up - down)
            )
            inside = (limits[:, 0] <= first - second + 1e-9) & (first - second - 1e-9 <= limits[:, 1])
            covered.append(float(chance[inside].sum()))
    assert len(covered) > 150
    assert 0.94 <= fmean(covered) <= 0.96
    assert min(covered) >= 0.92


@pytest.mark.parametrize("related", [0.0, 0.4, 0.9])
def test_shares_of_several_fields_are_covered_whether_fields_fail_together_or_alone(related: float) -> None:
    """Eight fields of a property are neither one answer nor eight: never below 92%, never wider than one."""
    random = np.random.default_rng(7)

    def drawn(chance: float) -> list[float]:
        own, together = random.random((40, 8)) < chance, random.random((40, 1)) < chance
        return list(np.where(random.random((40, 8)) < math.sqrt(related), together, own).mean(axis=1))

    share_hits = difference_hits = 0
    widths = []
    for _ in range(150):
        first, second = drawn(0.9), drawn(0.8)
        share, difference = mean_share(first), paired_difference(first, second)
        share_hits += share.low <= 0.9 <= share.high
        difference_hits += difference.low <= 0.1 <= difference.high
        widths.append(share.high - share.low)
    # 150 draws of 95%: 0.91 is two standard errors below.
    assert min(share_hits, difference_hits) / 150 >= 0.91
    of_one = wilson(36, 40)
    assert fmean(widths) < (0.75 if related < 0.3 else 1.02) * (of_one.high - of_one.low)


@pytest.mark.parametrize("fields", [1, 2, 10, 100])
def test_one_more_error_never_looks_surer(fields: int) -> None:
    """All right is never less sure than one error: with each error both limits go down, or stay."""
    for properties in (3, 10, 50):
        shares = [1.0] * properties
        before = mean_share(shares)
        assert before == wilson(properties, properties)
        for number in range(min(properties, 10)):
            shares[number] -= 1 / fields
            after = mean_share(shares)
            assert after.low <= before.low + 1e-12
            assert after.high <= before.high + 1e-12
            before = after
