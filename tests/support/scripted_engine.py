"""The scripted engine, as a fixture: for tests in this process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from resources.vision_language_model import VisionLanguageModel
from tests.support.scripted_models import ScriptedEngine
from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import ImageLimits, ImageTokens
from vlm_engine.transformers.image_tokens import fitted_processor


@cache
def _image_tokens(source: ModelSource, text: str, limits: ImageLimits | None) -> ImageTokens | None:
    return fitted_processor(source, text, limits)[1]


def load(model: VisionLanguageModel, device: object, *, schema: object, prompt: Any) -> ScriptedEngine:
    # Without the home's records of it, it is the same model for all tests.
    source = replace(model.source, records=None)
    return ScriptedEngine(model.source, _image_tokens(source, prompt.text, model.limits))


@pytest.fixture
def scripted_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model in this process is a scripted one."""
    monkeypatch.setattr(VisionLanguageModel, "load", load)
