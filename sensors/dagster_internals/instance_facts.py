"""A Dagster instance as the facts that the sensors decide from.

Checked with dagster 1.13.27. If a part of it goes, the two modules that it is made of say what replaces it.
"""

from __future__ import annotations

from sensors.dagster_internals.events import InstanceEvents
from sensors.dagster_internals.runs import InstanceRuns


class InstanceFacts(InstanceRuns, InstanceEvents):
    """``DagsterFacts`` of a real instance."""
