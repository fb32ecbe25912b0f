"""Guesses of how an answer goes on, and which models are asked about several tokens at once.

That they say the same is in test_model_families.py.
"""

import random
from types import SimpleNamespace

import pytest

from vlm_engine.transformers.drafting import Drafting, Drafts
from vlm_engine.transformers.greedy_decoding import AnswersSoFar

ROWS, PROMPT = 2, 5


@pytest.fixture
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )


@pytest.fixture
def refusal(model, caplog):
    """Why a model with so many columns in its cache after a prompt is not asked, where there is a reason."""
    import torch
    from transformers.cache_utils import DynamicCache

    caplog.set_level("DEBUG")
    check = SimpleNamespace(accept_tokens=lambda tokens: None, next_tokens=lambda *_: [])

    def of(columns=PROMPT, *, mask=None, **kept):
        answers = AnswersSoFar(
            torch.ones(ROWS, PROMPT, dtype=torch.long), limits=[9] * ROWS, stop_token_ids=[1], pad_token_id=0
        )
        answers.append({row: [7] for row in range(ROWS)})
        cache = DynamicCache()
        cache.update(torch.zeros(ROWS, 2, columns, 8), torch.zeros(ROWS, 2, columns, 8), 0)
        state = {
            "past_key_values": cache,
            "position_ids": torch.arange(PROMPT + 1)[None],
            "attention_mask": None if mask is None else torch.ones(ROWS, mask, dtype=torch.long),
        }
        steps = Drafting(model, 3).start_steps(check)(model, {**state, **kept}, answers)
        return caplog.messages[-1] if steps is None else None

    return of


def test_an_ordinary_model_is_asked(refusal):
    """With a mask of the prompts and the next token, or with none where no prompt is padded."""
    assert refusal() is None
    assert refusal(mask=PROMPT + 1) is None


@pytest.mark.parametrize("mask", [None, PROMPT + 1])
def test_what_is_in_the_cache_beside_the_prompt_is_not_guessed_about(refusal, mask):
    """A model that keeps images there and no tokens for them (GIT) would see holes in the wrong places."""
    assert "which of its cache" in refusal(PROMPT + 4, mask=mask)


def test_positions_that_are_not_given_cannot_be_corrected(refusal):
    """Rows go on by different numbers of tokens, which a model that counts by itself does not know."""
    assert "counts positions" in refusal(position_ids=None)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("by_layers", [False, True])
def test_positions_that_depend_on_the_furthest_are_not_guessed_ahead(model, refusal, kind, by_layers):
    """A guess beyond a model's first context would turn what stands before it otherwise."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0}
    model.config.rope_parameters = {"full_attention": rope} if by_layers else rope
    assert "furthest" in refusal()


def test_what_a_family_does_in_its_own_way_is_left_to_it(model, refusal, monkeypatch):
    """A model that prepares its steps by itself is stepped token by token."""
    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", lambda self: None, raising=False)
    assert "a way of its own" in refusal()


def taught(*answers, most=5, most_contexts=1000):
    drafts = Drafts(most, most_contexts=most_contexts)
    for answer in answers:
        drafts.learn(answer, len(answer))
    return drafts


def test_what_was_said_before_is_guessed():
    """An answer said before is guessed from its beginning on, so many tokens at a time."""
    drafts = taught([10, 11, 12, 13, 14, 15, 16])
    assert drafts.draft([], room=100) == [10, 11, 12]  # each seen once: trusted less the further it goes
    for _ in range(10):
        drafts.learn([10, 11, 12, 13, 14, 15, 16], 7)
    assert drafts.draft([], room=100) == [10, 11, 12, 13, 14]
    assert drafts.draft([10, 11, 12, 13, 14], room=100) == [15, 16]
    assert drafts.draft([10, 11], room=2) == [12, 13]


def test_nothing_known_nothing_guessed():
    """A context that nobody saw, no room and no guesses allowed give no guess."""
    drafts = taught([1, 2, 3])
    assert drafts.draft([7, 8], room=9) == []
    assert drafts.draft([1], room=0) == []
    assert taught([1, 2, 3], most=0).draft([1], room=9) == []


def test_only_what_is_new_is_learned():
    """A growing answer teaches each of its tokens once, whatever the pieces in which it comes."""
    answer = [1, 2, 3, 4, 5]
    whole, pieces = taught(answer), Drafts(5)
    for end, new in ((2, 2), (3, 1), (5, 2)):
        pieces.learn(answer[:end], new)
    for end in range(6):
        assert pieces.draft(answer[:end], room=9) == whole.draft(answer[:end], room=9)


def test_what_is_said_now_replaces_what_was_said():
    """Where answers come to go on otherwise, the old guess is given up after some, and the new one made."""
    drafts = taught(*[[1, 2, 3]] * 20)
    assert drafts.draft([1, 2], room=1) == [3]
    for _ in range(10):
        drafts.learn([1, 2, 4], 1)
    assert drafts.draft([1, 2], room=1) == [4]


def test_an_even_chance_is_worth_a_guess_and_a_rare_one_is_not():
    """What follows every other time is guessed most of the time; what nearly always differs is not."""
    chance = random.Random(5)
    drafts, even, never = Drafts(5), 0, 0
    for _ in range(2000):
        drafts.learn([1, 2, chance.choice([3, 4])], 1)
        drafts.learn([1, 5, chance.randrange(10, 10_000)], 1)
        even += bool(drafts.draft([1, 2], room=1))
        never += drafts.draft([1, 5, *drafts.draft([1, 5], room=1)], room=1) != []
    assert even > 1000
    assert never == 0


def test_memory_is_bounded_and_what_is_used_stays():
    """However many contexts come, no more are kept than allowed, and those still in use are among them."""
    drafts = taught(most_contexts=100)
    for number in range(10_000):
        drafts.learn([number, number + 1, number + 2], 3)
        drafts.learn([-5, -6, -7], 3)
    pairs = [answer for number in range(10_000) for answer in ([number], [number, number + 1])]
    assert sum(bool(drafts.draft(answer, room=1)) for answer in pairs) <= 100
    assert drafts.draft([-5, -6], room=1) == [-7]
