"""Confidence: how probable the model found the value of each field, from the tokens of an answer.

This module knows tokens as bytes with probabilities, and the JSON text that they make up. Each engine finds
its tokens in its own way: ``transformers/token_scores.py``, ``server/chat_completions.py``.

The value of an enum, a boolean or a number has the probability that the answer does not part from its text.
Tokens that write the same text in other pieces do not part from it. A text has the geometric mean of the
probabilities of its tokens, and a list is one value.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal

from vlm_engine.protocol import AnswerTokens

if TYPE_CHECKING:
    import pyarrow as pa

Confidence = dict[str, Any]
"""A float in [0, 1] or None for each field of a schema; of a nested object, a dictionary of the same kind."""

_WHITE_SPACE: Final = frozenset(" \t\n\r")
_NUMBER: Final = frozenset("-0123456789")
_CONTINUES_NUMBER: Final = frozenset(b"0123456789.eE+-")
_QUOTE_OR_LIST: Final = frozenset('"[')
_LEAST: Final = 1e-300
"""A probability that is computed as zero is no more than this."""

_decode_value = json.JSONDecoder(strict=False).raw_decode


@dataclass(frozen=True)
class AnswerField:
    """A field of an answer. name: of its column. key: in the JSON text. fields: those of an object.

    is_text: any text may stand there, or a list of such. nullable: null may, too.
    """

    name: str
    key: str
    is_text: bool
    nullable: bool
    fields: tuple[AnswerField, ...] = ()


@dataclass(frozen=True, slots=True)
class _Value:
    """The bytes of an answer that decide a value: [start, end). Of a number, the byte after it too."""

    start: int
    end: int
    kind: Literal["text", "number", "choice"]


@dataclass(frozen=True, slots=True)
class _Written:
    """An answer and its tokens. starts: the first byte of each."""

    answer: bytes
    tokens: AnswerTokens
    starts: Sequence[int]


_Values = dict[str, Any]
"""The value of each field by its key; of an object that is not null, a dictionary of the same kind."""


def answer_fields(json_schema: Mapping[str, Any], kind: pa.StructType) -> tuple[AnswerField, ...]:
    """The fields of an object, in the order of the schema. kind: the same object as columns.

    A field whose JSON schema says no more what its column is, because a model changed it, is left out.
    """
    import pyarrow as pa

    properties = json_schema["properties"]
    if len(properties) != kind.num_fields:
        return ()
    fields = []
    for column, (key, node) in zip(kind, properties.items(), strict=True):
        possible = node.get("anyOf", [node])
        options = [option for option in possible if option.get("type") != "null"]
        is_object = pa.types.is_struct(column.type)
        inner = next((option for option in options if option.get("type") == "object"), None)
        if is_object == (inner is not None):
            fields.append(
                AnswerField(
                    column.name,
                    key,
                    is_text=any(map(_is_text, options)),
                    nullable=len(options) < len(possible),
                    fields=() if inner is None else answer_fields(inner, column.type),
                )
            )
    return tuple(fields)


def _is_text(node: Mapping[str, Any]) -> bool:
    """Whether a value has any text in it: then it is no choice among values that can be counted."""
    if node.get("type") == "string":
        return "enum" not in node and "const" not in node
    parts = [*node.get("anyOf", ()), *node.get("properties", {}).values(), *filter(None, [node.get("items")])]
    return any(map(_is_text, parts))


def confidence_of(fields: Sequence[AnswerField], text: str, tokens: AnswerTokens | None) -> Confidence | None:
    """The confidence of each field of an answer that fits the schema.

    None where no field is asked for, and where the tokens are not known or are not the bytes of the text.
    """
    if not fields:
        return None
    answer = b"" if tokens is None else b"".join(tokens.texts)
    if tokens is None or answer != text.encode("utf-8", "surrogatepass"):
        return None
    # As Latin-1 each byte is a character, so that places in the text are places in the bytes.
    values, _ = _object_values(fields, answer.decode("latin-1"), 0)
    starts = list(accumulate(map(len, tokens.texts[:-1]), initial=0))
    return _confidences(fields, values, _Written(answer, tokens, starts))


def _confidences(
    fields: Sequence[AnswerField], values: _Values | _Value | None, written: _Written
) -> Confidence:
    """values: of an object that is null, the place of that null, which is the value of each of its fields."""
    confidence: Confidence = {}
    for field in fields:
        value = values.get(field.key) if isinstance(values, dict) else values
        if field.fields:
            confidence[field.name] = _confidences(field.fields, value, written)
        else:
            confidence[field.name] = None if value is None else _confidence(value, written)
    return confidence


def _confidence(value: _Value, written: _Written) -> float:
    first = bisect_right(written.starts, value.start) - 1
    end = bisect_left(written.starts, value.end)
    if value.kind == "text":
        logarithms = [math.log(max(p, _LEAST)) for p in written.tokens.probabilities[first:end]]
        return min(1.0, math.exp(math.fsum(logarithms) / len(logarithms)))
    confidence = 1.0
    for token in range(first, end):
        confidence *= _stays(value, written, token)
    return confidence


def _stays(value: _Value, written: _Written, token: int) -> float:
    """The probability that the answer does not part from a value at this token.

    Options that part from the answer before the value begins say nothing of the value.
    """
    tokens = written.tokens
    options = range(tokens.bounds[token], tokens.bounds[token + 1])
    if not options:
        return tokens.probabilities[token]
    start = written.starts[token]
    before = stays = 0.0
    for option in options:
        text, probability = tokens.option_texts[option], tokens.option_probabilities[option]
        if written.answer.startswith(text, start):
            stays += probability
            continue
        parts_at = _parts_at(text, written.answer, start, value)
        if parts_at >= value.end:
            stays += probability
        elif parts_at < value.start:
            before += probability
    return stays / max(1.0 - before, stays, _LEAST)


def _parts_at(option: bytes, answer: bytes, start: int, value: _Value) -> int:
    """The byte at which an option is another than the answer; the end of a value that it writes too."""
    place, length = start, len(answer)
    for byte in option:
        if place == length or answer[place] != byte:
            break
        place += 1
    is_last = value.kind == "number" and place == value.end - 1
    # White space and a comma end the same number.
    return value.end if is_last and option[place - start] not in _CONTINUES_NUMBER else place


def _object_values(fields: Sequence[AnswerField], text: str, place: int) -> tuple[_Values, int]:
    """The values of an object that begins at ``place``, and the place after it."""
    by_key = {field.key: field for field in fields}
    values: _Values = {}
    place = _skip(text, place) + 1
    while text[place := _skip(text, place)] != "}":
        start = place
        key, place = _decode_value(text, place)
        if not key.isascii():  # Read as Latin-1, a character of two bytes is two others.
            key = json.loads(text[start:place].encode("latin-1").decode(errors="replace"))
        field = by_key.get(key)
        place = _skip(text, _skip(text, place) + 1)
        if field is not None and field.fields and text[place] == "{":
            values[field.key], place = _object_values(field.fields, text, place)
        else:
            start = place
            _, place = _decode_value(text, place)
            if field is not None:
                values[field.key] = _value(field, text, start, place)
        place = _skip(text, place)
        place += text[place] == ","
    return values, place + 1


def _value(field: AnswerField, text: str, start: int, end: int) -> _Value:
    if text[start] in _NUMBER:
        return _Value(start, end + 1, "number")
    if field.is_text and text[start] in _QUOTE_OR_LIST:
        # The mark that opens a text is no word of it. Where null was possible, it says that it was not null.
        return _Value(start + (not field.nullable), end, "text")
    return _Value(start, end, "choice")


def _skip(text: str, place: int) -> int:
    """The place after white space."""
    while text[place] in _WHITE_SPACE:
        place += 1
    return place
