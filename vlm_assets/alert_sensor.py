"""Which assets, folders and other sensors the alerts sensor is handed.

What lives here: wiring from the settings. What does not: what is told and when (``sensors/alerts.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg

from sensors.alerts import build_alerts_sensor
from vlm_assets import descriptions, embeddings
from vlm_assets.alert_settings import build_delivery, pages_address, ticks_directory
from vlm_assets.settings import Settings

_USUAL_INTERVAL = 30.0


def build_alerts(settings: Settings, watched: Iterable[dg.SensorDefinition]) -> dg.SensorDefinition:
    """The alerts sensor. watched: the other sensors, whose silence is noticed. Raises SettingsError."""
    return build_alerts_sensor(
        build_delivery(settings),
        assets=[descriptions.ASSET, embeddings.ASSET],
        watched={one.name: float(one.minimum_interval_seconds or _USUAL_INTERVAL) for one in watched},
        ticks=ticks_directory(settings),
        address=lambda: pages_address(settings),
    )
