"""The fingerprint: a digest of everything that decides the meaning of a partition's rows.

Batch size, plan, workers and device are recorded with a run but are no part of it. Imports no Dagster, so
that status and audit stay quick.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlm_assets.assets.changed_settings import field_kinds
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.resource_settings import build_text_embedding_model, build_vision_language_model
from vlm_assets.config.settings import Settings
from vlm_engine.images.images import DECODING
from vlm_engine.prompt import Prompt, build_prompt
from vlm_engine.protocol import EngineError
from vlm_engine.schema import DescriptionSchema, load_schema

if TYPE_CHECKING:
    from resources.text_embedding import TextEmbeddingModel
    from resources.vision_language_model import VisionLanguageModel

CATALOGUE_SLICE = "catalogue_slice"
"""The part for a range's rows of the catalogue."""

TEXTS = "texts"
"""The part for the texts that embeddings are made from. The descriptions' record has the same digest."""

ANEW, KEEP = "anew", "keep"
"""What a run does with a partition that was published under other settings; see ``RunOptions``."""

SETTINGS = "settings"
"""Key in a published record's metadata: the settings that made it, as people read them."""

LOOKED_AT = "looked_at"
"""The part for the published files that the ``where`` of a question set looked at."""

WHERE = "where"
"""The part for the condition itself."""

OF_UPSTREAM = frozenset({TEXTS, LOOKED_AT})
"""Parts for what other assets have published: a partition follows it, whatever its own settings."""

OF_THE_PARTITION = frozenset({CATALOGUE_SLICE}) | OF_UPSTREAM
"""Parts that differ from partition to partition."""

PROMPT_SHOWN = 200
"""Characters of a prompt that a record keeps."""

_AGAIN_SECONDS = 60.0


@dataclass(frozen=True)
class Fingerprint:
    """Named parts (for people: which one changed) and their digest (for machines: same or not).

    settings: the parts as people read them, for the published record; no part of the digest.
    """

    parts: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def digest(self) -> str:
        """16 hex digits over the parts, whatever their order."""
        canonical = json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def settings_digest(self) -> str:
        """The digest of the parts that the settings decide. See ``settings_digest``."""
        return settings_digest(self.parts)

    def generation(self, recompute_run_id: str | None = None) -> str:
        """The generation's name: the digest, and for a recomputation the root run that asked for it.

        With the run's id in its name a crashed recomputation resumes, and a finished one is not repeated.
        """
        return self.digest if recompute_run_id is None else f"{self.digest}-{recompute_run_id[:8]}"


def digest_of(value: object) -> str:
    """A digest of any JSON value, for one part."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def row_parts(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts that decide a row beside its own inputs. Of which properties is asked decides no answer."""
    return {name: part for name, part in parts.items() if name not in OF_THE_PARTITION and name != WHERE}


def changed_parts(made_with: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """The parts that decide otherwise than when something was made, by name."""
    changed = {name for name, part in made_with.items() if now.get(name, part) != part}
    # A set without a condition has no such part.
    return tuple(sorted(changed | ({WHERE} if (WHERE in made_with) != (WHERE in now) else set())))


def follows_upstream(changed: Collection[str]) -> bool:
    """Whether a partition with these changed parts is made anew without asking a person.

    Embeddings of other texts belong to no description of now. What a question set answered stays what it is:
    under other settings a person decides.
    """
    return TEXTS in changed or (LOOKED_AT in changed and OF_THE_PARTITION.issuperset(changed))


def settings_digest(parts: Mapping[str, str]) -> str:
    """A digest of the parts that the settings decide, without those of one partition."""
    return digest_of({name: part for name, part in parts.items() if name not in OF_THE_PARTITION})


def description_parts(
    settings: Settings,
    model: VisionLanguageModel,
    *,
    schema: DescriptionSchema | None = None,
    prompt: Prompt | None = None,
    revision: str | None = None,
) -> dict[str, str]:
    """All parts of a description's fingerprint but the catalogue's. Raises SchemaError, ModelLoadError.

    schema, prompt, revision: those of the settings and the model, where the caller has them already.
    """
    schema = schema or load_schema(settings.description_schema)
    prompt = prompt or build_prompt(schema, settings.prompt)
    return {
        # What the model is, and neither its name nor its folder: moving a folder changes no row.
        "model": revision or model.exact_revision(),
        "prompt": prompt.digest,
        "schema": schema.digest,
        "decoding": digest_of(_decoding(settings, model)),
        **({} if settings.where is None else {WHERE: digest_of(settings.where.text)}),
    }


def _decoding(settings: Settings, model: VisionLanguageModel) -> dict[str, Any]:
    return {
        "max_images": settings.max_images,
        "max_new_tokens": settings.max_new_tokens,
        "max_pixels": settings.max_pixels,
        "image_tokens": settings.image_tokens,
        "processor_options": settings.processor_options,
        "images": DECODING,
        "thinking": False,
        **model.engine_meaning(),
    }


def description_settings(settings: Settings, model: VisionLanguageModel) -> dict[str, Any]:
    """The parts of ``description_parts`` as people read them. Raises SchemaError, ModelLoadError."""
    schema = load_schema(settings.description_schema)
    prompt = build_prompt(schema, settings.prompt)
    return {
        "model": model.exact()[0],
        "prompt": {"text": prompt.text[:PROMPT_SHOWN], "made_from_schema": settings.prompt is None},
        "schema": field_kinds(schema.json_schema),
        "decoding": _decoding(settings, model),
        **({} if settings.where is None else {WHERE: settings.where.text}),
    }


def embedding_settings(model: TextEmbeddingModel) -> dict[str, Any]:
    """The parts of ``embedding_parts`` as people read them."""
    return {"embedding_model": model.source.label}


def embedding_parts(model: TextEmbeddingModel, *, revision: str | None = None) -> dict[str, str]:
    """All parts of a vector's fingerprint but that of the texts. Raises ModelLoadError.

    revision: of the model, where the caller has it already.
    """
    return {"embedding_model": revision or model.exact_revision()}


class Meaning:
    """The parts that the settings decide of one asset's fingerprint, computed once a process.

    A server at an address may be down, and each reader would wait for it. So after a failure the parts are
    computed again after a minute at the earliest.
    """

    def __init__(
        self,
        compute_parts: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
        *,
        read_settings: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._compute_parts = compute_parts
        self._read_settings = read_settings
        self._readable: Mapping[str, Any] | None = None
        self._clock = clock
        self._computed: Mapping[str, str] | None = None
        self._not_before = clock()
        self.trouble: str | None = None
        """Why the parts are unknown."""

    @property
    def parts(self) -> Mapping[str, str]:
        """The parts; empty where they are unknown. Nothing is called stale then."""
        if self._computed is None and self._clock() >= self._not_before:
            try:
                self._computed = self._compute_parts()
                self.trouble = None
            except (EngineError, ValueError, OSError) as error:
                self.trouble = str(error)
                self._not_before = self._clock() + _AGAIN_SECONDS
        return self._computed or {}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The parts as people read them; empty where they are unknown."""
        if self._readable is None:
            try:
                self._readable = self._read_settings()
            except (EngineError, ValueError, OSError):
                return {}
        return self._readable


@dataclass(frozen=True)
class Meanings:
    """The meanings of the partitioned assets under some settings, by the asset's name."""

    by_asset: Mapping[str, Meaning]

    def of_asset(self, asset: str) -> Meaning:
        """The meaning of one asset, by its name."""
        return self.by_asset[asset]

    @classmethod
    def from_settings(cls, settings: Settings) -> Meanings:
        """Nothing is computed before it is asked for. Without an embedding model, no vector is stale."""
        embeds = settings.embedding_model is not None
        of_vectors = Meaning(
            lambda: embedding_parts(build_text_embedding_model(settings)) if embeds else {},
            read_settings=lambda: embedding_settings(build_text_embedding_model(settings)) if embeds else {},
        )
        described = {asked.asset.name: _meaning_of(asked.settings) for asked in question_sets(settings)}
        return cls({**described, settings.embeddings.name: of_vectors})


def _meaning_of(settings: Settings) -> Meaning:
    """The meaning of a question set. settings: those that make its rows."""
    return Meaning(
        lambda: description_parts(settings, build_vision_language_model(settings)),
        read_settings=lambda: description_settings(settings, build_vision_language_model(settings)),
    )
