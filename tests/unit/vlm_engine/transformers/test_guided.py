"""Guided decoding and sampling, on random logits: no model is needed to see what can be chosen."""

import json
import random
from typing import Literal

import pydantic
import pytest

from vlm_engine.schema import DescriptionSchema, SchemaError
from vlm_engine.transformers.drafting import GrammarCheck
from vlm_engine.transformers.guided import Grammar, SampledBatch

WIDTH = 352


@pytest.fixture
def torch():
    """Torch, imported when a test needs it, so that collecting the tests does not."""
    import torch

    return torch


class Room(pydantic.BaseModel):
    """A nested model."""

    name: str = pydantic.Field(max_length=6)
    size: float | None = pydantic.Field(ge=0, le=500)


class House(pydantic.BaseModel):
    """All kinds of fields that a grammar must hold to."""

    roof: Literal["flat", "gabled"]
    storeys: int = pydantic.Field(ge=1, le=5)
    garden: bool
    title: str = pydantic.Field(max_length=12)
    rooms: list[Room] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def schema():
    return DescriptionSchema(House)


@pytest.fixture(scope="module")
def grammar(schema, tokenizer):
    return Grammar(schema.json_schema, tokenizer, logits_width=WIDTH, stop_token_ids=[tokenizer.eos_token_id])


def decode_greedily(torch, grammar, tokenizer, logits, *, limit=400):
    """What a model with these logits [steps, batch, width] would write, as token ids a row."""
    batch = logits.shape[1]
    processor = grammar.for_batch(batch)
    ids = torch.zeros((batch, 1), dtype=torch.int64)
    open_rows = [True] * batch
    for step in range(limit):
        chosen = processor(ids, logits[step % len(logits)].clone()).argmax(dim=-1)
        for row in range(batch):
            if not open_rows[row]:
                chosen[row] = tokenizer.pad_token_id
            open_rows[row] &= chosen[row].item() != tokenizer.eos_token_id
        ids = torch.cat([ids, chosen[:, None]], dim=1)
        if not any(open_rows):
            break
    return [row[1:].tolist() for row in ids]


def test_any_logits_give_valid_answers(torch, schema, grammar, tokenizer):
    """Whatever the model prefers, what it writes is one compact, valid answer of the schema."""
    logits = torch.randn(400, 24, WIDTH, generator=torch.Generator().manual_seed(1))
    for tokens in decode_greedily(torch, grammar, tokenizer, logits):
        assert tokenizer.eos_token_id in tokens
        text = tokenizer.decode(tokens[: tokens.index(tokenizer.eos_token_id)])
        parsed = schema.parse(text)
        assert len(parsed["title"]) <= 12
        assert text.startswith('{"roof":"')
        assert list(json.loads(text)) == list(House.model_fields)


def test_rows_do_not_touch_each_other(torch, grammar, tokenizer):
    """A row's answer is the same alone and in a batch whose other rows end sooner or later."""
    logits = torch.randn(400, 8, WIDTH, generator=torch.Generator().manual_seed(2))
    together = decode_greedily(torch, grammar, tokenizer, logits)
    for row, tokens in enumerate(together):
        (alone,) = decode_greedily(torch, grammar, tokenizer, logits[:, row : row + 1])
        assert tokens[: len(alone)] == alone


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("confident", [0.0, 12.0])
def test_drafts_change_nothing_of_what_is_said(torch, grammar, tokenizer, wrong, confident):
    """Whatever is guessed, and however often rightly, each row says what it says without guesses."""
    batch, chance = 6, random.Random(3)
    logits = torch.randn(400, batch, WIDTH, generator=torch.Generator().manual_seed(4))
    expected = decode_greedily(torch, grammar, tokenizer, logits)
    for row, tokens in enumerate(expected):  # a model that mostly wants what the grammar allows
        for step, token in enumerate(tokens):
            logits[step, row, token] += confident
    check = GrammarCheck(grammar.for_batch(batch))
    said = [[] for _ in range(batch)]
    steps = 0
    while rows := [row for row in range(batch) if said[row][-1:] != [tokenizer.eos_token_id]]:
        steps += 1
        assert steps < 400
        drafts = []
        for row in rows:
            draft = expected[row][len(said[row]) :][: chance.randrange(5)]
            drafts.append([chance.randrange(WIDTH) if chance.random() < wrong else token for token in draft])
        width = 1 + max(map(len, drafts))
        scores = torch.stack([logits[len(said[row]) :][:width, row] for row in rows])
        for row, more in zip(rows, check.next_tokens(rows, drafts, scores), strict=True):
            said[row] += more
    assert said == [tokens[: tokens.index(tokenizer.eos_token_id) + 1] for tokens in expected]
    assert (steps < max(map(len, said)) / 2) == (wrong == 0.0)


def test_no_token_beyond_the_text(torch, grammar, tokenizer):
    """Special tokens, control characters and unused logits are out of reach, even in a string."""
    processor = grammar.for_batch(1)
    ids = torch.zeros((1, 1), dtype=torch.int64)
    prefix = '{"roof":"flat","storeys":2,"garden":true,"title":"'
    for token in tokenizer.encode(prefix, add_special_tokens=False):
        processor(ids, torch.zeros(1, WIDTH))
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    allowed = torch.isfinite(processor(ids, torch.zeros(1, WIDTH)))[0].nonzero().flatten().tolist()
    texts = tokenizer.convert_ids_to_tokens([at for at in allowed if at < len(tokenizer)])
    assert "house" in texts
    assert max(allowed) < len(tokenizer)
    assert not set(texts) & set(tokenizer.all_special_tokens)
    assert all(ord(character) >= 0x20 for at in allowed for character in tokenizer.decode([at]))


def test_dead_end_ends_only_its_row(torch, schema):
    """A vocabulary that lacks a needed character ends that answer, and raises nothing."""
    import transformers
    from tokenizers import Tokenizer, models

    vocabulary = {"<pad>": 0, "</s>": 1, "{": 2, '"': 3, "r": 4}
    poor = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    grammar = Grammar(schema.json_schema, poor, logits_width=5, stop_token_ids=[1])
    (tokens,) = decode_greedily(torch, grammar, poor, torch.zeros(1, 1, 5), limit=20)
    assert tokens[:3] == [2, 3, 4]
    assert tokens[-1] == 1
    check, said = GrammarCheck(grammar.for_batch(1)), []
    while said[-1:] != [1] and len(said) < 20:
        said += check.next_tokens([0], [[]], torch.zeros(1, 1, 5))[0]
    assert said == tokens


def test_schema_that_no_grammar_expresses(tokenizer):
    """What cannot guide decoding is refused when the engine is made, as a schema's error."""
    with pytest.raises(SchemaError, match="cannot guide decoding"):
        Grammar(
            {"type": "object", "properties": {"a": {"type": "nonsense"}}, "required": ["a"]},
            tokenizer,
            logits_width=WIDTH,
            stop_token_ids=[tokenizer.eos_token_id],
        )


def test_sampling_follows_the_softmax(torch):
    """Adding the noise and taking the largest draws from the softmax at that temperature."""
    logits = torch.tensor([0.0, 1.0, 2.0])
    expected = torch.softmax(logits / 0.5, dim=-1)
    sampled = SampledBatch(0.5, range(4000))(torch.zeros(4000, 1), logits.expand(4000, 3)).argmax(dim=-1)
    shares = torch.bincount(sampled, minlength=3) / 4000
    assert torch.allclose(shares, expected, atol=0.03)


def test_sampling_keeps_what_is_masked_out(torch):
    """No noise brings back a token that the grammar has ruled out."""
    logits = torch.tensor([[float("-inf"), 0.0]]).expand(500, 2)
    assert SampledBatch(100.0, range(500))(torch.zeros(500, 1), logits).argmax(dim=-1).all()


def test_sampling_depends_on_the_seed_alone(torch):
    """The same seed draws the same, whatever stands beside it; another seed draws otherwise."""
    logits = torch.zeros(3, 100)
    first = SampledBatch(1.0, [7, 8, 9])(torch.zeros(3, 1), logits)
    alone = SampledBatch(1.0, [8])(torch.zeros(1, 1), logits[:1])
    assert torch.equal(first[1], alone[0])
    assert not torch.equal(first[0], first[1])
