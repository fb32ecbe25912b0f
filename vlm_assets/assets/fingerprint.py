"""The fingerprint: a digest of everything that decides the meaning of a partition's rows.

What lives here: how the parts become one digest, the name of a generation, and the parts that the settings
decide now. Batch size, plan, workers and device are recorded with a run but are no part of it. Imports no
Dagster, so that status and audit stay quick.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resources.engine.prompt import Prompt, build_prompt
from resources.engine.protocol import EngineError
from resources.engine.schema import DescriptionSchema, load_schema
from resources.images.images import DECODING
from vlm_assets.config.resource_settings import build_text_embedding_model, build_vision_language_model
from vlm_assets.config.settings import Settings

if TYPE_CHECKING:
    from resources.engine.models.text_embedding import TextEmbeddingModel
    from resources.engine.models.vision_language_model import VisionLanguageModel

CATALOGUE_SLICE = "catalogue_slice"
"""The part for a range's rows of the catalogue."""

TEXTS = "texts"
"""The part for the texts that embeddings are made from. The descriptions' record has the same digest."""

_AGAIN_SECONDS = 60.0


@dataclass(frozen=True)
class Fingerprint:
    """Named parts (for people: which one changed) and their digest (for machines: same or not)."""

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """16 hex digits over the parts, whatever their order."""
        canonical = json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def generation(self, recompute_run_id: str | None = None) -> str:
        """The generation's name: the digest, and for a recomputation the root run that asked for it.

        With the run's id in its name a crashed recomputation resumes, and a finished one is not repeated.
        """
        return self.digest if recompute_run_id is None else f"{self.digest}-{recompute_run_id[:8]}"


def digest_of(value: object) -> str:
    """A digest of any JSON value, for one part."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def description_parts(
    settings: Settings,
    model: VisionLanguageModel,
    *,
    schema: DescriptionSchema | None = None,
    prompt: Prompt | None = None,
) -> dict[str, str]:
    """All parts of a description's fingerprint but the catalogue's. Raises SchemaError, ModelLoadError."""
    schema = schema or load_schema(settings.description_schema)
    prompt = prompt or build_prompt(schema, settings.prompt)
    decoding = {
        "max_images": settings.max_images,
        "max_new_tokens": settings.max_new_tokens,
        "max_pixels": settings.max_pixels,
        "image_tokens": settings.image_tokens,
        "processor_options": settings.processor_options,
        "images": DECODING,
        "thinking": False,
        **model.engine_meaning(),
    }
    return {
        # What the model is, and neither its name nor its folder: moving a folder changes no row.
        "model": model.exact_revision(),
        "prompt": prompt.digest,
        "schema": schema.digest,
        "decoding": digest_of(decoding),
    }


def embedding_parts(model: TextEmbeddingModel) -> dict[str, str]:
    """All parts of a vector's fingerprint but that of the texts. Raises ModelLoadError."""
    pooling = model.pooling or "as the model's files say"
    return {"embedding_model": model.exact_revision(), "embedding_pooling": pooling}


class Meaning:
    """The parts that the settings decide of one asset's fingerprint, computed once a process.

    A server at an address may be down, and each look would wait for it: after a failure the parts are
    computed again after a minute at the earliest.
    """

    def __init__(
        self, parts: Callable[[], Mapping[str, str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._parts = parts
        self._clock = clock
        self._known: Mapping[str, str] | None = None
        self._not_before = clock()
        self.trouble: str | None = None
        """Why the parts are unknown."""

    @property
    def now(self) -> Mapping[str, str]:
        """The parts; empty where they are unknown. Nothing is called stale then."""
        if self._known is None and self._clock() >= self._not_before:
            try:
                self._known = self._parts()
                self.trouble = None
            except (EngineError, ValueError, OSError) as error:
                self.trouble = str(error)
                self._not_before = self._clock() + _AGAIN_SECONDS
        return self._known or {}


@dataclass(frozen=True)
class Meanings:
    """The meanings of both assets under some settings."""

    descriptions: Meaning
    embeddings: Meaning

    def of_asset(self, asset: str) -> Meaning:
        """The meaning of one asset, by its name."""
        return {"property_descriptions": self.descriptions, "property_embeddings": self.embeddings}[asset]

    @classmethod
    def of(cls, settings: Settings) -> Meanings:
        """Nothing is computed before it is asked for."""
        return cls(
            Meaning(lambda: description_parts(settings, build_vision_language_model(settings))),
            Meaning(lambda: embedding_parts(build_text_embedding_model(settings))),
        )
