"""After an ingest: let the Dagster that runs on this home read its definitions anew, and say so.

What lives here: finding that Dagster and what people are told. What does not: the request itself
(``api.py``) and the lock that says where it runs (``home.py``).
"""

from __future__ import annotations

from pathlib import Path

from vlm_assets.operate.dagster_server.api import DagsterApi, DagsterApiError
from vlm_assets.operate.dagster_server.home import running_address

BY_HAND = "A Dagster that was started by hand sees new ranges after Deployment > Reload."


def reload_running(dagster_home: Path) -> str:
    """Reload the definitions of the Dagster that runs on this state, if one does; a sentence about it."""
    address = running_address(dagster_home)
    if address is None:
        return BY_HAND
    try:
        DagsterApi(address).reload_definitions()
    except DagsterApiError as error:
        why = str(error).rstrip(".")
        return f"Dagster at {address} did not take the new ranges: {why}. Try Deployment > Reload there."
    return f"Dagster at {address} has read its definitions anew: the new ranges are partitions there now."
