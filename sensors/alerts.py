"""The alerts sensor: every half minute it looks for what a person must know, and tells them.

What lives here: the order of a tick, what is remembered between two, and what is told of results of checks.
What does not: what is told of runs and sensors (``run_alerts.py``, ``ticks.py``; the other sensors post their
own), and how it reaches people (``resources/alerts``). A tick that dies anywhere is repeated: ids make that
harmless.
"""

# No postponed annotations here: Dagster reads a sensor's parameters from its real ones.

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import dagster as dg

from resources.alerts.alert import DAY_SECONDS, Alert, Message
from resources.alerts.delivery import Delivery
from resources.alerts.outbox import Outbox
from resources.state.database import StateRestoration
from sensors import run_alerts
from sensors.dagster_facts import DagsterFacts
from sensors.dagster_internals.events import FOUND_AT, CheckEvaluation
from sensors.device_health import NONE_LEFT
from sensors.partition_history import PartitionHistory
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import ALERTS, ALERTS_SECONDS, Ticks

NAME, INTERVAL_SECONDS = ALERTS, ALERTS_SECONDS
DELIVERY_SECONDS = 20.0
"""Of a tick, after which a target that hangs is left for the next one. Dagster gives a tick 60."""

RESTORED = "state/database"
"""Subject of a control state that was damaged or deleted and was put back."""

CHECK_FAILED, CHECK_WARNED = "check_failed", "check_warning"

_EVENTS_READ_AGAIN = 200
"""Events that are read again: on Postgres a lower id may become visible after a higher one."""

_RESULTS_AT_ONCE = 5000
_EXPECTED, _FOUND, _WHAT_TO_DO = "expected", "found", "what to do"
_UNRECORDED_AGAIN_SECONDS = 3600.0
_REMEMBERED = 100_000


@dataclass(frozen=True)
class Cursor:
    """How far was looked: the last check result, and the unix second of the last look at runs.

    standing_since: unix second since when runs are queued and none is under way. silent: since when runs of
    partitions are under way without a heartbeat, by id.
    """

    evaluations: int | None = None
    runs: float | None = None
    standing_since: float | None = None
    silent: dict[str, float] = field(default_factory=dict)


class AlertScan:
    """Looks for trouble and recoveries, and posts them. assets: the partitioned ones.

    by_hand: of these, those that nobody tries again but a person.
    watched: the other sensors and schedules and their intervals in seconds. paused: whether a person has
    everything stand still, which is then no trouble. working: the runs that have a heartbeat; silence:
    seconds that one may be under way without.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        assets: Sequence[str],
        by_hand: Sequence[str] = (),
        watched: Mapping[str, float],
        paused: Callable[[], bool],
        working: Callable[[], Collection[str]],
        silence: float,
    ) -> None:
        self.outbox = outbox
        self.ticks = Ticks(outbox.state)
        self._assets = tuple(assets)
        self._by_hand = frozenset(by_hand)
        self._watched = watched
        self._paused = paused
        self._working = working
        self._silence = silence
        self._history = PartitionHistory(assets)
        self._since: float | None = None
        # In memory, to save work; after a restart the outbox knows them.
        self._told_runs: dict[str, None] = {}

    def scan(self, dagster: DagsterFacts, cursor: Cursor, *, now: float) -> tuple[Cursor, str]:
        """Post what is new; returns where to go on, and a sentence. Raises ControlStateError."""
        if self._since is None:
            self._since = now
        # Runs before checks: the checks that a failed run failed for are then among those read.
        failed, runs = run_alerts.failed_runs(dagster, cursor.runs, now=now)
        evaluations, until = new_evaluations(dagster, cursor.evaluations, self._assets)
        found = [alert for one in evaluations if (alert := alert_of(one)) is not None]
        # A run whose failed check is told, by this process or one before it, is not told too.
        self._told_runs |= {one.run_id: None for one in evaluations if one.stops and one.run_id}
        new = [one for one in failed if one.run_id not in self._told_runs]
        opened = self.outbox.open_subjects()
        if new:
            refused = {alert.occurrence for alert in opened.values() if alert.kind == CHECK_FAILED}
            new = [one for one in new if one.run_id not in refused]
            found += run_alerts.alerts_of(dagster, new, self._history, by_hand=self._by_hand)
        found += self.ticks.silent_sensors(self._watched, since=self._since, now=now)
        paused = self._paused()
        # Told already why nothing is started: the queue waits on purpose.
        waits = paused or NONE_LEFT in opened
        queued = 0 if waits else run_alerts.queued_while_nothing_runs(dagster)
        standing_since = (now if cursor.standing_since is None else cursor.standing_since) if queued else None
        if standing_since is not None:
            found += run_alerts.queue_stands(queued, since=standing_since, now=now)
        # Looked at after the heartbeats: one that begins in between is silent for one look.
        working = self._working()
        silent = [] if paused else run_alerts.silent_runs(dagster, working, cursor.silent, now=now)
        times = {run.run_id: since for run, since in silent}
        stuck = [(run, since) for run, since in silent if now - since > self._silence]
        found += [run_alerts.run_stuck(run, since, now=now) for run, since in stuck]
        posted = self.outbox.post_all(found, once_while_open=True)
        # Told again at every restoration: each is trouble of its own.
        restorations = self.outbox.state.restorations()
        posted += self.outbox.post_all(_restored(restorations, now))
        self._told_runs |= {one.run_id: None for one in failed}
        while len(self._told_runs) > _REMEMBERED:
            del self._told_runs[next(iter(self._told_runs))]

        opened = self.outbox.open_subjects()
        right = passed_again(evaluations) | run_alerts.going_on(opened.values(), times.keys())
        right |= run_alerts.right_again(dagster, opened.values(), self._history)
        right |= self.ticks.ticking_again(opened.keys(), now=now)
        if not queued and not waits:
            # Where nothing is started on purpose, what stood before has not come right.
            right[run_alerts.QUEUE] = "Runs are started again, or none waits."
        right |= {
            subject: "Nothing more was found since: look at the history if nobody has looked yet."
            for subject, alert in opened.items()
            if alert.lasts is not None and now - alert.at >= alert.lasts
        }
        over = self.outbox.recovered_all(right, at=now)
        said = f"{len(posted)} new, {len(over)} right again"
        return Cursor(evaluations=until, runs=runs, standing_since=standing_since, silent=times), said


def _restored(restorations: Sequence[StateRestoration], now: float) -> list[Alert]:
    """An alert of the last restoration of the control state, for a day: it says what may be missing."""
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


def new_evaluations(
    dagster: DagsterFacts, cursor: int | None, assets: Sequence[str]
) -> tuple[list[CheckEvaluation], int]:
    """The results since the last look, oldest first, some of them seen before, and where to go on.

    At the very first look (cursor None) of a long history: what stands failed now, not what once did. A
    history that was wiped or lost counts from 1 again: it is looked at as the first time.
    """
    newest = dagster.newest_evaluation()
    if cursor is None or newest < cursor:
        found, until = dagster.evaluations_since(0, limit=_RESULTS_AT_ONCE)
        if until >= newest:
            return found, until
        history = PartitionHistory(assets)
        history.look(dagster)
        return [one for asset in assets for of in history.failing(asset).values() for one in of], newest
    found, until = dagster.evaluations_since(cursor, look_back=_EVENTS_READ_AGAIN, limit=_RESULTS_AT_ONCE)
    before = cursor
    while until > before:
        # All of a storm in one tick, so that it is one message.
        before = until
        more, until = dagster.evaluations_since(before, limit=_RESULTS_AT_ONCE)
        found += more
    return found, until


def subject_of(one: CheckEvaluation) -> str:
    """What a result is about: the same check of the same partition, whatever run gave it."""
    return "/".join(part for part in (one.asset, one.partition, one.check) if part)


def alert_of(one: CheckEvaluation) -> Alert | None:
    """What a person is told of a result; nothing of one that passed."""
    if one.passed:
        return None
    of = f"{one.asset} {one.partition}" if one.partition else one.asset
    stops = one.severity == "ERROR"
    return Alert(
        kind=CHECK_FAILED if stops else CHECK_WARNED,
        subject=subject_of(one),
        # Not the row's number: a database begun anew counts from 1 again.
        occurrence=one.run_id or one.metadata.get(FOUND_AT) or f"{one.at:.3f}",
        severity="error" if stops else "warning",
        title=f"{one.check} {'failed' if stops else 'warns'}: {of}",
        partition=one.partition,
        expected=one.metadata.get(_EXPECTED),
        found=one.metadata.get(_FOUND) or one.description or None,
        next_step=one.metadata.get(_WHAT_TO_DO) or "Open the page below: the check says what it found.",
        page=f"runs/{one.run_id}"
        if one.run_id
        else f"assets/{one.asset}?view=checks&checkDetail={one.check}",
        at=one.at,
    )


def passed_again(evaluations: Iterable[CheckEvaluation]) -> dict[str, str]:
    """Sentences, by subject, of what passed at its latest result among these."""
    latest = {subject_of(one): one for one in sorted(evaluations, key=lambda one: one.storage_id)}
    return {
        subject: f"{one.check} passed. {one.description}".strip()
        for subject, one in latest.items()
        if one.passed
    }


def build_alerts_sensor(
    scan: AlertScan,
    delivery: Delivery,
    *,
    address: Callable[[], str | None],
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """The sensor. address: of the pages, as a person reaches them."""
    failures, unrecorded_at = 0, float("-inf")

    def noted(error: OSError | None, now: float) -> None:
        """Where nothing can be written down, this alone is sent without: once an hour, while it lasts."""
        nonlocal failures, unrecorded_at
        failures = 0 if error is None else failures + 1
        # A database that is busy for once is not told.
        if failures > 1 and abs(now - unrecorded_at) > _UNRECORDED_AGAIN_SECONDS:
            unrecorded_at = now
            title = "Alerts cannot be written down"
            body = f"{error}\nUntil then nothing else is told. Look: `vlm-assets status`."
            delivery.send_at_once(Message("unwritten", title, body, "failure"), seconds=DELIVERY_SECONDS)

    def decide(at: Situation) -> Decided:
        try:
            cursor, said = scan.scan(at.dagster, at.remembered(Cursor), now=at.now)
            delivered = delivery.deliver(now=at.now, seconds=DELIVERY_SECONDS, address=address())
        except OSError as error:
            noted(error, at.now)
            raise
        told = delivered.sentence if delivered is not None else "another process is delivering."
        return Decided(f"{said}; {told}", json.dumps(asdict(cursor)))

    return build_sensor(
        NAME,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Tells a person of failing checks, failed runs and silent sensors, and delivers what the other"
            " sensors have posted: to the targets in VLM_ASSETS_ALERT_TARGETS."
        ),
        ticks=scan.ticks,
        noted=noted,
        clock=clock,
    )
