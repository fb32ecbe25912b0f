"""The prompt: the text that the model reads beside the images of one property.

The text is the user's, or is made from the schema; its digest is here too. The engines put images and text
into a model's own chat format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_engine.schema import DescriptionSchema


class EmptyPromptError(ValueError):
    """The user's prompt has no text."""


@dataclass(frozen=True)
class Prompt:
    """The text that follows the images of a property."""

    text: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the text as UTF-8, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class FurtherQuestion:
    """A question that is asked of the same images, after the first. max_new_tokens: of a first attempt."""

    prompt: Prompt
    schema: DescriptionSchema
    max_new_tokens: int


def build_prompt(schema: DescriptionSchema, text: str | None = None) -> Prompt:
    """The user's text exactly as it is, or, where there is none, one made from the schema's fields.

    Raises EmptyPromptError for a text of nothing but white space.
    """
    if text is None:
        return Prompt(_text_from(schema))
    if not text.strip():
        raise EmptyPromptError("the prompt is empty; write one, or unset it to have one made from the schema")
    return Prompt(text)


def _text_from(schema: DescriptionSchema) -> str:
    about = schema.json_schema.get("description", "")
    opening = [
        "These are all images of one property. Look at them together and describe the property.",
        *([" ".join(about.split())] if about else []),
        "Answer with one JSON object and nothing else. Its fields, in this order:",
    ]
    return "\n".join([*opening, *_field_lines(schema.json_schema, indent="")])


def _field_lines(node: Mapping[str, Any], *, indent: str) -> list[str]:
    lines: list[str] = []
    for name, field in node["properties"].items():
        description = " ".join(str(field.get("description", "")).split())
        lines.append(f"{indent}- {name} ({_kind_of(field)})" + (f": {description}" if description else ""))
        for below in _objects_in(field):
            lines.extend(_field_lines(below, indent=indent + "  "))
    return lines


def _kind_of(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return "one of " + ", ".join(_shown(value) for value in field["enum"])
    if "const" in field:
        return f"always {_shown(field['const'])}"
    if "anyOf" in field:
        return " or ".join(_kind_of(option) for option in field["anyOf"])
    kind = field.get("type")
    if kind == "array":
        return f"list of {_kind_of(field['items'])}"
    names = {"string": "text", "integer": "whole number", "boolean": "true or false", "object": "object"}
    return names.get(str(kind), str(kind)) + _bounds_of(field)


def _bounds_of(field: Mapping[str, Any]) -> str:
    words = [
        f"{word} {field[key]}{unit}"
        for key, word, unit in (
            ("minimum", "from", ""),
            ("exclusiveMinimum", "above", ""),
            ("maximum", "to", ""),
            ("exclusiveMaximum", "below", ""),
            ("maxLength", "at most", " characters"),
        )
        if key in field
    ]
    return " " + " ".join(words) if words else ""


def _objects_in(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if field.get("type") == "object":
        return [field]
    options = [*field.get("anyOf", []), *([field["items"]] if "items" in field else [])]
    return [node for option in options for node in _objects_in(option)]


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
