"""What ``doctor`` tries of the known truth, and of the promise that is made of answers."""

from __future__ import annotations

from vlm_assets.assets.truth import TruthError, read_truth
from vlm_assets.config.extensions import Findings
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.settings import PREFIX, Settings
from vlm_engine.schema import load_schema
from vlm_results.results_settings import ResultsSettings


def examine_truth(settings: Settings) -> Findings:
    """An error where the file does not read."""
    truth = ResultsSettings.part_of(settings).truth
    if truth is not None:
        try:
            read_truth(truth)
        except TruthError as error:
            yield "error", f"{PREFIX}TRUTH: {error}"


def examine_guarantee(settings: Settings) -> Findings:
    """An error where a promised field is in no schema, so that nobody could be shown its answers."""
    targets = ResultsSettings.part_of(settings).guarantee_targets
    if targets:
        schemas = (load_schema(asked.settings.description_schema) for asked in question_sets(settings))
        fields = [name for schema in schemas for name in schema.json_schema.get("properties", {})]
        for field in targets:
            if field not in fields:
                yield (
                    "error",
                    f"{PREFIX}GUARANTEE: {field!r} is no field of the description schema, which has"
                    f" {', '.join(fields)}.",
                )
