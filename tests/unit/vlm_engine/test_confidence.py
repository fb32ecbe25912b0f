"""The confidence of a field, from the tokens of an answer: pure, with tokens that are made up."""

import math
from typing import Literal

import pyarrow as pa
import pydantic
import pytest

from vlm_engine.confidence import confidence_of
from vlm_engine.protocol import AnswerTokens
from vlm_engine.schema import DescriptionSchema, confidence_type


class Kitchen(pydantic.BaseModel):
    """A nested model."""

    colour: Literal["white", "oak"]
    seats: int | None


class House(pydantic.BaseModel):
    """All kinds of fields."""

    bathroom: Literal["bath", "bath_and_shower"]
    floors: int = pydantic.Field(ge=1, le=20)
    has_pool: bool = pydantic.Field(alias="hasPool")
    kitchen: Kitchen | None
    rooms: list[Literal["hall", "attic"]]
    summary: str
    remark: str | None


SCHEMA = DescriptionSchema(House)


def tokens_of(*tokens):
    """Tokens as texts that are certain, as (text, probability), or as (text, {option: probability})."""
    made = AnswerTokens()
    for token in tokens:
        text, scored = (token, 1.0) if isinstance(token, str) else token
        options = scored if isinstance(scored, dict) else {}
        probability = options.get(text, 0.0) if options else scored
        made.add(text.encode(), probability, [option.encode() for option in options], list(options.values()))
    return made


def confidence(*tokens, schema=SCHEMA):
    made = tokens_of(*tokens)
    text = b"".join(made.texts).decode()
    schema.parse(text)
    return confidence_of(schema.fields, text, made)


REST = (
    ',"kitchen":{"colour":"oak","seats":4},"rooms":["hall"],"summary":"',
    "A house.",
    '","remark":null}',
)


def test_the_token_that_ends_a_value_counts():
    """``bath`` is as sure as its end is, where ``bath_and_shower`` could stand; 1 where 12 could."""
    answer = confidence(
        '{"bathroom":"', 'bath', ('"', {'"': 0.6, "_": 0.3, "_and": 0.1}),
        ',"floors":', "1", (",", {",": 0.7, "2": 0.2, ',"': 0.1}),
        '"hasPool":', "true", *REST,
    )  # fmt: skip
    assert answer["bathroom"] == pytest.approx(0.6)
    assert answer["floors"] == pytest.approx(0.8)
    assert answer["has_pool"] == 1.0


def test_tokens_that_write_the_same_value_count_for_it():
    """A value is no less sure because the model could have written it in other pieces."""
    pieces = {"t": 0.2, "tr": 0.1, "true": 0.3, "true,": 0.1, "f": 0.1, "false": 0.2}
    answer = confidence('{"bathroom":"bath","floors":1,"hasPool":', ("t", pieces), "rue", *REST)
    assert answer["has_pool"] == pytest.approx(0.7)
    assert answer["floors"] == answer["bathroom"] == 1.0


def test_a_token_over_several_values_counts_for_each_by_where_others_part_from_it():
    """What parts from the answer in one value says nothing of the next, and lowers what comes before."""
    token = ('1,"hasPool":true', {'1,"hasPool":true': 0.4, "2": 0.2, "12": 0.2, '1,"hasPool":f': 0.2})
    answer = confidence('{"bathroom":"bath","floors":', token, *REST)
    assert answer["floors"] == pytest.approx(0.6)
    assert answer["has_pool"] == pytest.approx(0.4 / 0.6)


def test_options_that_are_not_known_count_against_a_value():
    """A server says the likeliest options alone: the rest could be any other value."""
    answer = confidence('{"bathroom":"bath","floors":', ("1", {"1": 0.5, "2": 0.3}), ',"hasPool":true', *REST)
    assert answer["floors"] == pytest.approx(0.5)


def test_white_space_after_a_number_does_not_change_it():
    """A server's grammar may allow white space anywhere."""
    answer = confidence(
        '{ "bathroom": "bath", "floors" : ', "1", (",", {",": 0.5, " ": 0.3, "\n": 0.1, "1": 0.1}),
        '"hasPool": true', *REST,
    )  # fmt: skip
    assert answer["floors"] == pytest.approx(0.9)


def test_nested_objects_have_nested_confidences_and_lists_one():
    """``confidence.kitchen.colour`` in SQL; where there is no kitchen, its fields have that answer's."""
    head = '{"bathroom":"bath","floors":1,"hasPool":true,"kitchen":'
    tail = ('"summary":"', "A house.", '","remark":null}')
    answer = confidence(
        head, '{"colour":"', ("oak", {"oak": 0.9, "white": 0.1}),
        '","seats":', ("null", {"null": 0.8, "4": 0.2}),
        '},"rooms":[', ('"hall"', {'"hall"': 0.5, '"attic"': 0.5}), ("]", {"]": 0.5, ",": 0.5}), ",", *tail,
    )  # fmt: skip
    assert answer["kitchen"] == {"colour": pytest.approx(0.9), "seats": pytest.approx(0.8)}
    assert answer["rooms"] == pytest.approx(0.25)
    none = confidence(head, ("null", {"null": 0.7, "{": 0.3}), ',"rooms":[],', *tail)
    assert none["kitchen"] == {"colour": pytest.approx(0.7), "seats": pytest.approx(0.7)}


@pytest.mark.parametrize("key", ["größe", "gr\\u00f6\\u00dfe"], ids=["bytes", "escaped"])
def test_a_field_whose_key_is_of_other_letters_has_its_confidence(key):
    """Places in an answer are those of its bytes, and a key is a text of characters."""

    class Plot(pydantic.BaseModel):
        size: Literal["small", "large"] = pydantic.Field(alias="größe")

    answer = confidence(
        f'{{"{key}":"', ("small", {"small": 0.6, "large": 0.4}), '"}', schema=DescriptionSchema(Plot)
    )
    assert answer == {"size": pytest.approx(0.6)}


def test_a_text_has_the_geometric_mean_of_its_tokens():
    """From its first word to the mark that ends it; that null was possible counts where it was."""
    head = '{"bathroom":"bath","floors":1,"hasPool":true,"kitchen":null,"rooms":[],"summary":"'
    answer = confidence(
        head, ("Großes", 0.5), (" Haus", 0.9), ('","', 0.4), 'remark":', ('"', 0.5), ('"}', 0.25)
    )
    assert answer["summary"] == pytest.approx((0.5 * 0.9 * 0.4) ** (1 / 3))
    assert answer["remark"] == pytest.approx(math.sqrt(0.5 * 0.25))


def test_what_cannot_be_known_is_null():
    """Without tokens, with tokens of another text, and for a field that the answer left to its default."""

    class Plain(pydantic.BaseModel):
        a: bool = True
        b: bool

    schema = DescriptionSchema(Plain)
    assert confidence_of(schema.fields, '{"b":true}', None) is None
    assert confidence_of(schema.fields, '{"b":true}', tokens_of('{"b":tru')) is None
    answer = confidence(
        '{"other":[1,{"b":2}],"\\u20ac":0,"Größe":1,"b":',
        ("true", {"true": 0.5, "false": 0.5}),
        "}",
        schema=schema,
    )
    assert answer == {"a": None, "b": 0.5}


def test_a_model_that_changes_its_own_json_schema_costs_confidences_alone():
    """What the schema says no more is null; no row is refused for it."""

    class Changed(pydantic.BaseModel):
        kitchen: Kitchen
        a: bool

        @classmethod
        def __get_pydantic_json_schema__(cls, core, handler):
            made = handler(core)
            made["properties"]["kitchen"] = {"not": {"type": "null"}}
            return made

    schema = DescriptionSchema(Changed)
    text = '{"kitchen":{"colour":"oak","seats":4},"a":'
    answer = confidence(text, ("true", {"true": 0.5, "false": 0.5}), "}", schema=schema)
    assert answer == {"a": 0.5}
    table = pa.Table.from_pylist([answer], schema=pa.schema(confidence_type(schema.arrow_type)))
    assert table["kitchen"].to_pylist() == [None]


def test_the_column_has_the_fields_of_the_schema():
    """One float a field, a struct for a nested object, one float for a list."""
    kind = confidence_type(SCHEMA.arrow_type)
    assert [field.name for field in kind] == [field.name for field in SCHEMA.arrow_type]
    types = {field.name: str(field.type) for field in kind}
    assert types["kitchen"] == "struct<colour: float, seats: float>"
    assert set(types.values()) - {types["kitchen"]} == {"float"}
