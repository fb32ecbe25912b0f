"""The prompt: the user's own text, or one made from the schema."""

from typing import Literal

import pydantic
import pytest

from vlm_engine.prompt import EmptyPromptError, build_prompt
from vlm_engine.schema import DescriptionSchema


class Room(pydantic.BaseModel):
    """A nested model."""

    name: str = pydantic.Field(description="As people\n call it", max_length=20)


class House(pydantic.BaseModel):
    """A house
    for sale."""

    roof: Literal["flat", "gabled"] = pydantic.Field(description="Shape of the roof")
    storeys: int = pydantic.Field(ge=1, le=5)
    pool: bool | None
    rooms: list[Room]


def test_made_from_schema():
    """Without a text of one's own, the prompt names each field with its kind, bounds and description."""
    lines = build_prompt(DescriptionSchema(House)).text.splitlines()
    assert lines[1] == "A house for sale."
    assert lines[3:] == [
        '- roof (one of "flat", "gabled"): Shape of the roof',
        "- storeys (whole number from 1 to 5)",
        "- pool (true or false or null)",
        "- rooms (list of object)",
        "  - name (text at most 20 characters): As people call it",
    ]


def test_own_text_is_untouched():
    """The user's text is asked as it is, and its digest follows it."""
    schema = DescriptionSchema(House)
    prompt = build_prompt(schema, "  What is this? ")
    assert prompt.text == "  What is this? "
    assert prompt.digest == build_prompt(schema, "  What is this? ").digest
    assert prompt.digest != build_prompt(schema, "What is this?").digest
    assert prompt.digest != build_prompt(schema).digest


def test_empty_text_is_refused():
    """An empty prompt is a mistake in the settings, not a wish for the default."""
    with pytest.raises(EmptyPromptError):
        build_prompt(DescriptionSchema(House), " \n")
