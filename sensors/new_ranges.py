"""The sensor that runs new partitions by itself, where the settings ask for it (VLM_ASSETS_RUN_NEW_RANGES).

It launches each partition once. What fails afterwards is the retry schedule's work.
"""

# No postponed annotations here: Dagster reads a sensor's parameters from its real ones.

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from sensors.dagster_internals.backfill_queue import awaited_partitions
from sensors.dagster_internals.runs import LAUNCHED_BY, unfinished_partitions
from sensors.ticks import note_tick

NAME = "new_ranges"
INTERVAL_SECONDS = 60
NEW = "new_ranges"
"""Value of the run tag LAUNCHED_BY for runs of this sensor."""

_UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


@dataclass(frozen=True)
class NewRanges:
    """What a tick asks. assets: upstream first. keys: the partitions of the definitions.

    close: makes a partition of the catalogue's tail if it is old enough, and gives a sentence, or None.
    untouched: those of some partitions that have nothing on disk. heaviest_first: the order to run in.
    paused: whether nothing may start. cap: runs of this sensor that are queued or running, at most.
    """

    assets: tuple[str, ...]
    keys: tuple[str, ...]
    close: Callable[[], str | None]
    untouched: Callable[[Collection[str]], Collection[str]]
    heaviest_first: Callable[[Collection[str]], Sequence[str]]
    paused: Callable[[], bool]
    cap: int

    def tick(self, instance: dg.DagsterInstance) -> tuple[list[str], str]:
        """The partitions to launch now, and a sentence about the tick."""
        if self.paused():
            return [], "Paused: nothing is started."
        if (closed := self.close()) is not None:
            return [], closed
        running = instance.get_runs_count(dg.RunsFilter(tags={LAUNCHED_BY: NEW}, statuses=_UNFINISHED))
        room = self.cap - running
        if room <= 0 or not self.keys:
            return [], f"{running} new partitions are queued or running."
        states = instance.get_status_by_partition(
            dg.AssetKey(self.assets[0]), self.keys, dg.StaticPartitionsDefinition(self.keys)
        )
        never = [key for key in self.keys if (states or {}).get(key) is None]
        if not never:
            return [], "There is no new partition."
        never = list(self.untouched(never))
        busy = unfinished_partitions(instance) | awaited_partitions(instance, self.assets)
        chosen = self.heaviest_first([key for key in never if key not in busy])[:room]
        return list(chosen), f"{len(never)} new partitions; {len(chosen)} are launched now."


def build_new_ranges_sensor(new_ranges: NewRanges, *, ticks: Path) -> dg.SensorDefinition:
    """The sensor. ticks: the folder where each sensor notes that it ticked."""

    @dg.sensor(
        name=NAME,
        asset_selection=dg.AssetSelection.assets(*new_ranges.assets),
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Runs partitions that were never run, the heaviest first. Makes a partition of the catalogue's"
            " last properties when they have waited long enough (VLM_ASSETS_RUN_NEW_RANGES)."
        ),
    )
    def new_ranges_sensor(context: dg.SensorEvaluationContext):  # type: ignore[no-untyped-def]
        keys, said = new_ranges.tick(context.instance)
        note_tick(ticks, NAME, time.time(), interval_seconds=INTERVAL_SECONDS, log=lambda: context.log)
        # The run key: a partition is launched once by this sensor, whatever a killed daemon forgot.
        requests = [
            dg.RunRequest(
                run_key=f"{NEW} {key}",
                partition_key=key,
                asset_selection=[dg.AssetKey(asset) for asset in new_ranges.assets],
                tags={LAUNCHED_BY: NEW},
            )
            for key in keys
        ]
        return requests or dg.SkipReason(said)

    return new_ranges_sensor
