"""What this extension hands over to the core: a setting, the launcher, its sensors, the command of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import dagster as dg

from pydantic import ValidationInfo, field_validator

from vlm_assets.config.extensions import DoctorCheck, Extension, Findings, Launcher
from vlm_assets.config.settings import PREFIX, GivenSettings, Settings, web_address
from vlm_durable.commands import command


class ClusterSettings(Settings):
    """All settings, with the address of Ray."""

    ray_address: str | None = None
    """Several machines: the address of Ray's job server on the head, such as http://10.0.0.1:8265. Needs
    VLM_ASSETS_STATE_URL and VLM_ASSETS_STORE. Default: this one alone."""

    @field_validator("ray_address")
    @classmethod
    def _of_several_machines(cls, address: str | None, others: ValidationInfo) -> str | None:
        """An address for `serve` alone. A home that is somebody's copy must name no server that runs code."""
        if address is None:
            return None
        if GivenSettings in cls.__mro__:
            raise ValueError(f"several machines need {command('serve')}, and no component")
        for name, what in (("state_url", "Postgres"), ("store", "an S3 store")):
            if name in others.data and others.data[name] is None:
                raise ValueError(
                    f"several machines share {what}, and {PREFIX}{name.upper()} is not set. Set it, or unset"
                    f" {PREFIX}RAY_ADDRESS for this machine alone"
                )
        return web_address(address, form="http://HOST:8265")


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
    settings = ClusterSettings
    settings_title = "With a cluster"

    def definitions(self, settings: Settings) -> dg.Definitions:
        """The sensors that watch the nodes, and take over what these publish."""
        import dagster as dg

        from vlm_cluster.cluster_watch import cluster_sensors

        return dg.Definitions(sensors=[] if self.launcher(settings) is None else cluster_sensors(settings))

    def launcher(self, settings: Settings) -> Launcher | None:
        """The one that hands partitions to Ray, where the settings name its address."""
        if not isinstance(settings, ClusterSettings) or settings.ray_address is None:
            return None
        from vlm_cluster.cluster_launcher import ClusterLauncher

        return ClusterLauncher()

    def doctor_checks(self) -> Sequence[DoctorCheck]:
        """Whether as many runs may work at once as the nodes hold."""
        return (DoctorCheck("cluster", self.examine_pool),)

    def examine_pool(self, settings: Settings) -> Findings:
        """Whether Dagster's queue lets as many runs work as the nodes hold.

        Nothing where no cluster is set, or where Dagster does not run on this home.
        """
        from vlm_assets.config.resource_settings import control_state
        from vlm_assets.services.doctor.machine_checks import pool_findings
        from vlm_assets.webserver.api import DagsterApi
        from vlm_assets.webserver.home import POOL, running_address
        from vlm_durable.state.nodes import Nodes

        address = running_address(settings.dagster_home)
        if self.launcher(settings) is None or address is None:
            return
        queue = DagsterApi(address, settings.dagster_home).queue(POOL)
        yield from pool_findings(queue, Nodes(control_state(settings)).snapshot().slots)
