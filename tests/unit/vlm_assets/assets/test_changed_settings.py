"""What a person reads of settings that changed."""

import pytest

from vlm_assets.assets.changed_settings import changed_in_words, field_kinds


def words(
    part, old, new, digests=("sha256:aaaaaaaaaaaaaaaa", "sha256:bbbbbbbbbbbbbbbb"), *, schema_too=False
):
    return changed_in_words(part, {part: old}, {part: new}, digests, schema_too=schema_too)


def schema(**fields):
    return field_kinds({"properties": fields})


def one_of(*values):
    return {"enum": list(values)}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PROMPT = {"text": "Describe the house.", "made_from_schema": False}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (words("model", "small", "large"), "model: small -> large"),
        (words("model", "small", "small"), "model: small aaaaaaaaaaaa -> small bbbbbbbbbbbb"),
        (words("embedding_model", "e1", "e2"), "embedding model: e1 -> e2"),
        (
            words("schema", schema(a=TEXT, b=TEXT, c=TEXT), schema(b=NUMBER, c={**TEXT, "x": 1}, d=NUMBER)),
            "schema: d added; a removed; b (text -> whole number), c changed",
        ),
        (words("schema", schema(a=TEXT, b=NUMBER), schema(b=NUMBER, d=TEXT)), "schema: a renamed to d"),
        (words("schema", schema(a=TEXT, b=TEXT), schema(c=TEXT, d=TEXT)), "schema: c, d added; a, b removed"),
        (
            words("schema", schema(roof=one_of("flat")), schema(roof=one_of("flat", "hip"))),
            'schema: roof (values added: "hip") changed',
        ),
        (
            words("schema", schema(roof=one_of("flat", "hip")), schema(roof=one_of("flat", "gable"))),
            'schema: roof (values added: "gable"; values removed: "hip") changed',
        ),
        (
            words("schema", schema(a=one_of("x")), schema(a=TEXT)),
            "schema: a (one of some values -> text) changed",
        ),
        (
            words(
                "schema",
                schema(a={"properties": {"x": TEXT}}),
                schema(a={"properties": {"x": TEXT, "y": TEXT}}),
            ),
            "schema: a.y added",
        ),
        (
            words("schema", schema(a=TEXT), schema(a=TEXT)),
            "schema: its description, or the order of its fields",
        ),
        (
            words("decoding", {"max": 8, "p": {"s": 1, "t": 2}}, {"max": 12, "p": {"s": 1}}),
            "processor and decoding options: max: 8 -> 12; p.t: 2 -> unset",
        ),
        (words("prompt", PROMPT, {**PROMPT, "text": "Tell."}), 'prompt: "Describe the house." -> "Tell."'),
        (words("prompt", PROMPT, PROMPT), "prompt: another text after its first 19 characters"),
        (
            words("prompt", *[{"text": text, "made_from_schema": True} for text in "ab"], schema_too=True),
            None,
        ),
        (
            changed_in_words("model", {}, {"model": "m"}, ("a", "b"), schema_too=False),
            "model: from what to what is not on record",
        ),
    ],
)
def test_a_change_is_told_from_what_to_what(said, expected):
    """By names, fields and values, never by a digest alone; an older record says which part differs."""
    assert said == expected
