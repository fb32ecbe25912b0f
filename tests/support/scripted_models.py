"""Models that compute nothing: for tests of what becomes of answers, where the model is not the point."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resources.text_embedding import TextEmbeddingModel
from resources.vision_language_model import VisionLanguageModel
from vlm_engine.images.images import LoadedProperty
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_engine.protocol import Answer, Attempt, CanaryAnswer, ImageTokens

if TYPE_CHECKING:
    import numpy as np

CHARACTERS_A_TOKEN = 4


class ScriptedEngine:
    """Answers in the default schema at once: a text that derives from the property's id and its images.

    It says that it is the model of ``source``, whose image processor says what images cost.
    """

    batches_at_once = 1

    def __init__(
        self, source: ModelSource, image_tokens: ImageTokens | None, seconds_each: float = 0.0
    ) -> None:
        self.model, self.revision = source.label, exact_revision(source)
        self.image_tokens = image_tokens
        self._seconds_each = seconds_each
        self.seconds: Mapping[str, float] = {}

    def prepare(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> None:
        """Nothing."""

    def describe(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> list[Answer]:
        """See Engine."""
        time.sleep(self._seconds_each * len(batch))
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


class ScriptedEmbedder:
    """A unit vector for each text, drawn from the text itself."""

    longest = None
    cut_off = 0

    def __init__(self, model: TextEmbeddingModel) -> None:
        self.model, self.revision, self.width = model.source.label, model.exact_revision(), model.width()

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """See TextEmbedder."""
        import numpy as np

        seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) for text in texts]
        vectors = [np.random.default_rng(seed).standard_normal(self.width) for seed in seeds]
        vectors = [vector / np.linalg.norm(vector) for vector in vectors]
        return np.array(vectors, dtype=np.float32).reshape(len(texts), self.width)

    def canary(self) -> CanaryAnswer:
        """See TextEmbedder."""
        return CanaryAnswer("scripted", "scripted")

    def close(self) -> None:
        """Nothing."""


def script_models(seconds_each: float) -> None:
    """Have every model in this process be a scripted one, for good. Torch and transformers stay out of it.

    seconds_each: how long the describer waits for each property.
    """

    def load(model: VisionLanguageModel, device: object, **_: Any) -> ScriptedEngine:
        return ScriptedEngine(model.source, None, seconds_each)

    VisionLanguageModel.load = load  # type: ignore[assignment,method-assign]
    TextEmbeddingModel.load = lambda model, device: ScriptedEmbedder(model)  # type: ignore[assignment,method-assign]
