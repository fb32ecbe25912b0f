"""Dagster's settings on a machine of a cluster: ``dagster-cluster.yaml`` with its bucket and its devices."""

from __future__ import annotations

import json
from pathlib import Path

from vlm_assets.config.settings import Settings
from vlm_durable.mirror.bucket import S3Folder

_TEMPLATE = Path(__file__).with_name("dagster-cluster.yaml")


def cluster_settings(settings: Settings) -> str | None:
    """The text of dagster.yaml for these settings; None where this machine works alone."""
    if settings.ray_address is None or settings.store is None:
        return None
    return filled_in(settings.store, devices_of_a_run=settings.devices_per_model)


def filled_in(store: S3Folder, *, devices_of_a_run: int) -> str:
    """The template with the folder of the store in which the output of runs is kept."""
    text = _TEMPLATE.read_text()
    text = text.replace("BUCKET #", f"{json.dumps(store.bucket)} #")
    text = text.replace("PREFIX\n", f"{json.dumps(logs_prefix(store))}\n")
    return text.replace("gpus: 1", f"gpus: {devices_of_a_run}")


def logs_prefix(store: S3Folder) -> str:
    """Where the output of runs is kept in the store's bucket."""
    return f"{store.prefix}dagster-logs"
