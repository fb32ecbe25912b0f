"""The question sets of a home: what is asked of the images of each property.

Each is a partitioned asset of its own, made by the code of ``vlm_assets/assets/property_descriptions.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_assets.config.settings import Settings
from vlm_durable.files.layout import AssetFolders


@dataclass(frozen=True)
class QuestionSet:
    """One question set.

    settings: those that make its rows: the home's, with the set's schema, prompt, model and processor
    options. model_key: Dagster's key of the resource that answers.
    """

    asset: AssetFolders
    settings: Settings
    model_key: str


def question_sets(settings: Settings) -> tuple[QuestionSet, ...]:
    """The sets of these settings; the first is the descriptions."""
    return (QuestionSet(settings.descriptions, settings, "vision_language_model"),)
