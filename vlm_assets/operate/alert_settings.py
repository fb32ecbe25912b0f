"""Alerts as the settings mean them: whom to tell, and where it is kept.

What does not live here: how that is done (``resources/alerts``), and the sensor (``automation/sensors.py``).
Dagster is not imported: alerts are delivered whatever has become of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from resources.alerts.delivery import Delivery
from resources.alerts.outbox import Outbox
from resources.alerts.targets import AlertTargetError, Target, checked_targets
from vlm_assets.operate.dagster_server.home import running_address
from vlm_assets.resource_settings import control_state
from vlm_assets.settings import PREFIX, Settings, SettingsError


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
