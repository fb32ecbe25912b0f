"""What the settings mean for the rows of an asset now: the parts of a fingerprint that the settings decide.

Imports no Dagster, so that status and audit stay quick.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resources.engine.prompt import Prompt, build_prompt
from resources.engine.protocol import EngineError
from resources.engine.schema import DescriptionSchema, load_schema
from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.settings import Settings

if TYPE_CHECKING:
    from resources.engine.models.text_embedding import TextEmbeddingModel
    from resources.engine.models.vision_language_model import VisionLanguageModel

_AGAIN_SECONDS = 60.0


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
    return {"embedding_model": model.exact_revision()}


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

        def described() -> Mapping[str, str]:
            from vlm_assets.models import build_vision_language_model

            return description_parts(settings, build_vision_language_model(settings))

        def embedded() -> Mapping[str, str]:
            from vlm_assets.models import build_text_embedding_model

            return embedding_parts(build_text_embedding_model(settings))

        return cls(Meaning(described), Meaning(embedded))
