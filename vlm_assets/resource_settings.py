"""Which settings each resource is handed. Resources receive values, never the settings object."""

from __future__ import annotations

from resources.gpu.resource import GpuResource
from resources.parquet_io import ParquetIOManager
from resources.vlm.resource import TextEmbeddingModel, VisionLanguageModel
from vlm_assets.settings import Settings


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
        model=settings.model,
        revision=settings.model_revision,
        trust_remote_code=settings.trust_remote_code,
        records_directory=str(settings.state_directory / "models"),
    )


def build_text_embedding_model(settings: Settings) -> TextEmbeddingModel:
    """The embedding model of these settings."""
    return TextEmbeddingModel(
        model=settings.embedding_model or settings.model,
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
