"""The larger example model: small enough to be shipped, and right more often where photos are bad."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import examples
from examples.architecture import answer_ids, build_tokenizer
from examples.canvas import degraded
from examples.evaluation import property_photos
from examples.training_data import Rendered
from examples.truth import FIELDS, draw_truth
from vlm_engine.images.images import LoadedProperty
from vlm_engine.ladder import describe_batch
from vlm_engine.model_source import ModelSource
from vlm_engine.prompt import build_prompt
from vlm_engine.schema import load_schema
from vlm_engine.transformers.transformers_engine import TransformersEngine

SMALL = Path(examples.__file__).with_name("model")
LARGER = Path(examples.__file__).with_name("larger_model")
SCHEMA = "vlm_assets.config.property_description:PropertyDescription"
SEED, PROPERTIES = 424_242, 16


@pytest.fixture(scope="module")
def photos() -> list[list[Any]]:
    """Of properties whose photos are blurred and dark, each property's by its own measure."""
    return [
        [np.asarray(Image.open(io.BytesIO(data))) for data in property_photos(SEED, index, degraded=True)]
        for index in range(PROPERTIES)
    ]


def right(folder: Path, photos: Sequence[Sequence[Any]], schema: str = SCHEMA) -> Mapping[str, float]:
    """The share of right answers, by field, as the product loads a model and asks it."""
    loaded = load_schema(schema)
    engine = TransformersEngine(
        ModelSource(str(folder)), schema=loaded, prompt=build_prompt(loaded), device="cpu"
    )
    batch = [
        LoadedProperty(f"p{index}", index, images, len(images), (), 0.0)
        for index, images in enumerate(photos)
    ]
    answers = [row.description for row in describe_batch(engine, loaded, batch, 256)]
    engine.close()
    return {
        name: float(
            np.mean(
                [
                    answer is not None and answer[name] == getattr(draw_truth("example", SEED, index), name)
                    for index, answer in enumerate(answers)
                ]
            )
        )
        for name in FIELDS
        if name in loaded.json_schema["properties"]
    }


def test_the_folder_is_small_and_has_no_code() -> None:
    """It is shipped in the repository: under 15 MB, safetensors only, with its card."""
    files = {path.name: path.stat().st_size for path in LARGER.iterdir()}
    assert sum(files.values()) < 15_000_000
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(files)
    assert not [name for name in files if name.endswith((".bin", ".pt", ".py", ".pkl"))]


def test_it_is_right_more_often_than_the_small_one(photos: list[list[Any]]) -> None:
    """Else nobody would ask for its opinion. Asked for two fields alone it is as good as asked for all."""
    small, larger = right(SMALL, photos), right(LARGER, photos)
    assert np.mean(list(larger.values())) > np.mean(list(small.values())) + 0.05
    alone = right(LARGER, photos, f"{SCHEMA}[roof,has_pool]")
    for name in ("roof", "has_pool"):
        assert larger[name] > small[name] - 0.01
        assert alone[name] >= larger[name] - 0.1


def test_half_of_what_it_learns_from_is_degraded_and_half_asks_for_a_few_fields() -> None:
    """The same each time; an answer of some fields has no token of another."""
    samples = [Rendered(0, 12, larger=True)[index] for index in range(12)]
    again = Rendered(0, 12, larger=True)[3]
    assert np.array_equal(again.images, samples[3].images) and again.asked == samples[3].asked
    alone = [sample for sample in samples if sample.asked is not None]
    assert 2 <= len(alone) <= 10
    tokenizer = build_tokenizer(properties=50, parts=True)
    for one in alone:
        ids, knowable = answer_ids(tokenizer, one.truth, one.unseen, one.asked)
        assert set(json.loads(tokenizer.decode(ids[:-1]))) == set(one.asked or ())
        assert len(ids) == len(knowable)


def test_a_photo_that_is_degraded_by_nothing_is_the_photo() -> None:
    """The measure goes from there to hardly recognisable, whatever the photo's size."""
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8))
    assert np.array_equal(degraded(photo, 0), photo)
    worst = np.asarray(degraded(photo, 1))
    assert worst.mean() < 0.45 * np.asarray(photo).mean()
    assert worst.std() < 0.1 * np.asarray(photo).std()
