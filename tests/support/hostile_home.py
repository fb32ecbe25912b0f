"""A home in which every text of a stranger is markup, and a server that sees who fetches what it names."""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pyarrow as pa
import pydantic
from PIL import Image

from tests.support.listings import write_listing
from vlm_assets.assets.description_work import description_rows
from vlm_assets.assets.fingerprint import SETTINGS, TEXTS, embedding_parts
from vlm_assets.assets.published_rows import COUNTED, row_counts
from vlm_assets.config.resource_settings import build_text_embedding_model
from vlm_assets.config.settings import Settings, load_settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import PropertyRange
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine.schema import load_schema
from vlm_results.quality import CONTRADICTIONS
from vlm_results.review import append_verdict, draw_sample, verdict_of

SCHEMA = "hostile_schema"
RANGES, RANGE_SIZE = 3, 60
"""The fewest that the quality compares with each other."""

MATH = r"$\bad{$"
"""What matplotlib takes for a formula, and cannot draw."""


@dataclass
class Spy:
    """A server at this port. paths: each that anybody fetches from it."""

    port: int
    paths: list[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def first(self, name: str) -> str:
        """How the markup of this name begins: what a page that shows it as text has."""
        return f"![x]({self.address}/{name}1)"

    def markup(self, name: str) -> str:
        """What makes a browser fetch an image or run a script: markdown, HTML, the end of a table's cell."""
        at = f"{self.address}/{name}"
        return (
            f"| {self.first(name)} <img src='{at}2'> `![x]({at}3) [a]({at}4) \n\n![x]({at}5)"
            f"<img src=x onerror=fetch('{at}6')><script src='{at}7'></script>"
        )

    def file_name(self, number: int) -> str:
        """A name of an image that is a script, without the slash that no file name can have."""
        script = f"fetch('{self.address}/file')"
        while "/" in (encoded := base64.b64encode(script.encode()).decode()):
            script += " "
        return f"{number} ![x](name) <img src=x onerror=eval(atob('{encoded}'))>.jpg"


def install_schema(spy: Spy) -> ModuleType:
    """Make the module of a schema whose fields, descriptions, values and contradictions are markup."""
    fields: dict[str, Any] = {
        "summary": (str, pydantic.Field(description=spy.markup("about"))),
        spy.markup("field"): (Literal[spy.markup("value"), "flat", "$$"], ...),
        spy.markup("constant"): (Literal[spy.markup("always"), "never"], ...),
        spy.markup("flag"): (bool, ...),
        MATH: (bool, ...),
    }
    model = pydantic.create_model("Hostile", __doc__=spy.markup("schema"), **fields)
    setattr(model, CONTRADICTIONS, {spy.markup("contradiction"): "summary IS NOT NULL"})
    module = ModuleType(SCHEMA)
    module.Hostile = model  # type: ignore[attr-defined]
    sys.modules[SCHEMA] = module
    return module


def hostile_home(folder: Path, spy: Spy) -> Settings:
    """Make the home: described, embedded, reviewed, and stale since the settings changed."""
    images = folder / "images"
    images.mkdir()
    listed = {}
    for number in range(RANGES * RANGE_SIZE):
        names = [spy.file_name(number), f"broken {spy.file_name(number)}"]
        Image.new("RGB", (16, 16), "red").save(images / names[0])
        (images / names[1]).write_bytes(b"no image")
        listed[f"{number} {spy.markup('id')}".replace("\n", " ")] = names
    listing = write_listing(folder / "listing.jsonl", listed)
    settings = load_settings(
        home=folder / "home", description_schema=f"{SCHEMA}:Hostile", prompt=spy.markup("prompt")
    )
    ingest(listing, settings.home, range_size=RANGE_SIZE, image_root=images, close=True)
    catalog = Catalog.open(settings.home)
    for one in catalog.ranges:
        _describe(settings, catalog, one, spy)
        _embed(settings, catalog, one)
    (settings.descriptions.published / "![x](name).parquet").write_bytes(b"nothing")
    for reviewed in draw_sample(settings, catalog, count=2, seed=1, suspicious=False):
        right, wrong = [spy.markup("field")], [spy.markup("constant")]
        append_verdict(settings.home, verdict_of(reviewed, right=right, wrong=wrong, corrections={}))
    return settings


def _describe(settings: Settings, catalog: Catalog, one: PropertyRange, spy: Spy) -> None:
    is_odd = one == catalog.ranges[0]
    answer = {
        "summary": spy.markup("summary"),
        spy.markup("field"): spy.markup("value") if is_odd else "$$",
        spy.markup("constant"): spy.markup("always"),
        spy.markup("flag"): True,
        MATH: is_odd,
    }
    ids = catalog.slice(one)["property_id"].to_pylist()
    common = {
        "raw_text": spy.markup("raw"),
        "attempts": 1,
        "images_seen": 1,
        "images_failed": [{"uri": spy.markup("uri"), "kind": "damaged", "error": spy.markup("image")}],
        "model": spy.markup("model"),
        "model_revision": spy.markup("revision"),
        "device": spy.markup("device"),
        "seconds": 1.0,
        "described_at": datetime(2026, 11, 1, tzinfo=UTC),
        "fingerprint": "f",
        "inputs_digest": "i",
    }
    rows = [
        {
            "property_id": property_id,
            "ordinal": ordinal,
            "status": "failed" if ordinal == one.start else "ok",
            "error_kind": spy.markup("kind") if ordinal == one.start else None,
            "error": spy.markup("reason") if ordinal == one.start else None,
            "description": None if ordinal == one.start else answer,
            **common,
        }
        for ordinal, property_id in enumerate(ids, start=one.start)
    ]
    before = {
        "model": spy.markup("old_model"),
        "prompt": {"text": f"Once {spy.markup('old_prompt')}", "made_from_schema": False},
        "schema": {spy.markup("old_field"): "text 1234"},
        "decoding": {spy.markup("option"): spy.markup("chosen")},
    }
    metadata = {"parts": dict.fromkeys(before, "before"), SETTINGS: before, TEXTS: "t"}
    schema = description_rows(load_schema(settings.description_schema).arrow_type)
    _publish(PublishedPartitions(settings.descriptions), one, rows, schema, metadata)


def _embed(settings: Settings, catalog: Catalog, one: PropertyRange) -> None:
    ids = catalog.slice(one)["property_id"].to_pylist()
    rows = [
        {"property_id": id_, "ordinal": at, "status": "ok", "embedding": [1.0, float(at)], "fingerprint": "f"}
        for at, id_ in enumerate(ids, start=one.start)
    ]
    columns = {"property_id": pa.string(), "ordinal": pa.int64(), "status": pa.string()}
    schema = pa.schema({**columns, "fingerprint": pa.string(), "embedding": pa.list_(pa.float32(), 2)})
    parts = {**embedding_parts(build_text_embedding_model(settings)), TEXTS: "t"}
    _publish(PublishedPartitions(settings.embeddings), one, rows, schema, {"parts": parts})


def _publish(
    published: PublishedPartitions,
    one: PropertyRange,
    rows: list[dict[str, Any]],
    schema: pa.Schema,
    metadata: dict[str, Any],
) -> None:
    table = pa.Table.from_pylist(rows, schema=schema)
    ids = [row["property_id"] for row in rows]
    staged = published.stage(
        one.key, table.to_batches(), schema, expected_ids=ids, fingerprint="f", metadata=metadata
    )
    with staged:
        if "error_kind" in schema.names:
            staged.remember({COUNTED: row_counts(staged.path)})
        published.publish(staged)
