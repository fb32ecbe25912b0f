"""Which assets, folders and limits the health sensors are handed.

What lives here: wiring from the settings. What does not: what the sensors look at and do (``sensors/``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from resources.alerts.outbox import Outbox
from resources.devices.health import HealthCheck
from resources.devices.nvml import DriverNvml
from resources.engine.server.running_server import PATIENCE_SECONDS
from resources.state.workers import Workers
from sensors.leases_after_end import LeasesAfterEnd
from sensors.published_file_drift import DriftWatched, DriftWatcher, build_published_file_drift_sensor
from sensors.reconciliation import PublishedAsset, build_reconciliation_sensor
from sensors.ticks import Ticks
from sensors.worker_health import HealthWatcher, build_worker_health_sensor
from sensors.worker_judgement import WorkerLimits
from vlm_assets.automation.drift_looks import description_looks, embedding_looks
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.operate.dagster_server.home import POOL
from vlm_assets.resource_settings import build_gpu, control_state
from vlm_assets.settings import Settings

_SERVER_SLACK_SECONDS = 180.0
"""Beside a start of a model server: until what lived on its device has ended, and has been given up."""

_SILENCES = 4.0
"""Of a server's requests, after which the engine has given it up for long: it waits for three of them."""


def published_assets(settings: Settings, ranges: Sequence[PropertyRange]) -> list[PublishedAsset]:
    """The assets that are published as files, with their partitions."""
    keys = tuple(one.key for one in ranges)
    return [
        PublishedAsset(settings.descriptions, keys),
        PublishedAsset(settings.embeddings, keys),
    ]


def build_health_sensors(settings: Settings, ranges: Sequence[PropertyRange]) -> list[dg.SensorDefinition]:
    """The sensors that look at workers, devices and files, and at what Dagster believes of them."""
    assets = published_assets(settings, ranges)
    state = control_state(settings)
    workers = Workers(state)
    ticks = Ticks(state)
    outbox = Outbox(state)
    gpu = build_gpu(settings)
    limits = worker_limits(settings)
    watcher = HealthWatcher(
        workers=workers,
        outbox=outbox,
        left_out=gpu.left_out(),
        find=gpu.find,
        judge=HealthCheck(DriverNvml()).of,
        limits=limits,
    )
    leases = LeasesAfterEnd(
        directory=Path(gpu.leases_directory),
        outbox=outbox,
        grace=limits.grace,
        silence=limits.loading,
    )
    return [
        build_reconciliation_sensor(assets, workers=workers, ticks=ticks),
        build_worker_health_sensor(watcher, leases, pool=POOL, ticks=ticks),
        build_published_file_drift_sensor(
            build_drift_watcher(settings, assets, workers, outbox), ticks=ticks
        ),
    ]


def worker_limits(settings: Settings) -> WorkerLimits:
    """How long a worker may stand still, and commit once it is told to end.

    A worker is not stuck while it waits for its model server, which the engine itself gives up in time.
    """
    loading = settings.model_load_seconds
    least = WorkerLimits.least
    if settings.engine == "server":
        # One that is alive and silent: the engine's watch on tokens gives it up, and starts another.
        least = max(least, _SILENCES * settings.server_token_seconds)
        wait = settings.server_start_seconds if settings.server_url is None else PATIENCE_SECONDS
        loading = max(loading, wait + _SERVER_SLACK_SECONDS)
    return WorkerLimits(
        least=least,
        most=settings.stuck_seconds,
        loading=loading,
        waiting=settings.device_wait_seconds,
        grace=settings.grace_seconds,
    )


def build_drift_watcher(
    settings: Settings, assets: Sequence[PublishedAsset], workers: Workers, outbox: Outbox
) -> DriftWatcher:
    """The watcher of all published files of a home."""
    watched = [
        DriftWatched(
            asset=asset.folders,
            keys=asset.keys,
            look=looks.look,
            look_again=looks.look_again,
            expectation=looks.expectation,
            made_from=looks.made_from,
        )
        for asset, looks in zip(assets, (description_looks(settings), embedding_looks(settings)), strict=True)
    ]
    return DriftWatcher(watched, workers, outbox)
