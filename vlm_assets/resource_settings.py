"""Which settings each resource is handed. Resources receive values, never the settings object."""

from __future__ import annotations

import os

from resources.devices.resource import GpuResource
from resources.engine.resource import ModelServerChoice, TextEmbeddingModel, VisionLanguageModel
from resources.publishing.parquet_io import ParquetIOManager
from vlm_assets.settings import PREFIX, Settings


def build_gpu(settings: Settings) -> GpuResource:
    """The devices of these settings."""
    return GpuResource(
        leases_directory=str(settings.state_directory / "leases"),
        devices=settings.devices,
        wait_seconds=settings.device_wait_seconds,
        min_free_memory_gib=settings.device_min_free_gib,
    )


def build_vision_language_model(settings: Settings) -> VisionLanguageModel:
    """The describing model of these settings."""
    return VisionLanguageModel(
        model=settings.model or "",
        revision=settings.model_revision,
        trust_remote_code=settings.trust_remote_code,
        records_directory=str(settings.state_directory / "models"),
        speculative_tokens=settings.speculative_tokens,
        server=build_model_server(settings) if settings.engine == "server" else None,
    )


def build_model_server(settings: Settings) -> ModelServerChoice:
    """The model server of these settings."""
    key_variable = f"{PREFIX}SERVER_KEY"
    if settings.server_key is not None:
        # It may stand in .env alone; a resource holds the variable's name, for Dagster shows what it holds.
        os.environ[key_variable] = settings.server_key.get_secret_value()
    folder = settings.server_image_folder
    return ModelServerChoice(
        state_directory=str(settings.state_directory),
        command=settings.server_command,
        url=settings.server_url,
        key_variable=key_variable,
        model=settings.server_model,
        most_at_once=settings.server_requests,
        token_seconds=settings.server_token_seconds,
        answer_seconds=settings.server_answer_seconds,
        start_seconds=settings.server_start_seconds,
        idle_seconds=settings.server_idle_seconds,
        image_folder=None if folder is None else str(folder),
    )


def build_text_embedding_model(settings: Settings) -> TextEmbeddingModel:
    """The embedding model of these settings."""
    return TextEmbeddingModel(
        model=settings.embedding_model or settings.model or "",
        revision=settings.embedding_revision if settings.embedding_model else settings.model_revision,
        trust_remote_code=settings.trust_remote_code,
        records_directory=str(settings.state_directory / "models"),
    )


def build_resources(settings: Settings) -> dict[str, object]:
    """All resources by the key under which assets ask for them."""
    return {
        "parquet_io": ParquetIOManager(home=str(settings.home)),
        "gpu": build_gpu(settings),
        "vision_language_model": build_vision_language_model(settings),
        "text_embedding_model": build_text_embedding_model(settings),
    }
