"""The scripted engine, as a fixture, and a model that is lost: for tests in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from resources.text_embedding import TextEmbeddingModel
from resources.vision_language_model import VisionLanguageModel
from tests.support.scripted_models import ScriptedEmbedder, ScriptedEngine
from vlm_engine.images.images import LoadedProperty
from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import Answer, Attempt, Engine, EngineLostError, ImageLimits, ImageTokens
from vlm_engine.transformers.image_tokens import fitted_processor


@cache
def _image_tokens(source: ModelSource, text: str, limits: ImageLimits | None) -> ImageTokens | None:
    return fitted_processor(source, text, limits)[1]


def load(
    model: VisionLanguageModel, device: object, *, schema: object, prompt: Any, further: object = ()
) -> ScriptedEngine:
    # Without the home's records of it, it is the same model for all tests.
    source = replace(model.source, records=None)
    return ScriptedEngine(model.source, _image_tokens(source, prompt.text, model.limits))


@pytest.fixture
def scripted_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model in this process is a scripted one."""
    monkeypatch.setattr(VisionLanguageModel, "load", load)
    monkeypatch.setattr(TextEmbeddingModel, "load", lambda model, device: ScriptedEmbedder(model))


class LostAfterOneBatch(VisionLanguageModel):
    """A model whose device is lost after its first batch: part of a partition is committed."""

    def load(self, *arguments: Any, **options: Any) -> Engine:
        """See VisionLanguageModel."""
        engine = super().load(*arguments, **options)
        describe, batches = engine.describe, list[int]()

        def describe_once(batch: Sequence[LoadedProperty], *, attempt: Attempt) -> list[Answer]:
            if batches:
                raise EngineLostError("the device is lost")
            batches.append(len(batch))
            return list(describe(batch, attempt=attempt))

        engine.describe = describe_once  # type: ignore[method-assign]
        return engine
