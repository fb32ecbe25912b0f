"""What ``doctor`` tries of the known truth that the quality of answers is measured with."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_assets.assets.truth import TruthError, read_truth
from vlm_assets.config.extensions import Level
from vlm_assets.config.settings import PREFIX, Settings


def examine_truth(settings: Settings) -> Iterator[tuple[Level, str]]:
    """An error where the file does not read."""
    if settings.truth is not None:
        try:
            read_truth(settings.truth)
        except TruthError as error:
            yield "error", f"{PREFIX}TRUTH: {error}"
