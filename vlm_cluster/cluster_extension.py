"""What this extension hands over to the core: the command of a node, the launcher, a check of the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from vlm_assets.config.extensions import DoctorCheck, Extension
from vlm_assets.config.settings import Settings


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
        from vlm_cluster.dagster_settings import cluster_settings

        return cluster_settings(settings)

    def doctor_checks(self) -> Sequence[DoctorCheck]:
        """Whether as many runs may work at once as the nodes hold."""
        from vlm_cluster.pool_check import examine_pool

        return (DoctorCheck("cluster", examine_pool),)
