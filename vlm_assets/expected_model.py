"""The model that a partition's fingerprint names: the one that was loaded must be it.

What lives here: the comparison. What does not: what a model is by name and revision (``resources/vlm``), and
what else decides the meaning of a row (``descriptions.py``).
"""

from __future__ import annotations

from resources.vlm.engine import Engine, ModelLoadError
from vlm_assets.fingerprint import Fingerprint


class ModelChangedError(ModelLoadError):
    """The model was exchanged between the look at it and its loading: no row may stand for the wrong one."""


def refuse_another_model(engine: Engine, fingerprint: Fingerprint) -> None:
    """Return where the engine's model is the fingerprint's. Raises ModelChangedError."""
    expected = (fingerprint.parts["model"], fingerprint.parts["model_revision"])
    loaded = (engine.model, engine.revision)
    if loaded != expected:
        raise ModelChangedError(
            f"the model was exchanged while this materialization began: {_said(expected)} was looked at, and"
            f" {_said(loaded)} is loaded. Nothing was described with it. Materialize the partition again: it"
            " then takes what is there"
        )


def _said(model: tuple[str, str]) -> str:
    name, revision = model
    return f"{name} ({revision})"
