"""The description schema's three forms, and the verdicts on answers."""

import enum
import json
import types
from typing import Annotated, Literal, Optional

import pyarrow as pa
import pydantic
import pytest

from vlm_engine.protocol import InvalidDescription
from vlm_engine.schema import DescriptionSchema, SchemaError, description_text, load_schema, part_of_schema


class Kind(enum.Enum):
    """An enumeration of strings."""

    HOUSE = "house"
    FLAT = "flat"


class Room(pydantic.BaseModel):
    """A nested model."""

    name: str = pydantic.Field(max_length=20)
    windows: int


class House(pydantic.BaseModel):
    """A house."""

    title: str = pydantic.Field(description="What to call it", max_length=30)
    kind: Kind
    storeys: Annotated[int, pydantic.Field(ge=1, le=5)]
    area: float
    garden: bool
    roof: Literal["flat", "gabled"] | None = None
    rooms: list[Room]
    tags: Optional[list[str]] = None  # noqa: UP045 - both spellings must work


ANSWER = {
    "title": "Über", "kind": "house", "storeys": 2, "area": 91.5, "garden": True, "roof": None,
    "rooms": [{"name": "hall", "windows": 1}], "tags": ["a"],
}  # fmt: skip


@pytest.fixture(scope="module")
def schema() -> DescriptionSchema:
    return DescriptionSchema(House)


def verdict(schema: DescriptionSchema, text: str) -> InvalidDescription:
    with pytest.raises(InvalidDescription) as caught:
        schema.parse(text)
    return caught.value


def test_arrow_type(schema):
    """Every supported kind of field has its Arrow form, in the model's order."""
    assert schema.arrow_type == pa.struct(
        {
            "title": pa.string(),
            "kind": pa.string(),
            "storeys": pa.int64(),
            "area": pa.float64(),
            "garden": pa.bool_(),
            "roof": pa.string(),
            "rooms": pa.list_(pa.struct({"name": pa.string(), "windows": pa.int64()})),
            "tags": pa.list_(pa.string()),
        }
    )


def test_json_schema_is_inlined_closed_and_complete(schema):
    """Guided decoding sees no reference, no open object and no field that may be left out."""
    text = json.dumps(schema.json_schema)
    assert "$ref" not in text and "$defs" not in text and "default" not in text
    assert schema.json_schema["required"] == list(House.model_fields)
    assert schema.json_schema["properties"]["title"]["maxLength"] == 30
    assert schema.json_schema["properties"]["rooms"]["items"]["additionalProperties"] is False


def test_parse_gives_what_arrow_takes(schema):
    """A valid answer, its fields in any order, becomes a plain dict in schema order that Arrow takes."""
    parsed = schema.parse(json.dumps(dict(reversed(ANSWER.items()))))
    assert parsed == ANSWER
    assert list(parsed) == list(House.model_fields)
    assert pa.array([parsed], schema.arrow_type).to_pylist() == [ANSWER]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "character 0"),
        ('{"title": "a"', "character"),
        ("Sure! {}", "character 0"),
        ("{} {}", "Extra data"),
        ("[1]", "list"),
        ("null", "NoneType"),
        ('{"area": NaN}', "NaN"),
        ('{"title": "a", "title": "b"}', "twice"),
        ('{"title": "\\ud800"}', "hex escape"),
        ("[" * 100_000, "recursion"),
        ('{"storeys": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_not_json(schema, text, says):
    """What is not one strict JSON object is invalid_json, with a short reason."""
    error = verdict(schema, text)
    assert error.kind == "invalid_json"
    assert says in error.message
    assert len(error.message) <= 300


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("storeys", 6, "storeys"),
        ("storeys", "2", "storeys"),
        ("storeys", 2.0, "storeys"),
        ("garden", 1, "garden"),
        ("kind", "castle", "kind"),
        ("title", "x" * 31, "title"),
        ("rooms", [{"name": "hall", "windows": 2**63}], "rooms[0].windows: 9223372036854775808 does not fit"),
        ("rooms", [{"name": "hall"}], "rooms.0.windows"),
    ],
)
def test_not_this_schema(schema, field, value, says):
    """What the model refuses or Arrow cannot hold is schema_mismatch and names the field."""
    error = verdict(schema, json.dumps({**ANSWER, field: value}))
    assert error.kind == "schema_mismatch"
    assert says in error.message


def test_infinite_number(schema):
    """A number too large for a float does not become infinity in a row."""
    text = json.dumps(ANSWER).replace("91.5", "1e999")
    assert verdict(schema, text).kind == "schema_mismatch"


def test_message_is_bounded(schema):
    """A long list of errors stays short enough for a cell."""
    rooms = [{"x" * 200: 1}] * 50
    assert len(verdict(schema, json.dumps({**ANSWER, "rooms": rooms})).message) <= 300


def test_user_validator_that_crashes():
    """A user's validator that raises anything costs one property, not the run."""

    class Picky(pydantic.BaseModel):
        a: str

        @pydantic.field_validator("a")
        @classmethod
        def check(cls, value: str) -> str:
            raise KeyError(value)

    error = verdict(DescriptionSchema(Picky), '{"a": "b"}')
    assert error.kind == "schema_mismatch"
    assert "KeyError" in error.message


def test_digest_follows_meaning(schema):
    """The digest is stable, and changes with a description, a bound, or the order of fields."""

    def digest(**fields: object) -> str:
        return DescriptionSchema(pydantic.create_model("House", **fields)).digest

    assert schema.digest == DescriptionSchema(House).digest
    base = digest(a=(str, ...), b=(int, ...))
    assert base == digest(a=(str, ...), b=(int, ...))
    others = {
        digest(b=(int, ...), a=(str, ...)),
        digest(a=(str, pydantic.Field(max_length=3)), b=(int, ...)),
        digest(a=(str, pydantic.Field(description="x")), b=(int, ...)),
        digest(a=(str | None, ...), b=(int, ...)),
    }
    assert len(others | {base}) == 5


class Tree(pydantic.BaseModel):
    """A model without a fixed depth."""

    children: list["Tree"]


class Bare(pydantic.RootModel[list[str]]):
    """A model without named fields."""


class Empty(pydantic.BaseModel):
    """A model without fields."""


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        (dict[str, int], r"Made.field has the type dict"),
        (int | str, r"Made.field has the type int \| str"),
        (Literal["a", 1], r"Made.field has the type Literal"),
        (list[set[str]], r"Made.field\[\] has the type set"),
        (bytes, "bytes"),
        (Tree, "contains itself"),
        (Bare, "RootModel"),
        (Empty, "no fields"),
    ],
)
def test_unsupported_types_are_named(annotation, says):
    """A field that no column can hold is refused at load, by its name and type."""
    with pytest.raises(SchemaError, match=says):
        DescriptionSchema(pydantic.create_model("Made", field=(annotation, ...)))


@pytest.fixture
def user_module(monkeypatch):
    module = types.ModuleType("user_schema")
    module.House = House  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "user_schema", module)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("House", "'module:Class'"),
        (":House", "'module:Class'"),
        ("no_such_module_here:House", "no module named 'no_such_module_here'"),
        ("user_schema:Hause", "no Hause; it has House"),
        ("user_schema:number", "no subclass of pydantic.BaseModel"),
    ],
)
def test_load_schema_errors(user_module, name, says):
    """A name that leads nowhere gives a sentence that says where it ended."""
    with pytest.raises(SchemaError, match=says):
        load_schema(name)


def test_load_schema(user_module):
    """A dotted name leads to the user's model."""
    assert load_schema("user_schema:House").model is House


class Yard(pydantic.BaseModel):
    """Outside."""

    has_pool: bool = pydantic.Field(description="Whether there is a pool.")
    trees: int = pydantic.Field(ge=0, le=50)
    fence: Literal["wood", "stone"]


class Checked(pydantic.BaseModel):
    """With a validator."""

    a: int
    b: int

    @pydantic.field_validator("a")
    @classmethod
    def _even(cls, a: int) -> int:
        return a


def test_a_part_of_a_schema_is_what_a_class_of_these_fields_would_be(user_module, monkeypatch):
    """The digest of all fields is that of the class: rows made with the class are made with the part."""
    module = __import__("sys").modules["user_schema"]
    monkeypatch.setattr(module, "Yard", Yard, raising=False)
    whole = load_schema("user_schema:Yard")
    every = part_of_schema("user_schema:Yard", ["has_pool", "trees", "fence"])
    assert load_schema(every).digest == whole.digest
    part = load_schema(part_of_schema(every, ["trees", "has_pool"]))
    assert list(part.json_schema["properties"]) == ["trees", "has_pool"]
    assert part.parse('{"trees": 3, "has_pool": true}') == {"trees": 3, "has_pool": True}
    for answer in ('{"trees": 51, "has_pool": true}', '{"trees": 3}'):
        with pytest.raises(InvalidDescription):
            part.parse(answer)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ("[trees,trees]", "each field once"),
        ("[trees", "each field once"),
        ("[]", "no field ''; it has has_pool, trees, fence"),
        ("[treees]", "no field 'treees'"),
    ],
)
def test_a_part_that_is_none_is_named(user_module, monkeypatch, fields, says):
    """A field that is misspelt would be left out without a word."""
    monkeypatch.setattr(__import__("sys").modules["user_schema"], "Yard", Yard, raising=False)
    with pytest.raises(SchemaError, match=says):
        load_schema(f"user_schema:Yard{fields}")


def test_a_class_with_validators_has_no_parts(user_module, monkeypatch):
    """A validator may look at a field that the part leaves out, and would judge each answer wrongly."""
    monkeypatch.setattr(__import__("sys").modules["user_schema"], "Checked", Checked, raising=False)
    with pytest.raises(SchemaError, match="Checked has validators"):
        load_schema("user_schema:Checked[a]")


def test_description_text():
    """The canonical text is compact, in order, keeps letters as they are and leaves out what is not known."""
    description = {"b": "Küche", "a": None, "rooms": [{"n": 1, "m": None}], "tags": []}
    assert description_text(description) == '{"b":"Küche","rooms":[{"n":1}],"tags":[]}'
