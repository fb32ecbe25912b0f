"""Three small assets that do what a test tells them, over a real Dagster on disk, or over one in memory."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.events import (
    DagsterEvent,
    DagsterEventType,
    JobFailureData,
    RunFailureReason,
)
from dagster._core.storage.runs.schema import RunsTable

from faults.rehearsal.dagster_in_memory import INTERRUPTED, DagsterInMemory, SimulatedClock
from resources.alerts.outbox import Outbox
from resources.dagster_names import NEEDS_PERSON, NO_ATTEMPT, tag_value
from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import LAUNCHED_BY, RETRY
from sensors.failed_partitions import FailedPartitions, Launch, TickResult, Watched
from sensors.retry_decision import Policy
from sensors.retry_ledger import Entry
from vlm_durable.state.database import open_state

KEYS = ("a", "b", "c", "d", "e", "f")
MINUTE = 60.0


@dataclass
class Behaviour:
    """What the first asset does with a partition: succeed, or ``fail``, ``interrupt``, ``check``."""

    of_key: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    interrupted: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    decides: bool = False
    working: set[str] = field(default_factory=set)
    no_device: str | None = None


ASSETS = ("first", "beside", "second")
"""``second`` is made from ``first``, and ``beside`` from neither."""


def job_of_assets() -> dg.JobDefinition:
    """The job over the assets, of which no run is ever executed: their events are written as Dagster does."""
    partitions = dg.StaticPartitionsDefinition(list(KEYS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        sound = dg.AssetCheckSpec("sound", asset="first", partitions_def=partitions)

    @dg.asset(partitions_def=partitions, check_specs=[sound])
    def first(): ...

    @dg.asset(partitions_def=partitions)
    def beside(): ...

    @dg.asset(partitions_def=partitions, deps=[first])
    def second(): ...

    return dg.Definitions([first, beside, second]).resolve_implicit_global_asset_job_def()


JOB = job_of_assets()


@dataclass
class Retried:
    """A home and the ticks of the re-materialization. Dagster is an instance or is in memory."""

    state: Path
    behaviour: Behaviour = field(default_factory=Behaviour)
    cap: int = 3
    ticks: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """What a code server that was killed comes back with: nothing but the disk."""
        told = self.behaviour
        watched = Watched(
            assets=ASSETS,
            keys=frozenset(KEYS),
            interrupted=lambda asset: told.interrupted if asset == "first" else (),
            missing=lambda asset, keys: told.missing & set(keys) if asset == "first" else (),
            rows=lambda key: told.rows.get(key, 0),
            is_stale=lambda asset, key: key in told.stale,
            decides_on_stale=lambda asset, run_config: told.decides,
            working=lambda: told.working,
            heaviest_first=lambda keys: sorted(keys, reverse=True),
            with_downstream=lambda assets: {*assets, *(["second"] if "first" in assets else [])},
        )
        self.failed_partitions = FailedPartitions(
            watched,
            open_state(self.state),
            policy=Policy(attempts=5, backoff_seconds=10 * MINUTE),
            cap=self.cap,
            no_device=lambda: told.no_device,
        )

    @property
    def dagster(self) -> DagsterFacts:
        """What the ticks ask."""
        raise NotImplementedError

    @property
    def now(self) -> float:
        """Unix seconds."""
        raise NotImplementedError

    def look(self, *, tick: str | None = None, at_once: bool = False) -> TickResult:
        """One tick, whose launches are not made."""
        self.ticks += 1
        return self.failed_partitions.tick(
            self.dagster, tick=tick or f"tick {self.ticks}", now=self.now, at_once=at_once
        )

    def tick(self, *, at_once: bool = False) -> list[str]:
        """One tick, and the runs that it launches. Gives the keys that were launched."""
        launches = self.look(at_once=at_once).launches
        for launch in launches:
            self.launch(launch)
        return [launch.key for launch in launches]

    def launch(self, launch: Launch) -> None:
        self.materialize(launch.key, tags={LAUNCHED_BY: RETRY, "dagster/run_key": launch.run_key})

    def materialize(self, key: str, *, tags: Mapping[str, str] | None = None) -> None:
        """A run of this partition, as a person launches it where no tags say otherwise."""
        raise NotImplementedError

    @property
    def ledger(self) -> dict[str, Entry]:
        """Entries by partition."""
        return self.failed_partitions.attempts.read()

    @property
    def told(self) -> list[tuple[str, str | None]]:
        """Kind and partition of every alert that is open."""
        opened = Outbox(open_state(self.state)).open_subjects().values()
        return sorted((alert.kind, alert.partition) for alert in opened)


@dataclass
class InMemory(Retried):
    """Dagster from memory, which costs no time, with a clock that is moved by hand."""

    clock: SimulatedClock = field(default_factory=lambda: SimulatedClock(1_790_000_000.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.facts = DagsterInMemory(self.clock)

    @property
    def dagster(self) -> DagsterInMemory:
        return self.facts

    @property
    def now(self) -> float:
        return self.clock.now

    def materialize(self, key: str, *, tags: Mapping[str, str] | None = None) -> None:
        does = self.behaviour.of_key.get(key)
        if does is None:
            self.ends(key, made=ASSETS, status=dg.DagsterRunStatus.SUCCESS, **(tags or {}))
        else:
            self.ends(key, **{**(tags or {}), **(INTERRUPTED if does == "interrupt" else {})})

    def ends(
        self,
        key: str,
        *,
        of: Sequence[str] = ASSETS,
        made: Sequence[str] = (),
        status: dg.DagsterRunStatus = dg.DagsterRunStatus.FAILURE,
        for_person: Sequence[str] = (),
        **tags: str,
    ) -> str:
        """A run of these assets that made some of them, and left some to a person. Gives its id."""
        run_id = self.facts.launch(key, of, **tags)
        for asset in made:
            self.facts.materialize(asset, key, run_id)
        left = {NEEDS_PERSON: tag_value(run_id, for_person)} if for_person else {}
        self.facts.change(run_id, status, **left)
        return run_id

    def evaluated(self, key: str, severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR) -> None:
        """A failed check of the first asset's partition, without a run."""
        self.facts.report_evaluation(
            dg.AssetCheckEvaluation(
                dg.AssetKey("first"), "file", passed=False, metadata={}, severity=severity, partition=key
            )
        )


@dataclass
class Orchestrator(Retried):
    """Dagster with its assets, and a clock that can be moved on."""

    instance: dg.DagsterInstance = field(kw_only=True)
    ahead: float = 0.0

    @property
    def dagster(self) -> DagsterFacts:
        return DagsterFacts(self.instance)

    @property
    def now(self) -> float:
        return time.time() + self.ahead

    def materialize(self, key: str, *, tags: Mapping[str, str] | None = None) -> None:
        """A run of this partition, as a person launches it where no tags say otherwise."""
        run = self.created(key, **(tags or {}))
        does = self.behaviour.of_key.get(key)
        if does is not None:
            self.ends(run, does)
            return
        self.made(key, *ASSETS)
        self._report(run, DagsterEventType.RUN_SUCCESS, None)

    def made(self, key: str, *assets: str) -> None:
        """A materialization of each of these assets."""
        for asset in assets:
            self.instance.report_runless_asset_event(dg.AssetMaterialization(asset, partition=key))

    def ends(self, run: dg.DagsterRun, does: str) -> None:
        """Let a run end without a materialization: ``fail``, ``interrupt``, ``never start``, ``check``."""
        if does == "outage":
            self.instance.add_run_tags(run.run_id, {NO_ATTEMPT: run.run_id})
        if does == "check":
            key = run.tags["dagster/partition"]
            found = dg.AssetCheckEvaluation(
                dg.AssetKey("first"), "sound", passed=False, metadata={}, partition=key
            )
            self._report(run, DagsterEventType.ASSET_CHECK_EVALUATION, found)
        reasons = {
            "interrupt": RunFailureReason.UNEXPECTED_TERMINATION,
            "never start": RunFailureReason.START_TIMEOUT,
        }
        why = reasons.get(does, RunFailureReason.STEP_FAILURE)
        self.instance.report_run_failed(run, does, JobFailureData(error=None, failure_reason=why))

    def _report(self, run: dg.DagsterRun, kind: DagsterEventType, data: object) -> None:
        event = DagsterEvent(kind.value, run.job_name, event_specific_data=data)
        self.instance.report_dagster_event(event, run.run_id)

    def created(self, key: str, *, of: Sequence[str] = ASSETS, **tags: str) -> dg.DagsterRun:
        """A run of these assets of this partition that was created and not queued."""
        job = JOB.get_subset(asset_selection=set(map(dg.AssetKey, of)))
        return self.instance.create_run_for_job(job_def=job, tags={"dagster/partition": key, **tags})

    def cancelled(self, key: str, **tags: str) -> dg.DagsterRun:
        """A run of this partition that a person ended."""
        run = self.created(key, **tags)
        self.instance.report_run_canceled(run)
        return run

    def postpone(self, run: dg.DagsterRun) -> None:
        """Let a run be created two seconds later: the database keeps whole seconds."""
        at = datetime.fromtimestamp(time.time() + 2, UTC).replace(tzinfo=None)
        with self.instance.run_storage.connect() as connection:
            of_run = RunsTable.update().where(RunsTable.c.run_id == run.run_id)
            connection.execute(of_run.values(create_timestamp=at))

    @property
    def job(self) -> dg.JobDefinition:
        """The job over the assets."""
        return JOB


@pytest.fixture
def home(tmp_path: Path) -> InMemory:
    """Six partitions in memory, nothing run yet."""
    return InMemory(tmp_path / "state")


@pytest.fixture
def orchestrator(new_instance: Callable[[str], dg.DagsterInstance], tmp_path: Path) -> Iterator[Orchestrator]:
    """Six partitions, nothing run yet."""
    with new_instance("dagster") as instance:
        yield Orchestrator(tmp_path / "state", instance=instance)


@pytest.fixture
def another_instance(new_instance: Callable[[str], dg.DagsterInstance]) -> Iterator[dg.DagsterInstance]:
    """The empty database that stands there after the first one was lost."""
    with new_instance("another") as instance:
        yield instance
