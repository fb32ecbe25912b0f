"""Whole partitions through the product, on models with random weights.

``python -m benchmarks.partitions KEY ASSET...`` materializes one partition of the home that the environment
names, in this process, as a run of Dagster's does. What lives here: that, a home with properties, a model's
folder, and a schema whose answers end whatever the weights say. What does not: what is compared.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import dagster as dg
from pydantic import BaseModel

from benchmarks.gpu_loops import PROMPT
from benchmarks.gpu_models import SHAPES, build_model, build_tokenizer, save_processor_of, tokenizer_of
from vlm_assets.config.settings import Settings, load_settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import DESCRIPTIONS

SCHEMA = "benchmarks.partitions:House"
EMBEDDINGS = "property_embeddings"


class House(BaseModel):
    """About 128 bytes, each of which is a token here. Free text of random weights would never end."""

    kind: Literal["house", "villa", "cabin"]
    storeys: Literal["one", "two", "three"]
    roof: Literal["flat", "gable", "hip"]
    facade: Literal["brick", "render", "timber"]
    condition: Literal["new", "good", "poor"]
    garden: Literal["lawn", "trees", "paved"]
    rooms: Literal["few", "some", "many"]


def save_model(name: str, folder: Path, *, device: Literal["cpu", "cuda"], side: int) -> None:
    """Save a model of a shape with random weights and its processor, as a repository has them.

    The device's memory is given back: the processes that come are to have all of it.
    """
    import torch

    shape = SHAPES[name]
    tokenizer = tokenizer_of(shape)
    save_processor_of(shape, tokenizer, folder, side=side, prompt=PROMPT.text)
    build_model(shape, tokenizer, device=device).save_pretrained(folder)
    gc.collect()
    torch.cuda.empty_cache()


def save_embedder(folder: Path, *, tiny: bool) -> None:
    """Save a text embedder with random weights, of the size of BGE small: first token, unit length."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import BertConfig, BertModel

    layers, width = (2, 64) if tiny else (12, 384)
    tokenizer = build_tokenizer(512)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )
    with tempfile.TemporaryDirectory() as plain:
        BertModel(config).save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        parts = [Transformer(plain), Pooling(width, pooling_mode="cls"), Normalize()]
        SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(folder))


def make_home(
    home: Path, images: Sequence[str], *, partitions: int, properties: int, images_each: int
) -> list[str]:
    """Catalogue partitions of properties, every other one with an image less; returns the partitions' keys.

    images: paths, shown again and again.
    """
    shown = itertools.cycle(images)
    lines = [
        json.dumps(
            {
                "property_id": f"p{at:06d}",
                "images": list(itertools.islice(shown, max(1, images_each - at % 2))),
            }
        )
        for at in range(partitions * properties)
    ]
    home.mkdir(parents=True, exist_ok=True)
    listing = home / "listing.jsonl"
    listing.write_text("\n".join(lines) + "\n")
    ingest(listing, home, range_size=properties, image_root=Path(os.path.commonpath(images)), close=True)
    return [property_range.key for property_range in Catalog.open(home).ranges]


def materialize(
    settings: Settings, key: str, assets: Sequence[str], instance: dg.DagsterInstance, **options: bool
) -> dict[str, Any]:
    """Materialize a partition, and return the metadata of its descriptions. options: RunOptions."""
    from vlm_assets.home_definitions import build_defs

    defs = build_defs(settings)
    done = dg.materialize(
        [definition for definition in defs.assets or () if isinstance(definition, dg.AssetsDefinition)],
        selection=list(assets),
        partition_key=key,
        instance=instance,
        resources=defs.resources,
        run_config={
            "loggers": {"console": {"config": {"log_level": "WARNING"}}},
            "ops": {name: {"config": options} for name in assets} if options else {},
        },
    )
    (made,) = done.asset_materializations_for_node(DESCRIPTIONS)
    return {name: value.value for name, value in made.metadata.items()}


def seconds_of_work(measured: Mapping[str, Any]) -> float:
    """Seconds of a partition from its first batch on, of its metadata."""
    parts = ("in model", "waiting for images", "waiting for commit", "building rows")
    return float(sum(measured[f"seconds {part}"] for part in parts))


def main() -> None:
    """Print the metadata as one line of JSON."""
    key, *assets = sys.argv[1:]
    settings = load_settings()
    with (
        tempfile.TemporaryDirectory() as folder,
        dg.DagsterInstance.local_temp(folder) as instance,
    ):
        measured = materialize(settings, key, assets, instance)
    shown = {name: value for name, value in measured.items() if isinstance(value, int | float)}
    print(json.dumps(shown | {"batches": measured["batches"]}))


if __name__ == "__main__":
    main()
