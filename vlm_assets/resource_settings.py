"""Which settings each resource is handed. Resources receive values, never the settings object.

Every field comes from the settings alone. Anyone who reaches the pages can write run config, so a resource
refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg

from resources.devices.resource import GpuResource
from resources.publishing.parquet_io import ParquetIOManager
from vlm_assets.control_state import control_state
from vlm_assets.models import build_text_embedding_model, build_vision_language_model
from vlm_assets.settings import Settings

IO_MANAGER = "io_manager"
"""Dagster's key of the default IO manager. Without ours under it, every job would carry Dagster's own, which
reads and writes pickles in a folder that run config may name."""


def build_gpu(settings: Settings) -> GpuResource:
    """The devices of these settings."""
    return GpuResource(
        leases_directory=str(settings.state_directory / "leases"),
        devices=settings.devices,
        wait_seconds=settings.device_wait_seconds,
        min_free_memory_gib=settings.device_min_free_gib,
        state=control_state(settings),
    )


def build_resources(settings: Settings) -> dict[str, object]:
    """All resources by the key under which assets ask for them."""
    return {
        IO_MANAGER: ParquetIOManager(home=str(settings.home)),
        "gpu": build_gpu(settings),
        "vision_language_model": build_vision_language_model(settings),
        "text_embedding_model": build_text_embedding_model(settings),
    }


def fixed(resources: Mapping[str, object]) -> dict[str, dg.ResourceDefinition]:
    """The resources as definitions that refuse any run config."""
    return {key: _fixed(resource) for key, resource in resources.items()}


def _fixed(resource: object) -> dg.ResourceDefinition:
    if isinstance(resource, dg.IOManager):
        return dg.IOManagerDefinition(lambda _: resource, config_schema={}, input_config_schema={})
    return dg.ResourceDefinition(lambda _: resource, config_schema={})
