"""Homes of given descriptions and vectors, published without a model, for what searches them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vlm_assets.assets.description_work import description_rows
from vlm_assets.assets.fingerprint import embedding_parts
from vlm_assets.assets.property_embeddings import embedding_rows
from vlm_assets.config.resource_settings import build_text_embedding_model
from vlm_assets.config.settings import Settings, load_settings
from vlm_catalog.catalog import Catalog, catalog_path
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import PropertyRange
from vlm_durable.files.layout import AssetFolders
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine.schema import load_schema

Description = Mapping[str, Any]
Vectors = npt.NDArray[np.float32]


def make_home(
    folder: Path,
    properties: int,
    *,
    describe: Callable[[int], Description],
    embed: Callable[[Sequence[Description]], Vectors],
    range_size: int = 1000,
) -> Settings:
    """Publish descriptions and vectors of so many properties, P00000000 and on. What is there stays.

    describe: of each ordinal. embed: gives vectors [descriptions, width]; the records name the example's
    embedder.
    """
    settings = load_settings(home=folder / "home", model="example", embedding_model="example")
    if not catalog_path(settings.home).exists():
        folder.mkdir(parents=True, exist_ok=True)
        listing = folder / "listing.jsonl"
        with listing.open("w") as stream:
            for ordinal in range(properties):
                stream.write(json.dumps({"property_id": name(ordinal), "images": [f"{ordinal}.jpg"]}) + "\n")
        ingest(listing, settings.home, range_size=range_size, close=True)
    done = set(PublishedPartitions(settings.embeddings).keys())
    for part in Catalog.open(settings.home).ranges:
        if part.key not in done:
            _publish(settings, part, [describe(ordinal) for ordinal in range(part.start, part.stop)], embed)
    return settings


def name(ordinal: int) -> str:
    """The id of a property."""
    return f"P{ordinal:08d}"


def _publish(
    settings: Settings,
    part: PropertyRange,
    descriptions: Sequence[Description],
    embed: Callable[[Sequence[Description]], Vectors],
) -> None:
    schema = description_rows(load_schema(settings.description_schema).arrow_type)
    same = {"status": "ok", "model": "made", "fingerprint": "made"}
    rows = [
        {"property_id": name(ordinal), "ordinal": ordinal, "description": description, **same}
        for ordinal, description in enumerate(descriptions, start=part.start)
    ]
    _write(settings.descriptions, part, pa.Table.from_pylist(rows, schema=schema), {})
    vectors, made_at = embed(descriptions), datetime.now(UTC)
    columns: dict[str, Any] = {
        "property_id": [row["property_id"] for row in rows],
        "ordinal": [row["ordinal"] for row in rows],
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1]),
    }
    fields = embedding_rows(vectors.shape[1])
    for field in fields:
        value = made_at if pa.types.is_timestamp(field.type) else "ok"
        columns.setdefault(field.name, [value] * len(rows))
    table = pa.table([pa.array(columns[field.name], field.type) for field in fields], schema=fields)
    _write(settings.embeddings, part, table, embedding_parts(build_text_embedding_model(settings)))


def _write(asset: AssetFolders, part: PropertyRange, table: pa.Table, parts: Mapping[str, str]) -> None:
    published = PublishedPartitions(asset)
    with published.stage(
        part.key,
        table.to_batches(),
        table.schema,
        expected_ids=table["property_id"].to_pylist(),
        fingerprint="made",
        metadata={"parts": dict(parts)},
    ) as staged:
        published.publish(staged)
