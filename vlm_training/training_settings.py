"""Settings that this extension alone asks for."""

from __future__ import annotations

from vlm_assets.config.settings import AbsolutePath, Settings


class TrainingSettings(Settings):
    """All settings, with the models to train."""

    variants: AbsolutePath | None = None
    """YAML file of the variants of description_model, the models to train; docs/training.md. Default:
    none."""
