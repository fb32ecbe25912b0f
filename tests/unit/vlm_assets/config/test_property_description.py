"""The default schema: what the prompt, guided decoding and the example rely on."""

import pytest
from pydantic import ValidationError

from examples.truth import FIELDS, draw_truth
from vlm_assets.config.property_description import PropertyDescription


def test_every_field_is_explained() -> None:
    """Prompt and JSON schema are made from the fields' descriptions: none may be without one."""
    assert [name for name, field in PropertyDescription.model_fields.items() if not field.description] == []


def test_twelve_fields_can_be_checked_and_the_sentence_comes_last() -> None:
    """The free text follows from the fields, so it is written after them."""
    assert len(FIELDS) == 12
    assert list(PropertyDescription.model_fields) == [*FIELDS, "summary"]


def test_values_outside_the_schema_are_refused() -> None:
    """A value that no field allows, a field too many or a missing one is not a description."""
    sound = draw_truth("example", 7, 0).model_dump()
    for spoiled in ({"roof": "thatch"}, {"floors": 6}, {"floors": 0}, {"cellar": True}):
        with pytest.raises(ValidationError):
            PropertyDescription.model_validate(sound | spoiled)
    del sound["garden"]
    with pytest.raises(ValidationError):
        PropertyDescription.model_validate(sound)
