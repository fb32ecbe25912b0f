"""The delivery of alerts, from the settings, and a test message to each target.

How alerts are delivered is in ``resources/alerts``. Dagster is not imported: alerts are delivered whatever
has become of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from resources.alerts.delivery import Delivery
from resources.alerts.outbox import Outbox
from resources.alerts.targets import AlertTargetError, Target, checked_targets
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import PREFIX, Settings, SettingsError
from vlm_assets.webserver.home import running_address


def build_delivery(settings: Settings) -> Delivery:
    """What brings the outbox to the targets. Raises SettingsError: it names a bad one, never its text."""
    secret = settings.alert_targets
    try:
        targets = checked_targets(secret.get_secret_value().split() if secret is not None else ())
    except AlertTargetError as error:
        raise SettingsError(f"{PREFIX}ALERT_TARGETS: {error}") from None
    return Delivery(Outbox(control_state(settings)), targets, home=settings.home)


def pages_address(settings: Settings) -> str | None:
    """The address of the pages for links: the one in the settings, else of the Dagster that runs here."""
    if settings.ui_address:
        return settings.ui_address
    return running_address(Path(os.environ.get("DAGSTER_HOME") or settings.dagster_home))


def send_trial(delivery: Delivery, settings: Settings, *, seconds: float) -> list[tuple[Target, str | None]]:
    """Send every target a test message. What each said: None of one that took it."""
    body = f"Alerts reach you here. Pages: {pages_address(settings) or 'not up'}"
    return delivery.send_at_once("This is a test", body, type_="info", seconds=seconds)
