"""Which settings each resource is handed. Resources receive values, never the settings object.

Every field comes from the settings alone. Anyone who reaches the pages can write run config, so a resource
refuses it. Dagster and the models' code are imported inside functions, so that status and audit stay quick.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_assets.config.engine_choice import chosen_engine, vllm_command
from vlm_assets.config.extensions import describing_model, launcher_of
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.settings import Settings
from vlm_durable.state.database import ControlState, open_state
from vlm_engine.devices.find import DeviceError

if TYPE_CHECKING:
    import dagster as dg

    from resources.gpu import GpuResource
    from resources.text_embedding import TextEmbeddingModel
    from resources.vision_language_model import ServerSettings, VisionLanguageModel

_ANSWER_SILENCES = 7.5
"""A whole answer may take as long as that many silences: 15 minutes by default."""

IO_MANAGER = "io_manager"
"""Dagster's key of the default IO manager. Without ours under it, every job would carry Dagster's own, which
reads and writes pickles in a folder that run config may name."""


def control_state(settings: Settings) -> ControlState:
    """The control state of these settings. Raises ControlStateError where the home is on a network disk."""
    url = settings.state_url
    return open_state(settings.state_directory, None if url is None else url.get_secret_value())


def runs_at_once(settings: Settings) -> int:
    """The pool's limit when Dagster starts: a run for each device, and those that are prepared.

    0 where sensors of an extension fit the pool, from their first tick on. A number that was counted here
    would look like a limit that a person set.
    """
    if launcher_of(settings).has_sensors:
        return 0
    return len(build_gpu(settings).find()) + prepared_runs(settings)


@cache
def prepared_runs(settings: Settings) -> int:
    """How many runs wait with all prepared but the device, so that no device waits for a process to start.

    None where the devices are the CPU's cores: preparing would take those from the runs at work. None where
    sensors of an extension fit the pool. A process counts once: the pool's limit must not move with a driver
    that is silent for a moment.
    """
    if launcher_of(settings).has_sensors:
        return 0
    try:
        on_cores = all(device.kind == "cpu" for device in build_gpu(settings).find())
    except DeviceError:
        return 1  # GPUs: the CPU's cores are always found
    return 0 if on_cores and chosen_engine(settings).engine == "transformers" else 1


def build_gpu(settings: Settings) -> GpuResource:
    """The devices of these settings."""
    from resources.gpu import GpuResource

    return GpuResource(
        leases_directory=str(settings.devices_directory / "leases"),
        devices=settings.devices,
        wait_seconds=settings.device_wait_seconds,
        min_free_memory_gib=settings.device_min_free_gib,
        per_model=settings.devices_per_model,
        state=control_state(settings),
        node=launcher_of(settings).node,
    )


def build_vision_language_model(settings: Settings) -> VisionLanguageModel:
    """The describing model of these settings. Raises SettingsError."""
    from resources.vision_language_model import VisionLanguageModel
    from vlm_engine.protocol import ImageLimits

    name, revision = _name_and_revision(describing_model(settings))
    return VisionLanguageModel(
        model=name,
        revision=revision,
        trust_remote_code=settings.trust_remote_code,
        records_directory=str(settings.state_directory / "models"),
        limits=ImageLimits(
            pixels=settings.max_pixels,
            images=settings.max_images,
            answer_tokens=settings.max_new_tokens,
            tokens=settings.image_tokens,
            options=json.loads(settings.processor_options),
        ),
        server=build_model_server(settings) if chosen_engine(settings).engine == "server" else None,
    )


def build_model_server(settings: Settings) -> ServerSettings:
    """The model server of these settings."""
    from resources.vision_language_model import ServerSettings

    key = settings.server_key
    return ServerSettings(
        state_directory=str(settings.devices_directory),
        command=settings.server_command or vllm_command(),
        url=settings.server_url,
        key=(key.get_secret_value() or None) if key is not None else None,
        model=settings.server_model,
        most_at_once=settings.server_requests,
        token_seconds=settings.server_token_seconds,
        answer_seconds=_ANSWER_SILENCES * settings.server_token_seconds,
        start_seconds=settings.model_load_seconds,
        idle_seconds=launcher_of(settings).idle_seconds,
        devices=settings.devices_per_model,
        embedder=None if settings.embedding_model is None else build_text_embedding_model(settings),
    )


def build_text_embedding_model(settings: Settings) -> TextEmbeddingModel:
    """The embedding model of these settings; without one, its methods raise a sentence that says so."""
    from resources.text_embedding import TextEmbeddingModel

    name, revision = _name_and_revision(settings.embedding_model)
    return TextEmbeddingModel(
        model=name,
        revision=revision,
        trust_remote_code=settings.trust_remote_code,
        records_directory=str(settings.state_directory / "models"),
    )


def _name_and_revision(model: str | None) -> tuple[str, str | None]:
    """The two of OWNER/NAME@REVISION. A local folder, whatever its name, has no revision."""
    if model is None or Path(model).is_absolute():
        return model or "", None
    name, _, revision = model.partition("@")
    return name, revision or None


def build_resources(settings: Settings) -> dict[str, object]:
    """All resources by the key under which assets ask for them."""
    from resources.parquet_io import ParquetIOManager

    return {
        IO_MANAGER: ParquetIOManager(settings.layout, settings.mirror, settings.names),
        "gpu": build_gpu(settings),
        **{asked.model_key: build_vision_language_model(asked.settings) for asked in question_sets(settings)},
        "text_embedding_model": build_text_embedding_model(settings),
    }


def fixed(resources: Mapping[str, object]) -> dict[str, dg.ResourceDefinition]:
    """The resources as definitions that refuse any run config."""
    import dagster as dg

    def definition(resource: object) -> dg.ResourceDefinition:
        if isinstance(resource, dg.IOManager):
            return dg.IOManagerDefinition(lambda _: resource, config_schema={}, input_config_schema={})
        return dg.ResourceDefinition(lambda _: resource, config_schema={})

    return {key: definition(resource) for key, resource in resources.items()}
