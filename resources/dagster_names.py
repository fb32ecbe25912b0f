"""The names in Dagster of assets, sensors, schedules, jobs, resources and run tags: our own, or prefixed.

Files, the control state and the code use the names without the prefix. With it, the definitions of several
homes fit into one Dagster project.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dagster import AssetExecutionContext, AssetKey

EXPECTED, FOUND, FINDING, WHAT_TO_DO = "expected", "found", "finding", "what to do"
"""Metadata of a check's result, of which its alert is made. FINDING: the worst ``FindingKind``, if any."""


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


FAILURE_REASON: Final = "dagster/failure_reason"
"""Dagster's tag of a run that failed."""
NEVER_STARTED: Final = "START_TIMEOUT"
"""Dagster's failure reason of a run whose process did not begin in time: machine or database were busy."""

NO_ATTEMPT = "vlm-assets/no-attempt"
"""Run tag: assets of the run failed, but not through a fault of its partition: it counts as no attempt."""
NEEDS_PERSON = "vlm-assets/needs-person"
"""Run tag: another start of assets of the run would only end the same way."""


def tag_value(run_id: str, assets: Collection[str] = (), *, before: str | None = None) -> str:
    """The value of one of these tags: the run's id and assets.

    The id shows whether the tag is the run's own: a retry by Dagster inherits the tags of the run before it.
    assets: those that the tag holds for; without any, it holds for all that the run did not make. before: the
    tag's value until now; the tag goes on to hold for its assets.
    """
    if is_tagged(before, run_id):
        earlier = before.partition(" ")[2] if before else ""
        assets = {*assets, *earlier.split(",")} if assets and earlier else ()
    return " ".join(filter(None, (run_id, ",".join(sorted(assets)))))


def is_tagged(value: str | None, run_id: str, assets: Collection[str] = ()) -> bool:
    """Whether a tag of this value holds for each of these assets of a run; without any, for some asset."""
    of_run, _, named = (value or "").partition(" ")
    return of_run == run_id and (not named or set(assets) <= set(named.split(",")))
