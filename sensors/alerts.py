"""The alerts sensor: every half minute it looks for what a person must know, and tells them.

What lives here: the order of a tick, and what is remembered between two. What does not: what counts as
trouble (``check_alerts.py``, ``run_alerts.py``, ``silent_sensors.py``; the other sensors post their own), and
how it reaches people (``resources/alerts``). A tick that dies anywhere is repeated: ids make that harmless.
"""

# No postponed annotations here: Dagster reads a sensor's parameters from its real ones.

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import dagster as dg

from resources.alerts.alert import Alert
from resources.alerts.delivery import Delivered, Delivery
from resources.alerts.messages import alerts_cannot_be_written
from resources.alerts.outbox import Outbox
from sensors import check_alerts, run_alerts
from sensors.dagster_internals.events import Evaluation
from sensors.left_out_alerts import NONE_LEFT
from sensors.partition_history import PartitionHistory
from sensors.silent_sensors import ALERTS, ALERTS_SECONDS, silent_sensors, ticking_again
from sensors.ticks import record_tick

NAME, INTERVAL_SECONDS = ALERTS, ALERTS_SECONDS
DELIVERY_SECONDS = 20.0
"""Of a tick, after which a target that hangs is left for the next one. Dagster gives a tick 60."""

_CRY_AGAIN_SECONDS = 3600.0
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

    @classmethod
    def read(cls, text: str | None) -> "Cursor":
        """A cursor as Dagster kept it; another version's counts as none."""
        try:
            return cls(**json.loads(text or "{}"))
        except (ValueError, TypeError):
            return cls()

    def text(self) -> str:
        """What Dagster keeps."""
        return json.dumps(asdict(self))


class Lookout:
    """Looks for trouble and recoveries, and posts them. assets: the partitioned ones.

    watched: the other sensors and schedules and their intervals in seconds. ticks: HOME/.state/ticks.
    paused: whether a person has everything stand still, which is then no trouble. working: the runs that have
    a heartbeat; silence: seconds that one may be under way without.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        assets: Sequence[str],
        watched: Mapping[str, float],
        ticks: Path,
        paused: Callable[[], bool],
        working: Callable[[], Collection[str]],
        silence: float,
    ) -> None:
        self.outbox = outbox
        self._assets = tuple(assets)
        self._watched = watched
        self._ticks = ticks
        self._paused = paused
        self._working = working
        self._silence = silence
        self._history = PartitionHistory(assets)
        self._since: float | None = None
        # In memory, to save work; after a restart the outbox knows them.
        self._posted_runs: dict[str, None] = {}
        self._refused_runs: dict[str, None] = {}

    def look(self, instance: dg.DagsterInstance, cursor: Cursor, *, now: float) -> tuple[Cursor, str]:
        """Post what is new; returns where to go on, and a sentence. Raises AlertLogError."""
        if self._since is None:
            self._since = now
        # Runs before checks: the checks that a failed run failed for are then among those read.
        failed, runs = run_alerts.failed_runs(instance, cursor.runs, now=now)
        evaluations, until = check_alerts.new_evaluations(instance, cursor.evaluations, self._assets)
        of_checks = [alert for one in evaluations if (alert := check_alerts.alert_of(one)) is not None]
        self._refused_runs |= {one.run_id: None for one in evaluations if one.stops and one.run_id}
        new = [one for one in failed if one.run_id not in self._posted_runs]
        if new:
            refused = self._refused_runs.keys() | self._refused_before()
            told = [one for one in new if one.run_id not in refused]
            of_runs = list(run_alerts.alerts_of(instance, told, self._history))
        else:
            of_runs = []
        sensors = list(silent_sensors(self._ticks, self._watched, since=self._since, now=now))
        paused = self._paused()
        # Told already why nothing is started: the queue waits on purpose.
        waits = paused or NONE_LEFT in self.outbox.open_subjects()
        standing_since, standstill = (None, []) if waits else self._queue(instance, cursor, now)
        # Looked at after the heartbeats: one that begins in between is silent for one look.
        working = self._working()
        silent = [] if paused else run_alerts.silent_runs(instance, working, cursor.silent, now=now)
        times = {one.run_id: one.since for one in silent}
        stuck = [run_alerts.run_stuck(one, now=now) for one in silent if now - one.since > self._silence]
        found = [*of_checks, *of_runs, *sensors, *standstill, *stuck]
        posted = self.outbox.post_all(found, once_while_open=True)
        self._posted_runs |= {one.run_id: None for one in new}
        # Where nothing is started on purpose, what stood before has not come right.
        queue_moves = standing_since is None and not waits
        right = self._recovered(instance, evaluations, times.keys(), now, queue_moves=queue_moves)
        _forget_oldest(self._posted_runs)
        _forget_oldest(self._refused_runs)
        said = f"{len(posted)} new, {right} right again"
        return Cursor(evaluations=until, runs=runs, standing_since=standing_since, silent=times), said

    def _queue(
        self, instance: dg.DagsterInstance, cursor: Cursor, now: float
    ) -> tuple[float | None, list[Alert]]:
        queued = run_alerts.queued_while_nothing_runs(instance)
        if not queued:
            return None, []
        since = now if cursor.standing_since is None else cursor.standing_since
        alert = run_alerts.queue_stands(queued, since=since, now=now)
        return since, [] if alert is None else [alert]

    def _recovered(
        self,
        instance: dg.DagsterInstance,
        evaluations: Sequence[Evaluation],
        silent: Collection[str],
        now: float,
        *,
        queue_moves: bool,
    ) -> int:
        open_alerts = self.outbox.open_subjects()
        if not open_alerts:
            return 0
        seen = [one for one in check_alerts.passed_again(evaluations) if one[0] in open_alerts]
        seen += run_alerts.going_on(open_alerts.values(), silent)
        seen += run_alerts.right_again(instance, open_alerts.values(), self._history)
        if queue_moves and run_alerts.QUEUE in open_alerts:
            seen.append((run_alerts.QUEUE, str(now), "Runs are started again, or none waits."))
        seen += ticking_again(self._ticks, open_alerts.keys(), now=now)
        return len(self.outbox.recovered_all(seen, at=now))

    def _refused_before(self) -> set[str]:
        """Runs whose failed check was posted before this process began."""
        return {
            alert.occurrence
            for alert in self.outbox.open_subjects().values()
            if alert.kind == check_alerts.FAILED
        }


def _forget_oldest(known: dict[str, None]) -> None:
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]


def build_alerts_sensor(
    delivery: Delivery,
    *,
    assets: Sequence[str],
    watched: Mapping[str, float],
    ticks: Path,
    paused: Callable[[], bool],
    working: Callable[[], Collection[str]],
    silence: float,
    address: Callable[[], str | None],
) -> dg.SensorDefinition:
    """The sensor. address: of the pages, as a person reaches them. The rest as in ``Lookout``."""
    lookout = Lookout(
        delivery.outbox,
        assets=assets,
        watched=watched,
        ticks=ticks,
        paused=paused,
        working=working,
        silence=silence,
    )
    cried_at: list[float] = []

    def cry(error: OSError, now: float) -> None:
        # Nothing can be written down, so this alone is sent without: once an hour, while the trouble lasts.
        if not cried_at or now - cried_at[-1] > _CRY_AGAIN_SECONDS:
            cried_at[:] = [now]
            delivery.send_at_once(alerts_cannot_be_written(str(error)), seconds=DELIVERY_SECONDS)

    @dg.sensor(
        name=NAME,
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Tells a person of failing checks, failed runs and silent sensors, and delivers what the other"
            " sensors have posted: to the targets in VLM_ASSETS_ALERT_TARGETS and to alerts.jsonl."
        ),
    )
    def alerts(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        now = time.time()
        try:
            cursor, said = lookout.look(context.instance, Cursor.read(context.cursor), now=now)
            context.update_cursor(cursor.text())
            delivered = delivery.deliver(now=now, seconds=DELIVERY_SECONDS, address=address())
        except OSError as error:
            cry(error, now)
            raise
        try:
            record_tick(ticks, NAME, time.time(), interval_seconds=INTERVAL_SECONDS)
        except OSError as error:
            # Raised, it would undo the cursor of a tick that has told.
            context.log.warning(f"The tick could not be noted: {error}")
            cry(error, now)
        # Not to context.log too: Dagster keeps a file for each tick that has one, and removes none.
        return dg.SkipReason(f"{said}; {_sentence(delivered)}")

    return alerts


def _sentence(delivered: Delivered | None) -> str:
    if delivered is None:
        return "another process is delivering."
    told = f"{delivered.told} messages delivered, {delivered.waiting} alerts waiting."
    return " ".join((told, *delivered.troubles))
