"""Where these settings keep the control state."""

from __future__ import annotations

from resources.state.database import ControlState, open_state
from vlm_assets.settings import Settings


def control_state(settings: Settings) -> ControlState:
    """The control state of these settings. Raises ControlStateError where the home is on a network disk."""
    url = settings.state_url
    return open_state(settings.state_directory, None if url is None else url.get_secret_value())
