"""The question sets of a home: what is asked of the images of each property.

Each is a partitioned asset of its own, made by the code of ``vlm_assets/assets/property_descriptions.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from vlm_assets.config.questions_file import SET_PREFIX, AskedSet
from vlm_assets.config.settings import Settings
from vlm_durable.files.layout import AssetFolders

MODEL_KEY: Final = "vision_language_model"
"""Dagster's key of the resource that describes. A set whose model or processor differs has one of its own."""


@dataclass(frozen=True)
class QuestionSet:
    """One question set.

    settings: those that make its rows: the home's, with the set's schema, prompt, model and processor
    options. model_key: Dagster's key of the resource that answers.
    """

    asset: AssetFolders
    settings: Settings
    model_key: str

    @property
    def name(self) -> str:
        """Its name in the file of question sets; that of the first is "descriptions"."""
        return self.asset.name.removeprefix(SET_PREFIX)


@cache
def question_sets(settings: Settings) -> tuple[QuestionSet, ...]:
    """The sets of a home's settings, of which the first is the descriptions; of a set's own settings, it."""
    first = QuestionSet(settings.descriptions, settings, MODEL_KEY)
    sets = () if settings.questions is None else settings.questions.sets
    return (first, *(_further(settings, name, asked) for name, asked in sets))


def _further(settings: Settings, name: str, asked: AskedSet) -> QuestionSet:
    own = settings.of_set(name, asked)
    sees_alike = (own.model, own.processor_options) == (settings.model, settings.processor_options)
    key = MODEL_KEY if sees_alike else f"{MODEL_KEY}_of_{name}"
    return QuestionSet(own.descriptions, own, key)
