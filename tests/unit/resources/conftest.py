"""Fixtures of what the resources are made of."""

from __future__ import annotations

from tests.support.tiny_model import (  # noqa: F401 - fixtures
    load_property,
    model_folder,
    one_thread,
    opened_files,
    tokenizer,
)
