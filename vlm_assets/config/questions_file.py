"""The file of question sets, ``VLM_ASSETS_QUESTIONS``: what else is asked of the images of each property.

Only its form is judged here. What a set takes from the home's settings, and whether its schema can be loaded,
``question_sets.py`` says.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vlm_catalog.ranges import CATALOG, DESCRIPTIONS, EMBEDDINGS
from vlm_catalog.ranges import SET_PREFIX as SET_PREFIX

_MOST_BYTES = 1 << 20
_MOST_CHARACTERS = 2000
"""The longest condition."""
_RESERVED = [asset.removeprefix(SET_PREFIX) for asset in (CATALOG, DESCRIPTIONS, EMBEDDINGS)]
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


class AskedSet(BaseModel):
    """One set as the file has it. None: as the home's settings say; of ``prompt``, made from the schema.

    where: an SQL condition on fields of sets above it; None: all properties are asked. fills: fields of sets
    above it, of which it gives the better answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True)

    description_schema: str = Field(alias="schema")
    prompt: str | None = None
    model: str | None = None
    processor_options: str | None = None
    where: str | None = Field(None, min_length=1, max_length=_MOST_CHARACTERS)
    fills: tuple[str, ...] = ()

    @field_validator("processor_options", mode="before")
    @classmethod
    def _an_object_as_text(cls, options: object) -> object:
        return json.dumps(options) if isinstance(options, dict) else options

    def given(self) -> dict[str, str]:
        """The settings that the set has for itself, by name."""
        values = self.model_dump(exclude={"where", "fills"})
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class QuestionsFile:
    """The sets of a file, by name, in its order."""

    path: Path
    sets: tuple[tuple[str, AskedSet], ...]

    def __str__(self) -> str:
        return str(self.path)

    @property
    def assets(self) -> tuple[str, ...]:
        """The names of their assets."""
        return tuple(SET_PREFIX + name for name, _ in self.sets)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The sets of a file. Raises ValueError, which says where it is wrong; nothing of it is then used."""
        try:
            with path.open("rb") as file:
                return cls.parse(path, file.read(_MOST_BYTES + 1))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error

    @classmethod
    def parse(cls, path: Path, content: bytes) -> Self:
        """The sets of what a file has, or would have. Raises ValueError."""
        if len(content) > _MOST_BYTES:
            raise ValueError(f"{path} has more than {_MOST_BYTES} bytes: that is no file of question sets")
        try:
            sets = _sets_in(content)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
        if not isinstance(sets, dict) or not sets:
            raise ValueError(f"{path} names no set: write `NAME:`, and below it `schema: module:Class`")
        return cls(path, tuple((_name(path, name), _asked(path, name, keys)) for name, keys in sets.items()))


def _sets_in(content: bytes) -> object:
    """What the YAML holds. Raises YAMLError, also where a key stands twice: one of the two would be lost."""
    document = yaml.compose(content, Loader=yaml.SafeLoader)
    of_sets = document.value if isinstance(document, yaml.MappingNode) else []
    mappings = [document, *(keys for _, keys in of_sets)]
    for mapping in (node for node in mappings if isinstance(node, yaml.MappingNode)):
        seen = set[str]()
        for key, _ in mapping.value:
            if str(key.value) in seen:
                raise yaml.YAMLError(f"{key.value!r} stands twice, again in line {key.start_mark.line + 1}")
            seen.add(str(key.value))
    return yaml.safe_load(content)


def _name(path: Path, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{path}: {name!r} is no name of a set: write small letters, digits and '_', a letter first, at"
            " most 40"
        )
    if name in _RESERVED:
        raise ValueError(f"{path}: the name {name!r} is reserved, for {SET_PREFIX}{name}: choose another")
    return name


def _asked(path: Path, name: object, keys: object) -> AskedSet:
    if not isinstance(keys, dict):
        raise ValueError(f"{path}: the set {name} says nothing: write `schema: module:Class` below it")
    try:
        return AskedSet.model_validate(keys)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        accepted_keys = ", ".join(field.alias or own for own, field in AskedSet.model_fields.items())
        why = (
            f"there is no such key; the keys are {accepted_keys}"
            if first["type"] == "extra_forbidden"
            else first["msg"]
        )
        raise ValueError(f"{path}: the set {name}, {key}: {why}") from error
