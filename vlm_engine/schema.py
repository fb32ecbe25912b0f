"""The description schema: one pydantic model as JSON schema, as Arrow struct, and as validator of answers.

This module loads the user's model, makes its two other forms, parses one answer, writes the canonical text of
a description, and says when two values mean the same. The prompt is in prompt.py, guided decoding in
guided.py, retries in ladder.py.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import importlib
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import pyarrow as pa
import pydantic

from vlm_engine.confidence import AnswerField, answer_fields
from vlm_engine.protocol import InvalidDescription

_TRUE, _FALSE = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0"})
_INT64 = range(-(2**63), 2**63)
_SCALARS: dict[type, pa.DataType] = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
}


class SchemaError(ValueError):
    """A description schema cannot be used: not found, no pydantic model, or a field type we cannot store."""


class DescriptionSchema:
    """A pydantic model as the schema of descriptions.

    Raises SchemaError where a field has no plain Arrow form. Supported: str, int, float, bool, Literal and
    Enum of one of these, Optional, list of any of these, nested models.
    """

    def __init__(self, model: type[pydantic.BaseModel]) -> None:
        self.model = model
        self.name = f"{model.__module__}:{model.__qualname__}"
        self.arrow_type: pa.StructType = _struct_of(model, where=model.__name__, above=())

    @cached_property
    def json_schema(self) -> dict[str, Any]:
        """The JSON schema that guides decoding: no ``$ref``, every field required, no other fields.

        Fields with a default are required too: a guided model would learn to leave optional fields out.
        """
        schema = self.model.model_json_schema()
        definitions = schema.pop("$defs", {})
        inlined = _inlined(schema, definitions)
        assert isinstance(inlined, dict)
        return inlined

    @cached_property
    def fields(self) -> tuple[AnswerField, ...]:
        """The fields of an answer, as their confidence needs them."""
        return answer_fields(self.json_schema, self.arrow_type)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the JSON schema and the Arrow type, in hex. Python code of validators is not seen."""
        meaning = json.dumps([self.json_schema, str(self.arrow_type)], ensure_ascii=False)
        return hashlib.sha256(meaning.encode()).hexdigest()

    def parse(self, text: str) -> dict[str, Any]:
        """One answer as a plain dict in the schema's order, ready for Arrow.

        Strict: one JSON object and nothing around it but white space, no NaN, no duplicate keys, no
        conversions between types. Raises InvalidDescription.
        """
        _require_strict_json(text)
        try:
            parsed = self.model.model_validate_json(text, strict=True)
        except pydantic.ValidationError as error:
            errors = error.errors(include_url=False)
            unparsed = any(details["type"] == "json_invalid" for details in errors)
            kind = "invalid_json" if unparsed else "schema_mismatch"
            raise InvalidDescription(kind, _first_errors(error)) from None
        except Exception as error:  # A user's validator may raise anything; one answer must not end a run.
            raise InvalidDescription(
                "schema_mismatch", f"validator raised {type(error).__name__}: {error}"
            ) from error
        plain = _storable(parsed, self.arrow_type, where="")
        assert isinstance(plain, dict)
        return plain


def description_text(description: Mapping[str, Any]) -> str:
    """The canonical text of a description: compact JSON in schema order, without fields that are null."""
    return json.dumps(_without_nulls(description), ensure_ascii=False, separators=(",", ":"))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_without_nulls(element) for element in value]
    return value


def part_of_schema(name: str, fields: Iterable[str]) -> str:
    """The name of a part of a schema, as ``load_schema`` takes it: of the fields that are named, in order."""
    return f"{name.partition('[')[0]}[{','.join(fields)}]"


def load_schema(name: str) -> DescriptionSchema:
    """The schema of ``module:Class``, or of some fields of it: ``module:Class[field,field]``.

    Raises SchemaError, saying what was not found or does not fit.
    """
    whole, bracket, listed = name.partition("[")
    model = _load_model(whole)
    if not bracket:
        return DescriptionSchema(model)
    fields = [field.strip() for field in listed.removesuffix("]").split(",")]
    if not listed.endswith("]") or len(set(fields)) < len(fields):
        raise SchemaError(f"description schema {name!r}: write each field once: 'module:Class[field,field]'")
    if unknown := [field for field in fields if field not in model.model_fields]:
        raise SchemaError(
            f"description schema {name!r}: {model.__name__} has no field {unknown[0]!r}; it has"
            f" {', '.join(model.model_fields)}"
        )
    decorators = model.__pydantic_decorators__
    if any(getattr(decorators, field.name) for field in dataclasses.fields(decorators)):
        raise SchemaError(
            f"description schema {name!r}: {model.__name__} has validators, which may look at the fields that"
            " are left out: write a class of these fields"
        )
    return DescriptionSchema(_part(model, fields))


def _part(model: type[pydantic.BaseModel], fields: Iterable[str]) -> type[pydantic.BaseModel]:
    """A class that differs in its fields alone."""
    parts: dict[str, Any] = {
        name: (model.model_fields[name].annotation, model.model_fields[name]) for name in fields
    }
    return pydantic.create_model(
        model.__name__,
        __config__=model.model_config,
        __doc__=model.__doc__,
        __module__=model.__module__,
        **parts,
    )


def _load_model(name: str) -> type[pydantic.BaseModel]:
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise SchemaError(
            f"description schema {name!r} is not of the form 'module:Class'; "
            "write for example 'vlm_assets.config.property_description:PropertyDescription'"
        )
    try:
        resolved: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SchemaError(
            f"description schema {name!r}: no module named {error.name!r}; "
            "put its file into the folder where you start the command, or install it in this environment"
        ) from error
    except Exception as error:  # The user's module is code, and may raise anything.
        raise SchemaError(
            f"description schema {name!r}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    for part in class_name.split("."):
        if not hasattr(resolved, part):
            models = _models_in(resolved)
            offer = f"; it has {', '.join(models)}" if models else ""
            raise SchemaError(f"description schema {name!r}: {module_name} has no {class_name}{offer}")
        resolved = getattr(resolved, part)
    if not (isinstance(resolved, type) and issubclass(resolved, pydantic.BaseModel)):
        raise SchemaError(f"description schema {name!r}: {class_name} is no subclass of pydantic.BaseModel")
    return resolved


def _models_in(module: object) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, pydantic.BaseModel)
        and value is not pydantic.BaseModel
    )


# --- JSON schema -------------------------------------------------------------------------------------


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    """A copy of a JSON schema node with references replaced, objects closed, and titles left out."""
    if isinstance(node, list):
        return [_inlined(element, definitions) for element in node]
    if not isinstance(node, dict):
        return copy.deepcopy(node)
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[-1]]
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _inlined({**target, **beside}, definitions)
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":  # Its keys are field names, and a field may be called "title".
            out[key] = {name: _inlined(field, definitions) for name, field in value.items()}
        elif key not in ("title", "default", "required", "additionalProperties"):
            out[key] = _inlined(value, definitions)
    if out.get("type") == "object":
        out["required"] = list(out.get("properties", {}))
        out["additionalProperties"] = False
    return out


# --- Arrow -------------------------------------------------------------------------------------------


def _struct_of(model: type[pydantic.BaseModel], *, where: str, above: tuple[type, ...]) -> pa.StructType:
    if model in above:
        raise SchemaError(f"{where}: {model.__name__} contains itself; a column needs a fixed depth")
    if issubclass(model, pydantic.RootModel):
        raise SchemaError(f"{where}: {model.__name__} is a RootModel; a description has named fields")
    if not model.model_fields:
        raise SchemaError(f"{where}: {model.__name__} has no fields; a description has at least one")
    fields = [
        pa.field(name, _arrow_of(field.annotation, where=f"{where}.{name}", above=(*above, model)))
        for name, field in model.model_fields.items()
    ]
    return pa.struct(fields)


def _arrow_of(annotation: Any, *, where: str, above: tuple[type, ...]) -> pa.DataType:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _arrow_of(arguments[0], where=where, above=above)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) == 1:
            return _arrow_of(inner[0], where=where, above=above)
    if origin is list and len(arguments) == 1:
        return pa.list_(_arrow_of(arguments[0], where=f"{where}[]", above=above))
    if origin is typing.Literal:
        return _type_of_values(arguments, annotation, where=where)
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            return _type_of_values([member.value for member in annotation], annotation, where=where)
        if issubclass(annotation, pydantic.BaseModel):
            return _struct_of(annotation, where=where, above=above)
        if annotation in _SCALARS:
            return _SCALARS[annotation]
    raise _unsupported(annotation, where)


def _type_of_values(values: Iterable[Any], annotation: Any, *, where: str) -> pa.DataType:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) == 1 and (kind := kinds.pop()) in _SCALARS:
        return _SCALARS[kind]
    raise _unsupported(annotation, where)


def _unsupported(annotation: Any, where: str) -> SchemaError:
    shown = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    return SchemaError(
        f"{where} has the type {shown}, which no column can hold; use str, int, float, bool, a Literal or "
        "Enum of one of these, Optional, list[...] or a nested model"
    )


def confidence_type(description: pa.StructType) -> pa.StructType:
    """The struct of confidences for a description: a float a field, a struct for a nested object."""
    return pa.struct(
        [
            (field.name, confidence_type(field.type) if pa.types.is_struct(field.type) else pa.float32())
            for field in description
        ]
    )


# --- answers -----------------------------------------------------------------------------------------


def _require_strict_json(text: str) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidDescription("invalid_json", f"the field {twice!r} stands twice")
        return fields

    def no_constant(name: str) -> Any:
        raise InvalidDescription("invalid_json", f"{name} is no JSON number")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except InvalidDescription:
        raise
    except json.JSONDecodeError as error:
        raise InvalidDescription(
            "invalid_json", f"{error.msg} at character {error.pos} of {len(text)}"
        ) from None
    except (RecursionError, ValueError) as error:  # Too deep, or an integer of thousands of digits.
        raise InvalidDescription("invalid_json", str(error)) from None
    if not isinstance(value, dict):
        raise InvalidDescription("invalid_json", f"a JSON object was asked for, not {type(value).__name__}")


def _storable(value: Any, kind: pa.DataType, *, where: str) -> Any:
    """A validated value as plain Python of exactly the Arrow type, or InvalidDescription."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {
            field.name: _storable(
                getattr(value, field.name), field.type, where=f"{where}.{field.name}".removeprefix(".")
            )
            for field in kind
        }
    if pa.types.is_list(kind):
        return [
            _storable(element, kind.value_type, where=f"{where}[{index}]")
            for index, element in enumerate(value)
        ]
    if pa.types.is_int64(kind) and value not in _INT64:
        raise InvalidDescription("schema_mismatch", f"{where}: {value} does not fit 64 bits")
    if pa.types.is_float64(kind) and not math.isfinite(value):
        raise InvalidDescription("schema_mismatch", f"{where}: {value} is not a finite number")
    return value


def _first_errors(error: pydantic.ValidationError) -> str:
    errors = error.errors(include_url=False, include_context=False)
    shown = [f"{'.'.join(map(str, first['loc'])) or 'answer'}: {first['msg']}" for first in errors[:3]]
    more = f" (and {len(errors) - 3} more)" if len(errors) > 3 else ""
    return "; ".join(shown) + more


def same(first: Any, second: Any) -> bool:
    """Whether two values mean the same: numbers by value, words whatever their case, lists in any order."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return sorted(map(_plain, first)) == sorted(map(_plain, second))
    return _plain(first) == _plain(second)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, sort_keys=True, default=str).casefold()
    text = " ".join(str(value).split()).casefold()
    if text in _TRUE and not text.isdigit():
        return "true"
    if text in _FALSE and not text.isdigit():
        return "false"
    try:
        return repr(float(text))
    except ValueError:
        return text
