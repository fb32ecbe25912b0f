"""Alerts as the settings mean them: whom to tell, where it is kept, and the sensor that looks and tells.

What does not live here: how that is done (``resources/alerts``, ``sensors/alerts.py``). Dagster is imported
for the sensor alone: alerts are delivered whatever has become of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from resources.alerts.delivery import Delivery
from resources.alerts.outbox import Outbox
from resources.alerts.targets import AlertTargetError, Target, checked_targets
from resources.state.pause import pause_of
from resources.state.workers import Workers
from vlm_assets.operate.dagster_server.home import running_address
from vlm_assets.resource_settings import control_state
from vlm_assets.settings import PREFIX, Settings, SettingsError

if TYPE_CHECKING:
    import dagster as dg

_USUAL_INTERVAL = 30.0
_START_SECONDS = 1200.0
"""For a run to import and to look at its model and its partition, beside the wait for a model's server."""


def build_outbox(settings: Settings) -> Outbox:
    """Where whoever sees trouble posts it."""
    return Outbox(control_state(settings))


def targets(settings: Settings) -> tuple[Target, ...]:
    """Whom to tell. Raises SettingsError, which names a bad one by position and scheme, never its text."""
    if settings.alert_targets is None:
        return ()
    try:
        return checked_targets(settings.alert_targets.get_secret_value().split())
    except AlertTargetError as error:
        raise SettingsError(f"{PREFIX}ALERT_TARGETS: {error}") from None


def build_delivery(settings: Settings) -> Delivery:
    """What brings the outbox to the targets. Raises SettingsError."""
    return Delivery(build_outbox(settings), targets(settings), home=settings.home)


def pages_address(settings: Settings) -> str | None:
    """The address of the pages for links: the one in the settings, else of the Dagster that runs here."""
    if settings.ui_address:
        return settings.ui_address
    return running_address(Path(os.environ.get("DAGSTER_HOME") or settings.dagster_home))


def build_alerts(
    settings: Settings, watched: Iterable[dg.SensorDefinition], *, schedules: Mapping[str, float]
) -> dg.SensorDefinition:
    """The alerts sensor. Raises SettingsError.

    watched, schedules: the other sensors and schedules, whose silence is noticed; seconds between two ticks.
    """
    from sensors.alerts import AlertScan, build_alerts_sensor
    from vlm_assets.assets import property_descriptions, property_embeddings

    state = control_state(settings)
    delivery = build_delivery(settings)
    intervals = {one.name: float(one.minimum_interval_seconds or _USUAL_INTERVAL) for one in watched}
    scan = AlertScan(
        delivery.outbox,
        assets=[property_descriptions.ASSET, property_embeddings.ASSET],
        watched={**intervals, **schedules},
        paused=lambda: pause_of(state) is not None,
        working=lambda: {worker.run_id for worker in Workers(state).living()},
        silence=settings.device_wait_seconds + _START_SECONDS,
    )
    return build_alerts_sensor(scan, delivery, address=lambda: pages_address(settings))
