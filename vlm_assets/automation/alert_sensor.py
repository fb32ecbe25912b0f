"""Which assets, folders and other sensors the alerts sensor is handed.

What lives here: wiring from the settings. What does not: what is told and when (``sensors/alerts.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import dagster as dg

from resources.state.pause import pause_of
from resources.state.workers import Workers
from sensors.alerts import build_alerts_sensor
from vlm_assets.assets import property_descriptions, property_embeddings
from vlm_assets.automation.alert_settings import build_delivery, pages_address, ticks_directory
from vlm_assets.resource_settings import control_state
from vlm_assets.settings import Settings

_USUAL_INTERVAL = 30.0
_START_SECONDS = 1200.0
"""For a run to import and to look at its model and its partition, beside the wait for a model's server."""


def build_alerts(
    settings: Settings, watched: Iterable[dg.SensorDefinition], *, schedules: Mapping[str, float]
) -> dg.SensorDefinition:
    """The alerts sensor. Raises SettingsError.

    watched, schedules: the other sensors and schedules, whose silence is noticed; seconds between two ticks.
    """
    intervals = {one.name: float(one.minimum_interval_seconds or _USUAL_INTERVAL) for one in watched}
    return build_alerts_sensor(
        build_delivery(settings),
        assets=[property_descriptions.ASSET, property_embeddings.ASSET],
        watched={**intervals, **schedules},
        ticks=ticks_directory(settings),
        paused=lambda: pause_of(control_state(settings)) is not None,
        working=lambda: {worker.run_id for worker in Workers(control_state(settings)).living()},
        silence=settings.device_wait_seconds + _START_SECONDS,
        address=lambda: pages_address(settings),
    )
