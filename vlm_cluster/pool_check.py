"""What ``doctor`` tries of a cluster: does Dagster's queue let as many runs work as the nodes hold?"""

from __future__ import annotations

from vlm_assets.config.extensions import Findings
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.doctor.service_checks import pool_findings
from vlm_assets.webserver.api import DagsterApi
from vlm_assets.webserver.home import POOL, running_address
from vlm_durable.state.nodes import Nodes


def examine_pool(settings: Settings) -> Findings:
    """Nothing where no cluster is set, or where Dagster does not run on this home."""
    address = running_address(settings.dagster_home)
    if settings.ray_address is None or address is None:
        return
    queue = DagsterApi(address, settings.dagster_home).queue(POOL)
    yield from pool_findings(queue, Nodes(control_state(settings)).snapshot().slots)
