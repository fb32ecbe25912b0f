"""The vector of a text that a person typed, by the home's own embedder."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlm_assets.config.resource_settings import build_text_embedding_model
from vlm_assets.config.settings import Settings
from vlm_engine.devices.find import Device


def embed_text(settings: Settings, text: str) -> npt.NDArray[np.float32]:
    """The vector [width] of a text, on the CPU: a search takes no device from a run.

    Raises ModelLoadError, and ValueError where the embedder takes no such text.
    """
    device = Device("cpu-search", "cpu", "search", None, "")
    embedder = build_text_embedding_model(settings).load(device)
    try:
        return np.asarray(embedder.embed([text])[0], dtype=np.float32)
    finally:
        embedder.close()
