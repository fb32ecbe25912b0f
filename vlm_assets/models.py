"""The models of the settings. Imports no Dagster, so that status and audit stay quick."""

from __future__ import annotations

from resources.engine.models.text_embedding import TextEmbeddingModel
from resources.engine.models.vision_language_model import VisionLanguageModel
from resources.engine.server.choice import ServerChoice
from vlm_assets.settings import Settings


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


def build_model_server(settings: Settings) -> ServerChoice:
    """The model server of these settings."""
    key = settings.server_key
    folder = settings.server_image_folder
    return ServerChoice(
        state_directory=str(settings.state_directory),
        command=settings.server_command,
        url=settings.server_url,
        key=(key.get_secret_value() or None) if key is not None else None,
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
