"""The alerts sensor: it looks for trouble that a person must know of, posts alerts, and has them delivered.

Here are the alerts about checks, runs and the queue. How alerts reach people is in ``resources/alerts``. A
tick that dies anywhere is repeated: the ids of alerts make that harmless.
"""

# No postponed annotations here: Dagster reads a sensor's parameters from its real ones.

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import dagster as dg

from resources.alerts.alert import DAY_SECONDS, Alert
from resources.alerts.delivery import Delivery
from resources.alerts.outbox import Outbox
from resources.dagster_names import EXPECTED, FINDING, FOUND, UNPREFIXED, WHAT_TO_DO, DagsterNames
from sensors.dagster_internals.events import FOUND_AT, CheckEvaluation, DagsterFacts
from sensors.dagster_internals.runs import UNDER_WAY, RunState
from sensors.device_health import NONE_LEFT
from sensors.partition_history import LOOK_BACK, PartitionHistory
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import ALERTS, ALERTS_SECONDS, Ticks
from vlm_durable.commands import command
from vlm_durable.state.database import StateRestoration
from vlm_durable.wording import counted

DELIVERY_SECONDS = 20.0
"""A target that hangs for so long waits for the next tick. Dagster gives a tick 60 s."""

STANDSTILL_SECONDS = 900.0
"""How long runs may wait while none is under way: longer than any start or retry takes."""

CHECK_FAILED, CHECK_WARNED, RUN_FAILED = "check_failed", "check_warning", "run_failed"
QUEUE_STANDS, RUN_STUCK = "queue_stands", "run_stuck"

QUEUE, RESTORED = "queue", "state/database"
"""Subjects: the queue that stands still; a control state that was damaged or deleted and was restored."""

_JOB = "job"
_BY_HAND = "The error on the run's page says what to do; then launch it again."
_TRIED_AGAIN = (
    "The error on the run's page says what to do. The scheduled re-materialization tries the partition again"
    " by itself, unless it is published under other settings. When it gives up, another alert says so."
)
_UNRECORDED_AGAIN_SECONDS = 3600.0

_SETTLED_SECONDS = 3.0
"""A run fails a moment before Dagster notes on it whether it is retried."""

_RUNS_LOOK_BACK_SECONDS = 600.0
_RUNS_FIRST_SCAN_SECONDS = 3600.0
_QUOTED = 20
"""The most runs of a scan whose errors are read from their logs. Others are told without their error."""


@dataclass(frozen=True)
class Cursor:
    """How far the last scan read: the last check result, and the unix second of the last read of runs.

    still: by subject, since which unix second the queue, or a run that was started, has stood still.
    """

    evaluations: int | None = None
    runs: float | None = None
    still: dict[str, float] = field(default_factory=dict)


@dataclass
class AlertScan:
    """Looks for trouble and recoveries, and posts them.

    assets: the partitioned assets; by_hand: those of them that only a person tries again. watched: the other
    sensors and schedules, and their intervals in seconds. paused: whether a person has paused everything.
    working: the runs that have a heartbeat; silence: seconds that a run may be under way without a heartbeat.
    names: those in Dagster.
    """

    outbox: Outbox
    assets: Sequence[str]
    watched: Mapping[str, float]
    paused: Callable[[], bool]
    working: Callable[[], Collection[str]]
    silence: float
    by_hand: Sequence[str] = ()
    names: DagsterNames = UNPREFIXED

    def __post_init__(self) -> None:
        self.ticks = Ticks(self.outbox.state, self.names)
        self._history = PartitionHistory(self.assets)
        self._since: float | None = None
        self._seen_runs: set[str] = set()

    def scan(self, dagster: DagsterFacts, cursor: Cursor, *, now: float) -> tuple[Cursor, str]:
        """Post new alerts and recoveries. Returns the new cursor and a sentence. Raises ControlStateError."""
        # Ticks from before the clock was put back say nothing: each sensor has its time from now on.
        if self._since is None or (cursor.runs is not None and cursor.runs > now):
            self._since = now
        opened = self.outbox.open_subjects()
        # Runs are read before checks: then the failed checks that made a run fail are among those read.
        failed = failed_runs(dagster, cursor.runs, now=now)
        evaluations, until = new_evaluations(dagster, cursor.evaluations, opened)
        # If a failed check made a run fail, only the check is told.
        told_run_ids = {evaluation.run_id for evaluation in evaluations if evaluation.stops} | self._seen_runs
        told_run_ids |= {alert.occurrence for alert in opened.values() if alert.kind == CHECK_FAILED}
        alerts = [
            alert for evaluation in evaluations if (alert := alert_of(evaluation, self.names)) is not None
        ]
        untold = [run for run in failed if run.run_id not in told_run_ids]
        alerts += self._build_failed_run_alerts(dagster, untold)
        alerts += self.ticks.silent_sensors(self.watched, since=self._since, now=now)

        # While everything waits on purpose, a standstill is no trouble, and an earlier one is not over.
        waits = self.paused() or NONE_LEFT in opened
        standing = {} if waits else self._standing(dagster)
        still_since = {subject: min(now, cursor.still.get(subject, now)) for subject in standing}
        alerts += [
            alert(still_since[subject], now=now)
            for subject, (patience, alert) in standing.items()
            if now - still_since[subject] > patience
        ]

        posted = self.outbox.post_all(alerts, once_while_open=True)
        # Each restoration is told, also while an alert of an earlier one is open.
        posted += self.outbox.post_all(_restored(self.outbox.state.restorations(), now))
        self._seen_runs = {run.run_id for run in failed}

        opened = self.outbox.open_subjects()
        recovered = passed_again(evaluations) | self.ticks.ticking_again(opened.keys(), now=now)
        if any(alert.kind == RUN_FAILED for alert in opened.values()):
            self._history.update(dagster)
        for subject, alert in opened.items():
            if alert.kind == RUN_FAILED and self._is_made_since(dagster, alert):
                recovered[subject] = "A later run made the output of this run."
            elif alert.kind in (QUEUE_STANDS, RUN_STUCK) and subject not in still_since and not waits:
                recovered[subject] = "It goes on, or nothing is left to be done."
            elif alert.lasts is not None and now - alert.at >= alert.lasts:
                recovered[subject] = (
                    "Nothing more has happened since. Read the alert in the history if you have not yet."
                )
        recoveries = self.outbox.note_recoveries(recovered, at=now)
        return Cursor(until, now, still_since), f"{len(posted)} new, {len(recoveries)} right again"

    def _standing(self, dagster: DagsterFacts) -> dict[str, tuple[float, Callable[..., Alert]]]:
        """What stands still, by subject: seconds for which that is no trouble, and a function for its alert.

        That is each run of a partition that was started and has no heartbeat, which no other sensor watches;
        and the queue, if runs wait in it although none is under way.
        """
        started = [
            run
            for run in dagster.runs_in([dg.DagsterRunStatus.STARTED])
            if run.partition and (run.is_here or run.launcher_job is not None)
        ]
        # Heartbeats are read after runs: then a run that begins in between is not silent.
        working = self.working()
        standing: dict[str, tuple[float, Callable[..., Alert]]] = {
            f"runs/{run.run_id}": (self.silence, partial(run_stuck, run))
            for run in started
            if run.run_id not in working
        }
        queued = [] if dagster.runs_in(UNDER_WAY) else dagster.runs_in([dg.DagsterRunStatus.QUEUED])
        if queued:
            standing[QUEUE] = STANDSTILL_SECONDS, partial(queue_stands, len(queued))
        return standing

    def _build_failed_run_alerts(self, dagster: DagsterFacts, failed: Sequence[RunState]) -> Iterator[Alert]:
        """The alerts about these runs."""
        if not failed:
            return
        self._history.update(dagster)
        # A run of a whole job has no selection. Its open attempts say what it did not materialize.
        attempted: dict[str, list[str]] = {}
        for asset in sorted(self.assets):
            for attempt in self._history.open_attempts[asset].values():
                attempted.setdefault(attempt.run_id, []).append(asset)
        selections = dagster.selections([run.run_id for run in failed])
        for number, run in enumerate(failed):
            if run.run_id not in selections:
                continue  # Deleted meanwhile, by hand.
            if run.partition is not None and run.run_id not in attempted:
                continue  # Its partition was tried again since, or nothing of it is missing.
            job, selected = selections[run.run_id]
            assets = selected or attempted.get(run.run_id, [])
            partition = [run.partition] if run.partition else []
            subject = ["+".join(assets)] if assets else [_JOB, job]
            title = " and ".join(assets) or job
            error = dagster.error_of(run.run_id) if number < _QUOTED else None
            is_tried_again = run.partition is not None and not set(assets) & set(self.by_hand)
            yield Alert(
                kind=RUN_FAILED,
                subject="/".join([*subject, *partition, "run"]),
                occurrence=run.run_id,
                severity="error",
                title=" ".join(["Run failed:", title, *partition]),
                partition=run.partition,
                expected="a run that ends with its output published",
                actual=error or "a failed run",
                next_step=_TRIED_AGAIN if is_tried_again else _BY_HAND,
                page=f"runs/{run.run_id}",
                at=run.ended_at or run.created_at,
            )

    def _is_made_since(self, dagster: DagsterFacts, alert: Alert) -> bool:
        """Whether the output of a failed run was made since."""
        first, second, *_ = alert.subject.split("/")
        names = first.split("+")
        if alert.partition is not None:
            if not set(names) <= set(self.assets):
                names = list(self.assets)  # The run's assets were not known: all of them must be made.
            # An attempt after the materialization stands open until the next materialization.
            made, tried = self._history.materialized, self._history.open_attempts
            return all(alert.partition in made[name] and alert.partition not in tried[name] for name in names)
        if first == _JOB:
            return (dagster.succeeded_at(second) or 0.0) > alert.at
        for name in names:
            materialization = dagster.latest_materialization(name)
            if materialization is None or materialization[0] <= alert.at:
                return False
        return True


def failed_runs(dagster: DagsterFacts, since: float | None, *, now: float) -> list[RunState]:
    """Runs that failed since the last scan, some of them read before, that a person must know of.

    Interrupted runs are left out, because they are resumed, and runs that Dagster retries by itself.
    since: unix seconds; None at the very first scan, which goes back an hour.
    """
    # If the clock was put back, ``since`` lies ahead, and ends of runs too: neither hides runs.
    start = now - _RUNS_FIRST_SCAN_SECONDS if since is None else min(since, now) - _RUNS_LOOK_BACK_SECONDS
    return [
        run
        for run in dagster.runs_ended_since(start, [dg.DagsterRunStatus.FAILURE])
        if (run.ended_at is None or abs(now - run.ended_at) >= _SETTLED_SECONDS)
        and run.interrupted_by is None
        and not run.is_retried_by_dagster
    ]


def new_evaluations(
    dagster: DagsterFacts, cursor: int | None, opened: Mapping[str, Alert]
) -> tuple[list[CheckEvaluation], int]:
    """The results since the last scan, some of them read before, and the new cursor.

    The very first scan (cursor None) reads each check's latest result: those that failed, and those that
    passed after an alert of them. A history that was wiped or lost counts from 1 again: it is read as at the
    first scan. opened: alerts by subject.
    """
    newest = dagster.newest_evaluation()
    if cursor is None or newest < cursor:
        latest = dagster.latest_results(passed=True)
        # A history may have been put back from a backup that is older than the alert.
        since = {subject: alert.at for subject, alert in opened.items()}
        evaluations = []
        for evaluation in latest:
            alerted_at = since.get(_subject_of(evaluation))
            if not evaluation.passed or (alerted_at is not None and evaluation.at > alerted_at):
                evaluations.append(evaluation)
        return evaluations, newest
    return dagster.evaluations_since(cursor, look_back=LOOK_BACK)


def alert_of(evaluation: CheckEvaluation, names: DagsterNames = UNPREFIXED) -> Alert | None:
    """The alert about a check's result; None if it passed."""
    if evaluation.passed:
        return None
    checked = f"{evaluation.asset} {evaluation.partition}" if evaluation.partition else evaluation.asset
    page = f"assets/{'/'.join(names.path(evaluation.asset))}?view=checks&checkDetail={evaluation.check}"
    if evaluation.run_id:
        page = f"runs/{evaluation.run_id}"
    return Alert(
        kind=CHECK_FAILED if evaluation.stops else CHECK_WARNED,
        subject=_subject_of(evaluation),
        # Not the row's number: a new database counts from 1 again.
        occurrence=evaluation.run_id or evaluation.metadata.get(FOUND_AT) or f"{evaluation.at:.3f}",
        severity="error" if evaluation.stops else "warning",
        title=f"{evaluation.check} {'failed' if evaluation.stops else 'warns'}: {checked}",
        partition=evaluation.partition,
        finding=evaluation.metadata.get(FINDING),
        expected=evaluation.metadata.get(EXPECTED),
        actual=evaluation.metadata.get(FOUND) or evaluation.description or None,
        next_step=evaluation.metadata.get(WHAT_TO_DO)
        or "Open the check in Dagster: its page says what it found.",
        page=page,
        at=evaluation.at,
    )


def passed_again(evaluations: Iterable[CheckEvaluation]) -> dict[str, str]:
    """A sentence for each check whose latest result among these passed, by subject."""
    in_order = sorted(evaluations, key=lambda evaluation: evaluation.storage_id)
    latest = {_subject_of(evaluation): evaluation for evaluation in in_order}
    return {
        subject: f"{evaluation.check} passed. {evaluation.description}".strip()
        for subject, evaluation in latest.items()
        if evaluation.passed
    }


def _subject_of(evaluation: CheckEvaluation) -> str:
    """The subject of a check of a partition, the same for every run that evaluates it."""
    return "/".join(part for part in (evaluation.asset, evaluation.partition, evaluation.check) if part)


def queue_stands(queued: int, since: float, *, now: float) -> Alert:
    """The alert that runs have waited since a time (unix seconds) while none was under way."""
    return Alert(
        kind=QUEUE_STANDS,
        subject=QUEUE,
        occurrence=f"{since:.0f}",
        severity="error",
        title=f"{counted(queued, 'runs are', 'run is')} queued and none is started",
        expected="a run under way while others wait",
        actual=f"none for {(now - since) / 60:.0f} minutes",
        next_step=(
            f"{command('devices')} says which devices are left out or held: take one back, or end what holds"
            " them. With free devices, look at the pool's limit under Deployment > Concurrency: at 0 none"
            " starts. Else look at the daemon's log and start Dagster again."
        ),
        page="runs?q%5B%5D=status%3AQUEUED",
        at=now,
    )


def run_stuck(run: RunState, since: float, *, now: float) -> Alert:
    """The alert of a run whose process lives and does not work."""
    return Alert(
        kind=RUN_STUCK,
        subject=f"runs/{run.run_id}",
        occurrence=run.run_id,
        severity="error",
        title=f"The run of partition {run.partition} does not begin to work",
        partition=run.partition,
        expected="a materialization under way",
        actual=f"a run that was started, and no heartbeat for {(now - since) / 60:.0f} minutes",
        next_step=(
            "Open the run: its last event says what it waits for (a model hub, a network disk). Terminate it"
            " there; what is committed stays, and launched again by hand it goes on."
        ),
        page=f"runs/{run.run_id}",
        at=now,
    )


def _restored(restorations: Sequence[StateRestoration], now: float) -> list[Alert]:
    """The alert of the last restoration of the control state, for a day: it says what may be missing."""
    return [
        Alert(
            kind="state_damaged",
            subject=RESTORED,
            occurrence=f"{latest.at}",
            severity="error",
            title="The control state was damaged and was put back",
            next_step=f"{latest.sentence()} Look at the disk's health.",
            at=now,
            lasts=DAY_SECONDS,
        )
        for latest in restorations[-1:]
        if now - latest.at < DAY_SECONDS
    ]


def build_alerts_sensor(
    scan: AlertScan,
    delivery: Delivery,
    *,
    address: Callable[[], str | None],
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """The sensor. address: of the pages, as a person reaches them."""
    failures, unrecorded_at = 0, float("-inf")

    def tell_unrecorded(error: OSError | None, now: float) -> None:
        """Tell people, unrecorded, that alerts cannot be recorded: once an hour while that lasts."""
        nonlocal failures, unrecorded_at
        failures = 0 if error is None else failures + 1
        # A database that was busy just once is not told.
        if failures > 1 and abs(now - unrecorded_at) > _UNRECORDED_AGAIN_SECONDS:
            unrecorded_at = now
            body = f"{error}\nUntil then nothing else is told. Look: {command('status')}."
            delivery.send_at_once(
                "Alerts cannot be written down", body, type_="failure", seconds=DELIVERY_SECONDS
            )

    def decide(situation: Situation) -> Decided:
        try:
            cursor, sentence = scan.scan(situation.dagster, situation.cursor_as(Cursor), now=situation.now)
            # The time after the scan: from then on this process claims its messages for some seconds.
            delivered = delivery.deliver(now=clock(), seconds=DELIVERY_SECONDS, address=address())
        except OSError as error:
            tell_unrecorded(error, situation.now)
            raise
        return Decided(f"{sentence}; {delivered.sentence}", json.dumps(asdict(cursor)))

    return build_sensor(
        ALERTS,
        decide,
        interval_seconds=ALERTS_SECONDS,
        description=(
            "Tells a person of failing checks, failed runs and silent sensors, and delivers what the other"
            " sensors have posted: to the targets in VLM_ASSETS_ALERT_TARGETS."
        ),
        ticks=scan.ticks,
        after_note=tell_unrecorded,
        clock=clock,
    )
