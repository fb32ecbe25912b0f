"""Probabilities of tokens, kept while answers are decoded: against all answers that the grammar allows."""

import functools
import hashlib
import json
import random
import re
from typing import Literal

import numpy as np
import pydantic
import pytest

from vlm_engine.confidence import confidence_of
from vlm_engine.schema import DescriptionSchema
from vlm_engine.transformers import drafting, token_scores
from vlm_engine.transformers.drafting import GrammarCheck
from vlm_engine.transformers.guided import Grammar

WIDTH = 352


class House(pydantic.BaseModel):
    """An answer of choices, with one value that begins as another does, and a text."""

    roof: Literal["flat", "hip", "gable"]
    floors: int = pydantic.Field(ge=1, le=15)
    has_pool: bool
    bathroom: Literal["bath", "bath_and_shower", "none"]
    seats: int | None = pydantic.Field(ge=0, le=3)
    name: str = pydantic.Field(max_length=4)


SCHEMA = DescriptionSchema(House)


@functools.cache
def logits_after(tokens):
    """The scores of a model that hashes what was said so far."""
    seed = int.from_bytes(hashlib.sha256(repr(tokens).encode()).digest()[:8], "big")
    return np.random.default_rng(seed).normal(0.0, 2.0, WIDTH).astype(np.float32)


@pytest.fixture(scope="module")
def grammar(tokenizer):
    return Grammar(SCHEMA.json_schema, tokenizer, logits_width=WIDTH, stop_token_ids=[tokenizer.eos_token_id])


def decode(grammar, tokenizer, prompts, *, seeds=None):
    """Answers of a batch, token by token, and their scores. prompts: what each row begins with, unseen."""
    import torch

    guide = grammar.for_batch(len(prompts))
    answers = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    last = np.zeros((len(prompts), 1), dtype=np.int64)
    while open_rows:
        scores = torch.from_numpy(
            np.stack(
                [logits_after((prompt, *answer)) for prompt, answer in zip(prompts, answers, strict=True)]
            )
        )
        chosen = guide(torch.from_numpy(last), scores).argmax(dim=-1).tolist()
        for row in list(open_rows):
            answers[row].append(chosen[row])
            if chosen[row] == tokenizer.eos_token_id:
                open_rows.discard(row)
        last = np.array(chosen)[:, None]
    answers = [answer[:-1] for answer in answers]
    return answers, guide.scores.of_answers(answers)


def decode_drafted(grammar, tokenizer, prompts, drafts):
    """The same with drafts: of each row, what is guessed of its whole answer."""
    import torch

    guide = grammar.for_batch(len(prompts))
    check = GrammarCheck(guide)
    first = torch.from_numpy(np.stack([logits_after((prompt,)) for prompt in prompts]))
    tokens = guide(torch.zeros(len(prompts), 1), first).argmax(dim=-1).tolist()
    check.accept_tokens(tokens)
    answers = [[token] for token in tokens]
    while rows := [row for row, answer in enumerate(answers) if answer[-1] != tokenizer.eos_token_id]:
        guesses = [drafts[row][len(answers[row]) :][:4] for row in rows]
        scores = np.zeros((len(rows), 5, WIDTH), dtype=np.float32)
        for place, row in enumerate(rows):
            for index in range(1 + len(guesses[place])):
                scores[place, index] = logits_after((prompts[row], *answers[row], *guesses[place][:index]))
        for row, more in zip(rows, check.next_tokens(rows, guesses, torch.from_numpy(scores)), strict=True):
            answers[row] += more
    answers = [answer[:-1] for answer in answers]
    return answers, guide.scores.of_answers(answers)


def enumerated(grammar, prompt, said, field, is_meant):
    """The probability of some values after what was said: the sum over all ways to write them."""
    total = 0.0

    def go_on(tokens, probability):
        nonlocal total
        written = b"".join(grammar._token_bytes[token] for token in tokens).decode()
        _, key, begun = written.partition(f'"{field}":')
        ended = re.match(r'"[^"]*"|[^",}]+(?=[,}])', begun)
        if key and ended:
            total += probability * is_meant(ended[0])
            return
        guide = grammar.for_batch(1)
        assert all(guide.accepts(0, token) for token in tokens)
        guide.matchers[0].fill_next_token_bitmask(guide.bitmask, 0)
        mask = (guide.bitmask[0] & guide.plain).numpy().view(np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        shares = np.exp(logits_after((prompt, *tokens))[allowed].astype(np.float64))
        for token, share in zip(allowed.tolist(), (shares / shares.sum()).tolist(), strict=True):
            go_on((*tokens, token), probability * share)

    go_on(tuple(said), 1.0)
    return total


def said_until(grammar, tokens, text):
    """The tokens of an answer up to the first that completes this text, or a longer one."""
    written, said = b"", []
    for token in tokens:
        if text.encode() in written:
            break
        written += grammar._token_bytes[token]
        said.append(token)
    return said


PROMPTS = [chr(97 + at) for at in range(12)]


@pytest.fixture(scope="module")
def decoded(grammar, tokenizer):
    """Answers of a batch and their tokens' probabilities."""
    return decode(grammar, tokenizer, PROMPTS)


def confidences(tokenizer, answers, scored):
    return [
        confidence_of(SCHEMA.fields, tokenizer.decode(answer), tokens)
        for answer, tokens in zip(answers, scored, strict=True)
    ]


@pytest.mark.parametrize("field", ["roof", "floors", "has_pool", "seats"])
def test_the_confidence_of_a_choice_is_the_probability_of_its_value(grammar, tokenizer, decoded, field):
    """Against every value that the grammar allows, however its tokens write it."""
    found = confidences(tokenizer, *decoded)
    for prompt, answer, confidence in zip(PROMPTS, decoded[0], found, strict=True):
        value = json.dumps(json.loads(tokenizer.decode(answer))[field])
        said = said_until(grammar, answer, f'"{field}":')
        expected = enumerated(grammar, prompt, said, field, lambda one, value=value: one == value)
        assert confidence[field] == pytest.approx(expected, abs=1e-5)
    assert len({round(confidence[field], 3) for confidence in found}) > 6


def test_a_value_that_another_begins_with_is_as_sure_as_its_end(grammar, tokenizer, decoded):
    """``bath`` and ``bath_and_shower`` part late: what the answer had said by then decides which it is."""
    compared = 0
    for prompt, answer, confidence in zip(PROMPTS, decoded[0], confidences(tokenizer, *decoded), strict=True):
        value = json.dumps(json.loads(tokenizer.decode(answer))["bathroom"])
        said = said_until(grammar, answer, '"bathroom":')
        begun = said_until(grammar, answer, '"bathroom":"bath')
        written = b"".join(grammar._token_bytes[token] for token in begun)
        if value == '"none"' or not written.endswith(b"bath"):
            continue
        expected = enumerated(grammar, prompt, said, "bathroom", lambda one: one != '"none"')
        expected *= enumerated(grammar, prompt, begun, "bathroom", lambda one, value=value: one == value)
        assert confidence["bathroom"] == pytest.approx(expected, abs=1e-5)
        compared += 1
    assert compared > 3


def test_a_text_has_the_models_own_probabilities(grammar, tokenizer, decoded):
    """No mask is made for it: of each token that of the whole vocabulary, the mark at its end among them."""
    for prompt, answer, confidence in zip(PROMPTS, decoded[0], confidences(tokenizer, *decoded), strict=True):
        begun = said_until(grammar, answer, '"name":"')
        if not b"".join(grammar._token_bytes[token] for token in begun).endswith(b'"name":"'):
            continue  # The mark and the text's first character are one token, which is a choice.
        start, logarithms = len(begun), []
        for at in range(start, len(answer)):
            if b"".join(grammar._token_bytes[token] for token in answer[start:at]).count(b'"'):
                break
            scores = logits_after((prompt, *answer[:at])).astype(np.float64)
            logarithms.append(scores[answer[at]] - np.log(np.exp(scores).sum()))
        assert confidence["name"] == pytest.approx(np.exp(np.mean(logarithms)), abs=1e-5)


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_drafts_and_batches_change_no_confidence(grammar, tokenizer, decoded, monkeypatch, wrong):
    """The same alone, with drafts that are right or wrong, and where no scores or masks are held back."""
    answers, scored = decoded
    expected = confidences(tokenizer, answers, scored)
    chance = random.Random(3)
    drafts = [
        [chance.randrange(300) if chance.random() < wrong else token for token in answer]
        for answer in answers
    ]
    drafted = decode_drafted(grammar, tokenizer, PROMPTS, drafts)
    assert drafted[0] == answers
    alone = [decode(grammar, tokenizer, [prompt]) for prompt in PROMPTS]
    monkeypatch.setattr(drafting, "MASK_WORDS", 0)
    with_other_masks = decode_drafted(grammar, tokenizer, PROMPTS, drafts)
    monkeypatch.setattr(token_scores, "_HELD", 0)
    at_once = decode(grammar, tokenizer, PROMPTS)
    ways = [
        confidences(tokenizer, *drafted),
        [one for found in alone for one in confidences(tokenizer, *found)],
        confidences(tokenizer, *with_other_masks),
        confidences(tokenizer, *at_once),
        confidences(tokenizer, *decode_drafted(grammar, tokenizer, PROMPTS, drafts)),
    ]
    for found in ways:
        for confidence, other in zip(expected, found, strict=True):
            assert other == pytest.approx(confidence, abs=1e-5)
