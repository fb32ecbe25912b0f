"""What this extension hands over to the core: the command of a node, the launcher, a check of the pool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from vlm_assets.config.extensions import DoctorCheck, Extension, Findings
from vlm_assets.config.settings import Settings
from vlm_durable.mirror.bucket import S3Folder

_TEMPLATE = Path(__file__).with_name("dagster-cluster.yaml")


def filled_in(store: S3Folder, *, devices_of_a_run: int) -> str:
    """The template with the folder of the store in which the output of runs is kept."""
    text = _TEMPLATE.read_text()
    text = text.replace("BUCKET #", f"{json.dumps(store.bucket)} #")
    text = text.replace("PREFIX\n", f"{json.dumps(logs_prefix(store))}\n")
    return text.replace("gpus: 1", f"gpus: {devices_of_a_run}")


def logs_prefix(store: S3Folder) -> str:
    """The prefix under which the store's bucket keeps the output of runs."""
    return f"{store.prefix}dagster-logs"


class ClusterExtension(Extension):
    """Several machines, by Ray."""

    package = "vlm_cluster"
    extras: ClassVar[Mapping[str, str]] = dict.fromkeys(("ray", "dagster_ray"), "distributions/cluster[ray]")
    commands: ClassVar[Mapping[str, tuple[str, str]]] = {
        "devices node": (
            "vlm_cluster.node",
            "Be a node of a cluster: Ray's part here, and this machine's heartbeat.",
        ),
    }

    def dagster_settings(self, settings: Settings) -> str | None:
        """With the launcher that hands partitions to Ray, where the settings name its address."""
        if settings.ray_address is None or settings.store is None:
            return None
        return filled_in(settings.store, devices_of_a_run=settings.devices_per_model)

    def doctor_checks(self) -> Sequence[DoctorCheck]:
        """Whether as many runs may work at once as the nodes hold."""
        return (DoctorCheck("cluster", examine_pool),)


def examine_pool(settings: Settings) -> Findings:
    """Whether Dagster's queue lets as many runs work as the nodes hold.

    Nothing where no cluster is set, or where Dagster does not run on this home.
    """
    from vlm_assets.config.resource_settings import control_state
    from vlm_assets.services.doctor.machine_checks import pool_findings
    from vlm_assets.webserver.api import DagsterApi
    from vlm_assets.webserver.home import POOL, running_address
    from vlm_durable.state.nodes import Nodes

    address = running_address(settings.dagster_home)
    if settings.ray_address is None or address is None:
        return
    queue = DagsterApi(address, settings.dagster_home).queue(POOL)
    yield from pool_findings(queue, Nodes(control_state(settings)).snapshot().slots)
