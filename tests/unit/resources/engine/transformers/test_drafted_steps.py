"""Which models are asked about several tokens at once; that they say the same: test_model_families.py."""

import pytest

from resources.engine.transformers.answers_so_far import AnswersSoFar
from resources.engine.transformers.drafted_steps import _refusal

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
def refusal(model):
    """Why a model with so many columns in its cache after a prompt is not asked, where there is a reason."""
    import torch
    from transformers.cache_utils import DynamicCache

    def of(columns=PROMPT, *, mask=None, **kept):
        answers = AnswersSoFar(
            torch.ones(ROWS, PROMPT, dtype=torch.long), limits=[9] * ROWS, stop_token_ids=[1], pad_token_id=0
        )
        cache = DynamicCache()
        cache.update(torch.zeros(ROWS, 2, columns, 8), torch.zeros(ROWS, 2, columns, 8), 0)
        state = {
            "past_key_values": cache,
            "position_ids": torch.arange(PROMPT + 1)[None],
            "attention_mask": None if mask is None else torch.ones(ROWS, mask, dtype=torch.long),
        }
        return _refusal(model, {**state, **kept}, answers)

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
