"""Guesses of how an answer goes on: what they learn, when they stop, and how much they remember."""

import random

from resources.engine.transformers.drafts import Drafts


def taught(*answers, most=5, remembered=1000):
    drafts = Drafts(most, remembered=remembered)
    for answer in answers:
        drafts.learn(answer, len(answer))
    return drafts


def test_what_was_said_before_is_guessed():
    """An answer said before is guessed from its beginning on, so many tokens at a time."""
    drafts = taught([10, 11, 12, 13, 14, 15, 16])
    assert drafts.guess([], room=100) == [10, 11, 12]  # each seen once: trusted less the further it goes
    for _ in range(10):
        drafts.learn([10, 11, 12, 13, 14, 15, 16], 7)
    assert drafts.guess([], room=100) == [10, 11, 12, 13, 14]
    assert drafts.guess([10, 11, 12, 13, 14], room=100) == [15, 16]
    assert drafts.guess([10, 11], room=2) == [12, 13]


def test_nothing_known_nothing_guessed():
    """A context that nobody saw, no room and no guesses allowed give no guess."""
    drafts = taught([1, 2, 3])
    assert drafts.guess([7, 8], room=9) == []
    assert drafts.guess([1], room=0) == []
    assert taught([1, 2, 3], most=0).guess([1], room=9) == []


def test_only_what_is_new_is_learned():
    """A growing answer teaches each of its tokens once, whatever the pieces in which it comes."""
    whole, pieces = taught([1, 2, 3, 4, 5]), Drafts(5)
    for end, new in ((2, 2), (3, 1), (5, 2)):
        pieces.learn([1, 2, 3, 4, 5][:end], new)
    assert whole._followed == pieces._followed


def test_what_is_said_now_replaces_what_was_said():
    """Where answers come to go on otherwise, the old guess is given up after some, and the new one made."""
    drafts = taught(*[[1, 2, 3]] * 20)
    assert drafts.guess([1, 2], room=1) == [3]
    for _ in range(10):
        drafts.learn([1, 2, 4], 1)
    assert drafts.guess([1, 2], room=1) == [4]


def test_an_even_chance_is_worth_a_guess_and_a_rare_one_is_not():
    """What follows every other time is guessed most of the time; what nearly always differs is not."""
    chance = random.Random(5)
    drafts, even, never = Drafts(5), 0, 0
    for _ in range(2000):
        drafts.learn([1, 2, chance.choice([3, 4])], 1)
        drafts.learn([1, 5, chance.randrange(10, 10_000)], 1)
        even += bool(drafts.guess([1, 2], room=1))
        never += drafts.guess([1, 5, *drafts.guess([1, 5], room=1)], room=1) != []
    assert even > 1000
    assert never == 0


def test_memory_is_bounded_and_what_is_used_stays():
    """However many contexts come, no more are kept than allowed, and those still in use are among them."""
    drafts = taught(remembered=100)
    for number in range(10_000):
        drafts.learn([number, number + 1, number + 2], 3)
        drafts.learn([-5, -6, -7], 3)
    assert len(drafts._followed) <= 100
    assert drafts.guess([-5, -6], room=1) == [-7]
