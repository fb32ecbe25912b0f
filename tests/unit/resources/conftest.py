"""Fixtures of what the resources are made of."""

from __future__ import annotations

from tests.unit.vlm_engine.conftest import (  # noqa: F401 - fixtures
    load_property,
    model_folder,
    one_thread,
    opened_files,
    tokenizer,
)
