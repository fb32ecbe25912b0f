"""What ``doctor`` tries of the models: a description and a vector, made for real."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Final

import numpy as np

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.extensions import Findings
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.request_vector import embed_text
from vlm_assets.services.trial import run_trial
from vlm_durable.commands import command
from vlm_engine.devices.leases import NoDeviceFreeError
from vlm_engine.model_source import NO_EMBEDDER

_DEVICE_WAIT_SECONDS: Final = 2.0


def examine_model(settings: Settings) -> Findings:
    """Describe one property on a leased device. Raises what ``run_trial`` raises."""
    catalog = Catalog.open(settings.home)
    gpu = replace(build_gpu(settings), wait_seconds=_DEVICE_WAIT_SECONDS)
    try:
        trial = run_trial(settings, catalog, gpu, build_vision_language_model(settings), limit=1)
    except NoDeviceFreeError as error:
        yield "warning", f"Not tried, for every device is at work: {error}"
        return
    answer = trial.described[0]
    took = f"loaded in {trial.load_seconds:.1f} s on {trial.device}"
    if answer.description is None:
        yield (
            "error",
            f"It {took}, and could not describe {answer.property_id} ({answer.error_kind}): {answer.error}."
            f" {command('compare')} shows more.",
        )
        return
    yield "ok", f"It {took} and described {answer.property_id}."
    image_tokens = trial.image_tokens
    if image_tokens is None:
        return
    if image_tokens.fitting < image_tokens.images:
        yield (
            "warning",
            f"{image_tokens.sentence()}: fewer {PREFIX}MAX_PIXELS or {PREFIX}IMAGE_TOKENS lets all of them"
            " fit.",
        )
    else:
        yield "ok", f"{image_tokens.sentence()}."


def examine_embedder(settings: Settings) -> Findings:
    """Make a vector from a text. Raises ModelLoadError."""
    if settings.embedding_model is None:
        yield "warning", NO_EMBEDDER
        return
    began = time.monotonic()
    vector = embed_text(settings, "A stone cottage with two floors and a garden.")
    length = float(np.linalg.norm(vector))
    if not math.isfinite(length) or length < 1e-6:
        yield "error", "The embedding model makes a vector that is zero or no numbers: take another one."
        return
    yield (
        "ok",
        f"The embedding model made a vector of {len(vector)} numbers from a text in"
        f" {time.monotonic() - began:.1f} s, loading included.",
    )
