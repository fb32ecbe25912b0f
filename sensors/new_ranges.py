"""The sensor that runs new partitions by itself, where VLM_ASSETS_RUN_NEW_RANGES_AFTER_HOURS is set.

It launches each partition once. What fails afterwards is the retry schedule's work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import dagster as dg

from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import LAUNCHED_BY, UNFINISHED
from sensors.partition_history import PartitionHistory
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_durable.wording import counted

NAME = "new_ranges"
INTERVAL_SECONDS = 60
NEW = "new_ranges"
"""Value of the run tag LAUNCHED_BY for runs of this sensor."""


@dataclass
class NewRanges:
    """Chooses the new partitions to run. assets: upstream first. keys: the partitions of the definitions.

    close: makes a partition of the catalogue's tail if it is old enough at this unix second; returns a
    sentence, or None. untouched: of some partitions, those that have nothing on disk. heaviest_first: the
    order to run in. paused: whether nothing may start. cap: the most runs that it has queued or running at
    once.
    """

    assets: tuple[str, ...]
    keys: tuple[str, ...]
    close: Callable[[float], str | None]
    untouched: Callable[[Collection[str]], Collection[str]]
    heaviest_first: Callable[[Collection[str]], Sequence[str]]
    paused: Callable[[], bool]
    cap: int

    def __post_init__(self) -> None:
        self._history = PartitionHistory(self.assets[:1])

    def tick(self, dagster: DagsterFacts, now: float) -> tuple[list[str], str]:
        """The partitions to launch now, and a sentence about the tick."""
        if self.paused():
            return [], "Paused: nothing is started."
        if (closed := self.close(now)) is not None:
            return [], closed
        unfinished = dagster.runs_in(UNFINISHED)
        running = sum(run.launched_by == NEW for run in unfinished)
        room = self.cap - running
        if room <= 0 or not self.keys:
            return [], f"{counted(running, 'new partitions are', 'new partition is')} queued or running."
        self._history.update(dagster)
        # A partition whose run was cancelled is not new: it was tried. One whose run was deleted is new.
        under_way = {run.run_id for run in unfinished}
        attempts = self._history.open_attempts[self.assets[0]]
        runs = dagster.run_states({attempt.run_id for attempt in attempts.values()} - under_way)
        known_runs = under_way | runs.keys()
        tried = {key for key, attempt in attempts.items() if attempt.run_id in known_runs}
        tried |= self._history.materialized[self.assets[0]].keys()
        new_keys = [key for key in self.keys if key not in tried]
        if not new_keys:
            return [], "There is no new partition."
        new_keys = list(self.untouched(new_keys))
        busy = {run.partition for run in unfinished} | dagster.awaited_partitions(self.assets)
        chosen = self.heaviest_first([key for key in new_keys if key not in busy])[:room]
        return list(chosen), f"{counted(len(new_keys), 'new partitions')}; launched now: {len(chosen)}."


def build_new_ranges_sensor(new_ranges: NewRanges, *, ticks: Ticks) -> dg.SensorDefinition:
    """The sensor. ticks: where each sensor notes that it ticked."""
    assets = [ticks.names.key(asset) for asset in new_ranges.assets]

    def decide(situation: Situation) -> Decided:
        keys, sentence = new_ranges.tick(situation.dagster, situation.now)
        # With the run key this sensor launches a partition once, whatever a killed daemon forgot.
        requests = [
            dg.RunRequest(
                run_key=f"{NEW} {key}", partition_key=key, asset_selection=assets, tags={LAUNCHED_BY: NEW}
            )
            for key in keys
        ]
        return Decided(sentence, requests=requests)

    return build_sensor(
        NAME,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Runs partitions that were never run, the heaviest first. Makes a partition of the catalogue's"
            " last properties when they have waited long enough (VLM_ASSETS_RUN_NEW_RANGES_AFTER_HOURS)."
        ),
        ticks=ticks,
        asset_selection=dg.AssetSelection.assets(*assets),
    )
