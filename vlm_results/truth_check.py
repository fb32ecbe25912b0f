"""What ``doctor`` tries of the known truth that the quality of answers is measured with."""

from __future__ import annotations

from vlm_assets.assets.truth import TruthError, read_truth
from vlm_assets.config.extensions import Findings
from vlm_assets.config.settings import PREFIX, Settings


def examine_truth(settings: Settings) -> Findings:
    """An error where the file does not read."""
    if settings.truth is not None:
        try:
            read_truth(settings.truth)
        except TruthError as error:
            yield "error", f"{PREFIX}TRUTH: {error}"
