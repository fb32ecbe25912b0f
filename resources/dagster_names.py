"""The names in Dagster of assets, sensors, schedules, jobs, resources and run tags: our own, or prefixed.

Files, the control state and the code use the names without the prefix. With it, the definitions of several
homes fit into one Dagster project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dagster import AssetExecutionContext, AssetKey


@dataclass(frozen=True)
class DagsterNames:
    """The names in Dagster of one home's definitions. prefix: empty where Dagster has no other home's."""

    prefix: str = ""

    def name(self, name: str) -> str:
        """The name of a sensor, schedule, job, group or resource."""
        return f"{self.prefix}_{name}" if self.prefix else name

    def plain(self, name: str) -> str:
        """The name without the prefix."""
        return name.removeprefix(self.name(""))

    def resource(self, context: AssetExecutionContext, name: str) -> Any:
        """A resource that an asset requires."""
        return getattr(context.resources, self.name(name))

    def path(self, asset: str) -> list[str]:
        """The parts of an asset's key."""
        return [self.prefix, asset] if self.prefix else [asset]

    def key(self, asset: str) -> AssetKey:
        """An asset's key."""
        from dagster import AssetKey

        return AssetKey(self.path(asset))

    def op(self, asset: str) -> str:
        """The name under which run config has an asset's options."""
        return "__".join(self.path(asset))

    def asset(self, key: AssetKey) -> str | None:
        """The asset of a key; None where it is another home's, or of somebody else's project."""
        if not self.prefix:
            return key.to_user_string()
        return key.path[1] if key.path[:-1] == [self.prefix] else None


UNPREFIXED: Final = DagsterNames()
"""The names of a project that has one home alone."""


NO_ATTEMPT = "vlm-assets/no-attempt"
"""Run tag: a step of the run failed, but not through a fault of its partition, so it counts as no attempt.

Its value is the run's own id, because Dagster's run retries inherit tags.
"""
NEEDS_PERSON = "vlm-assets/needs-person"
"""Run tag: another start would only end the same way. Its value is the run's own id."""
