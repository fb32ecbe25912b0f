"""An engine that computes nothing: for tests of what becomes of answers, where the model is not the point."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from resources.vision_language_model import VisionLanguageModel
from vlm_engine.images.images import LoadedProperty
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_engine.protocol import Answer, Attempt, ImageLimits, ImageTokens
from vlm_engine.transformers.image_tokens import fitted_processor

CHARACTERS_A_TOKEN = 4


class ScriptedEngine:
    """Answers in the default schema at once: a text that derives from the property's id and its images.

    It says that it is the model of ``source``, whose image processor says what images cost.
    """

    batches_at_once = 1

    def __init__(self, source: ModelSource, image_tokens: ImageTokens | None) -> None:
        self.model, self.revision = source.label, exact_revision(source)
        self.image_tokens = image_tokens
        self.seconds: Mapping[str, float] = {}

    def prepare(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> None:
        """Nothing."""

    def describe(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> list[Answer]:
        """See Engine."""
        return [_answer(loaded, attempt) for loaded in batch]

    def close(self) -> None:
        """Nothing."""


def _answer(loaded: LoadedProperty, attempt: Attempt) -> Answer:
    """A whole answer, or as much of it as the attempt has tokens for."""
    images = min(loaded.seen, attempt.images or loaded.seen)
    description = {
        "building_type": "villa",
        "facade_material": "brick",
        "roof": "hip",
        "floors": 1 + images % 5,
        "garage": "none",
        "has_solar_panels": False,
        "garden": "lawn",
        "has_pool": False,
        "kitchen": "oak",
        "living_floor": "tile",
        "has_fireplace": False,
        "bathroom": "bath",
        "summary": f"{loaded.property_id}, seen in {images} images.",
    }
    text = json.dumps(description)
    room = attempt.max_new_tokens * CHARACTERS_A_TOKEN
    finish = "stop" if len(text) <= room else "length"
    return Answer(text[:room], finish, 8 * images, len(text[:room]) // CHARACTERS_A_TOKEN)


@cache
def _image_tokens(source: ModelSource, text: str, limits: ImageLimits | None) -> ImageTokens | None:
    return fitted_processor(source, text, limits)[1]


@pytest.fixture
def scripted_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model in this process is a scripted one."""

    def load(model: VisionLanguageModel, device: object, *, schema: object, prompt: Any) -> ScriptedEngine:
        # Without the home's records of it, it is the same model for all tests.
        source = replace(model.source, records=None)
        return ScriptedEngine(model.source, _image_tokens(source, prompt.text, model.limits))

    monkeypatch.setattr(VisionLanguageModel, "load", load)
