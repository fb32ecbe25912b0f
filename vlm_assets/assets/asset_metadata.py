"""What Dagster's pages say of an asset before it ever ran: its columns, what they hold, and where it lies.

The fields of a description are the user's schema, one column each: ``description.NAME``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import dagster as dg
import pyarrow as pa

from vlm_assets.config.settings import Settings
from vlm_engine.schema import DescriptionSchema

_ROW: Final = {
    "property_id": "The property's id, as it was ingested.",
    "ordinal": "The property's number in the catalogue, which never changes.",
    "status": "ok, or failed.",
    "model": "Name of the model that made the row.",
    "model_revision": "Exact version of that model.",
    "inputs_digest": "Digest of everything that decides the row.",
    "fingerprint": "Digest of everything that decides the rows of the partition it was made for.",
    "device": "Where it was computed.",
}

CATALOG: Final = {
    "ordinal": _ROW["ordinal"],
    "property_id": _ROW["property_id"],
    "image_uris": "The property's images, relative to the image root.",
    "image_bytes": "Their sizes; null for an image that could not be read at the ingest.",
    "inputs_digest": "Digest of the property's images.",
}

DESCRIPTIONS: Final = {
    **_ROW,
    "error_kind": "Kind of failure; null where the status is ok.",
    "error": "Why the property failed, in a sentence.",
    "description": "The model's answer; null where the property failed.",
    "confidence": "How probable the model found each field of it, from 0 to 1; null where that is not known.",
    "raw_text": "The model's answer as it came.",
    "tries": "Runs that tried the property, this one included.",
    "attempts": "Attempts of the last of these.",
    "images_seen": "Images that the model was shown.",
    "images_used": "Those images.",
    "images_not_used": "Images left out although they can be read.",
    "images_not_used_reason": "Why they were left out.",
    "images_failed": "Images that could not be used, and why.",
    "prompt_tokens": "Tokens of question and images.",
    "output_tokens": "Tokens of the answer.",
    "finish_reason": "Why the answer ended: stop, or length.",
    "seconds": "Seconds that the answer took.",
    "described_at": "When it was described (UTC).",
}

EMBEDDINGS: Final = {
    **_ROW,
    "embedding": "The vector of the description's text; null where the description failed.",
    "embedded_at": "When it was embedded (UTC).",
}


_NEVER_NULL: Final = frozenset({*CATALOG, "status"})


def table_metadata(
    settings: Settings,
    place: str,
    rows: pa.Schema,
    meanings: Mapping[str, str],
    *,
    description: DescriptionSchema | None = None,
) -> dict[str, Any]:
    """The metadata of an asset that is a table.

    place: its file or folder, below the home. meanings: what each column holds. description: the user's
    schema.
    """
    columns: list[dg.TableColumn] = []
    for field in rows:
        columns.append(_column(field, meanings))
        if field.name == "description" and description is not None:
            columns += _fields(field.name, description.arrow_type, description.json_schema)
    uri = settings.mirror.uri_of(settings.home / place, settings.home)
    return {"dagster/column_schema": dg.TableSchema(columns), "dagster/uri": uri}


def _column(field: pa.Field, meanings: Mapping[str, str]) -> dg.TableColumn:
    constraints = dg.TableColumnConstraints(
        nullable=field.name not in _NEVER_NULL, unique=field.name == "property_id"
    )
    return dg.TableColumn(field.name, _type(field.type), meanings[field.name], constraints)


def _fields(path: str, kind: pa.StructType, node: Mapping[str, Any]) -> Iterator[dg.TableColumn]:
    """The fields of an object, and those of objects in it. node: its JSON schema."""
    for field in kind:
        of_field: Mapping[str, Any] = node["properties"][field.name]
        value = next((part for part in of_field.get("anyOf", ()) if part.get("type") != "null"), of_field)
        name, inner = f"{path}.{field.name}", field.type
        text = of_field.get("description") or value.get("description")
        constraints = dg.TableColumnConstraints(other=list(_limits(value)))
        yield dg.TableColumn(name, _type(inner), text, constraints)
        while pa.types.is_list(inner) and "items" in value:
            name, inner, value = f"{name}[]", inner.value_type, value["items"]
        if pa.types.is_struct(inner) and "properties" in value:
            yield from _fields(name, inner, value)


def _limits(node: Mapping[str, Any]) -> Iterator[str]:
    """What a value may be, in words."""
    if "enum" in node:
        yield f"one of {', '.join(map(str, node['enum']))}"
    for name, words in (
        ("const", "always {}"),
        ("minimum", "{} or more"),
        ("exclusiveMinimum", "more than {}"),
        ("maximum", "{} or less"),
        ("exclusiveMaximum", "less than {}"),
        ("maxLength", "{} characters at most"),
        ("maxItems", "{} elements at most"),
    ):
        if name in node:
            yield words.format(node[name])


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"list<{_type(kind.value_type)}>"
    return "struct" if pa.types.is_struct(kind) else str(kind)
