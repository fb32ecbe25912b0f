"""What the sensors ask Dagster and tell it: all of it, so that their decisions run without Dagster too.

``dagster_internals/events.py`` answers for a real instance; a test or a simulation answers from
memory, on its own clock. What the methods mean in detail is said where they are implemented.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    # ``vlm-assets status`` reads what sensors keep, and importing Dagster takes a second.
    from dagster import AssetCheckEvaluation, AssetMaterialization, DagsterRunStatus

    from sensors.dagster_internals.events import CheckEvaluation, MaterializationEvent
    from sensors.dagster_internals.runs import RunState


class DagsterFacts(Protocol):
    """Runs, events and results of checks. All times are in unix seconds."""

    def run_states(self, run_ids: Collection[str]) -> dict[str, RunState]:
        """Runs by id; one that was deleted is left out."""

    def runs_with_key(self, run_keys: Collection[str]) -> dict[str, RunState]:
        """Runs by run key; the newest of each."""

    def runs_in(self, statuses: Collection[DagsterRunStatus]) -> list[RunState]:
        """Runs that are in one of these states now."""

    def runs_ended_since(self, since: float, statuses: Collection[DagsterRunStatus]) -> list[RunState]:
        """Runs in one of these states that changed since."""

    def runs_created_since(self, since: float) -> list[RunState]:
        """Runs that were created since."""

    def awaited_partitions(self, assets: Sequence[str]) -> set[str]:
        """Partitions for which an unfinished backfill will launch a run."""

    def run_config(self, run_id: str) -> tuple[Mapping[str, Any], str] | None:
        """The run config of a run, and the id of its root run."""

    def selections(self, run_ids: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
        """The job and the selected assets of runs, by id; one that was deleted is left out."""

    def error_of(self, run_id: str) -> str | None:
        """What the log of a failed run says of its end."""

    def succeeded_at(self, job: str) -> float | None:
        """When the newest run of a job that succeeded has ended."""

    def process_of(self, run_id: str) -> tuple[int, float] | None:
        """The pid that a run's process gave when it began, and when."""

    def delete_run(self, run_id: str) -> None:
        """Forget a run that has done nothing."""

    def mark_interrupted(self, run_id: str) -> None:
        """Say on a run, before it is ended from outside, that this is no failure of its partition."""

    def end_interrupted(self, run_id: str, why: str) -> bool:
        """End a run whose process is gone as interrupted, or as cancelled where a person cancels it."""

    def end_cancelled(self, run_id: str, why: str) -> bool:
        """End a run that a person is cancelling as cancelled."""

    def ray_job_has_ended(self, job: str) -> bool:
        """Whether Ray says that a job has ended; False where it does not know, or does not answer."""

    def stop_ray_job(self, job: str) -> None:
        """Have Ray end a job, if it still has it."""

    def free_slots_of_ended(self) -> list[str]:
        """Free what ended runs still hold in pools."""

    def fit_pool(self, pool: str, *, before: int, now: int) -> None:
        """Let a pool's limit follow the number of devices in use."""

    def newest_event(self) -> int:
        """The id of the latest event."""

    def newest_evaluation(self) -> int:
        """The id of the latest result of a check."""

    def materializations_since(self, asset: str, cursor: int) -> list[MaterializationEvent]:
        """Of an asset's partitions, planned and done, after an event's id."""

    def latest_materialization(self, asset: str) -> tuple[float, Mapping[str, str]] | None:
        """When an asset was last materialized, and its metadata as text."""

    def materialized_partitions(self, asset: str) -> Collection[str]:
        """The partitions that Dagster knows as materialized."""

    def latest_results(
        self, assets: Sequence[str] | None = None, *, passed: bool = False
    ) -> Iterator[CheckEvaluation]:
        """The latest result of every check and partition, of these assets or of all, where it failed.

        passed: also where it passed, without a text.
        """

    def evaluations_since(self, cursor: int, *, look_back: int = 0) -> tuple[list[CheckEvaluation], int]:
        """Results of checks after an event's id, and where to go on."""

    def restore_results(self, run_ids: Collection[str]) -> list[tuple[str, str, str]]:
        """Tell again the last result of each check that these runs planned and never evaluated."""

    def report_evaluation(self, found: AssetCheckEvaluation) -> None:
        """Tell the result of a check that no run made."""

    def report_materialization(self, found: AssetMaterialization) -> None:
        """Tell of a materialization that no run made."""
