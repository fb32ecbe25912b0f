"""What ``doctor`` tries of the known truth, and of the promise that is made of answers."""

from __future__ import annotations

from vlm_assets.assets.truth import TruthError, read_truth
from vlm_assets.config.extensions import Findings
from vlm_assets.config.settings import PREFIX, Settings
from vlm_engine.schema import load_schema


def examine_truth(settings: Settings) -> Findings:
    """An error where the file does not read."""
    if settings.truth is not None:
        try:
            read_truth(settings.truth)
        except TruthError as error:
            yield "error", f"{PREFIX}TRUTH: {error}"


def examine_guarantee(settings: Settings) -> Findings:
    """An error where a promised field is none of the schema, so that nobody could be shown its answers."""
    if settings.guarantee_targets:
        fields = load_schema(settings.description_schema).json_schema.get("properties", {})
        for field in settings.guarantee_targets:
            if field not in fields:
                yield (
                    "error",
                    f"{PREFIX}GUARANTEE: {field!r} is no field of the description schema, which has"
                    f" {', '.join(fields)}.",
                )
