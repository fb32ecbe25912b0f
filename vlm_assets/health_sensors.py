"""Which assets, folders and limits the health sensors are handed.

What lives here: wiring from the settings. What does not: what the sensors look at and do (``sensors/``).
"""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from resources.alerts.outbox import Outbox
from resources.gpu.health import HealthCheck
from resources.gpu.nvml import DriverNvml
from resources.workers import Workers
from sensors.reconciliation import PublishedAsset, build_reconciliation_sensor
from sensors.worker_health import HealthWatcher, build_worker_health_sensor
from sensors.worker_judgement import WorkerLimits
from vlm_assets import descriptions, embeddings
from vlm_assets.dagster_home import POOL
from vlm_assets.property_ranges import PropertyRange
from vlm_assets.resource_settings import build_gpu
from vlm_assets.settings import Settings


def published_assets(settings: Settings, ranges: Sequence[PropertyRange]) -> list[PublishedAsset]:
    """The assets that are published as files, with their partitions."""
    keys = tuple(one.key for one in ranges)
    return [
        PublishedAsset(descriptions.ASSET, settings.descriptions_directory, keys),
        PublishedAsset(embeddings.ASSET, settings.embeddings_directory, keys),
    ]


def build_health_sensors(settings: Settings, ranges: Sequence[PropertyRange]) -> list[dg.SensorDefinition]:
    """The sensors that look at workers, devices and files, and at what Dagster believes of them."""
    assets = published_assets(settings, ranges)
    workers = Workers(settings.state_directory / "workers")
    ticks = settings.state_directory / "ticks"
    gpu = build_gpu(settings)
    watcher = HealthWatcher(
        workers=workers,
        outbox=Outbox(settings.state_directory / "alerts"),
        left_out=gpu.left_out(),
        find=gpu.find,
        judge=HealthCheck(DriverNvml()),
        limits=WorkerLimits(
            most=settings.stuck_seconds,
            loading=settings.model_load_seconds,
            waiting=settings.device_wait_seconds,
        ),
    )
    return [
        build_reconciliation_sensor(assets, workers=workers, ticks=ticks),
        build_worker_health_sensor(watcher, pool=POOL, ticks=ticks),
    ]
