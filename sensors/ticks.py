"""When each sensor and schedule last ticked, and which of them, or the whole daemon, has gone silent.

A sensor that crashes cannot say so itself. The alerts sensor watches the others. ``vlm-assets alerts
deliver``, run by the machine's own timer, watches the daemon and the alerts sensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from resources.alerts.alert import Alert
from resources.dagster_names import UNPREFIXED, DagsterNames
from vlm_durable.commands import command, name_home
from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import ticks as _table

SILENT, DAEMON_SILENT = "sensor_silent", "daemon_silent"

ALERTS, ALERTS_SECONDS = "alerts", 20
"""Name and interval of the sensor that watches the others: it is watched from outside Dagster."""

LONGEST_SILENCE_SECONDS = 300.0
"""A sensor is silent after this long without a tick, or after five of its intervals if that is longer."""

_DAEMON = "daemon"
_INTERVALS = 5.0


@dataclass(frozen=True)
class Tick:
    """The last completed tick of one sensor or schedule.

    at: unix seconds. interval_seconds: between two ticks. since: from when it has ticked without a gap of
    LONGEST_SILENCE_SECONDS.
    """

    name: str
    at: float
    interval_seconds: float
    since: float


class Ticks:
    """The ticks of one home. They may be lost: a sensor that ticks notes it again.

    names: under which Dagster knows the sensors and schedules, and their assets.
    """

    def __init__(self, state: ControlState, names: DagsterNames = UNPREFIXED) -> None:
        self._state = state
        self.names = names

    def name_home(self) -> None:
        """Have the commands that a tick suggests name its home, where Dagster has several."""
        if self.names.prefix:
            name_home(self._state.directory.parent)

    def record(self, name: str, now: float, *, interval_seconds: float = 60.0) -> None:
        """Note that ``name`` has ticked, after its work; without fsync. Raises ControlStateError.

        interval_seconds: how often it means to tick; silence is judged by it.
        """

        def write(connection: sa.Connection) -> None:
            is_this = _table.c.name == name
            before = connection.execute(sa.select(_table).where(is_this)).first()
            # A tick that lies ahead was noted before the clock was put back.
            has_gap = before is None or abs(now - before.at) > LONGEST_SILENCE_SECONDS
            since = now if before is None or has_gap else before.since
            row = asdict(Tick(name, now, interval_seconds, since))
            change = _table.insert() if before is None else _table.update().where(is_this)
            connection.execute(change.values(row))

        self._state.beat(write)

    def note(
        self, name: str, now: float, *, interval_seconds: float, log: Callable[[], logging.Logger]
    ) -> OSError | None:
        """``record`` as the last act of a tick: an error is logged and returned, and undoes nothing.

        A tick that fails earlier is not noted, so that a sensor that fails each time counts as silent. log:
        gives the tick's log, and is called only to log something: Dagster opens a file for it, and removes
        none.
        """
        try:
            self.record(name, now, interval_seconds=interval_seconds)
        except OSError as error:
            log().warning(f"The tick could not be noted, so {name} will seem silent: {error}")
            return error
        return None

    def last(self) -> dict[str, Tick]:
        """The last tick of everything that ever ticked here, by name. Raises ControlStateError."""
        query = sa.select(_table).order_by(_table.c.name)
        rows = self._state.read_beats(lambda connection: connection.execute(query).all())
        return {row.name: Tick(*row) for row in rows}

    def silent_sensors(self, watched: Mapping[str, float], *, since: float, now: float) -> Iterator[Alert]:
        """Alerts of sensors that do not tick. watched: their names and intervals in seconds.

        since: from when a sensor was expected to tick that never did, or only before the clock was put back.
        All times in unix seconds.
        """
        ticks = self.last()
        for name, interval in watched.items():
            tick = ticks.get(name)
            is_ahead = tick is not None and tick.at > now + LONGEST_SILENCE_SECONDS
            last = since if tick is None or is_ahead else max(tick.at, since)
            if now - last <= _longest_silence(interval):
                continue
            yield Alert(
                kind=SILENT,
                subject=_subject(name),
                occurrence=str(tick.at if tick else since),
                severity="error",
                title=f"{name} has gone silent",
                expected=f"a tick every {interval:.0f} s",
                actual=f"no tick since {_clock(tick.at)}" if tick else "no tick ever",
                next_step=(
                    f"Open Automation > {self.names.name(name)}: its last ticks show an error, or it was"
                    " switched off there. Switch it on; after an error, reload the definitions; restart"
                    " Dagster if it stays silent."
                ),
                page="automation",
                at=now,
            )

    def ticking_again(self, open_subjects: Collection[str], *, now: float) -> dict[str, str]:
        """A sentence for each sensor that was silent and ticks again, and for the daemon, by subject.

        A sensor calls this, so the daemon ticks.
        """
        sentences = {_DAEMON: "The daemon ticks."} if _DAEMON in open_subjects else {}
        for tick in self.last().values():
            if _subject(tick.name) in open_subjects and abs(now - tick.at) <= _longest_silence(
                tick.interval_seconds
            ):
                sentences[_subject(tick.name)] = f"It ticked at {_clock(tick.at)}."
        return sentences

    def silence(self, *, now: float) -> Alert | None:
        """An alert if the daemon is silent, or the alerts sensor, which no other sensor watches."""
        return self._silent_daemon(now) or self._silent_alerts(now)

    def _silent_daemon(self, now: float) -> Alert | None:
        """An alert if nothing at all has ticked for long; None if something has, or if nothing ever did."""
        ticks = self.last().values()
        # Ticks that lie ahead were noted before the clock was put back: a daemon that lives has ticked since.
        if not ticks or any(abs(now - tick.at) <= LONGEST_SILENCE_SECONDS for tick in ticks):
            return None
        last = max(tick.at for tick in ticks)
        return Alert(
            kind=DAEMON_SILENT,
            subject=_DAEMON,
            occurrence=str(last),
            severity="error",
            title="Dagster's daemon has gone silent",
            expected="a tick of some sensor every 30 s",
            actual=f"no tick of any since {_clock(last)}",
            next_step=(
                "Is the machine short of memory or disk? Do the definitions load (Deployment in the UI)?"
                f" Start Dagster again ({command('serve')}, or its systemd units): everything goes on from"
                " where it was. If you stopped it on purpose, there is nothing to do."
            ),
            page="deployment/daemons",
            at=now,
        )

    def _silent_alerts(self, now: float) -> Alert | None:
        others = [tick for tick in self.last().values() if tick.name != ALERTS]
        ticking_since = [tick.since for tick in others if abs(now - tick.at) <= LONGEST_SILENCE_SECONDS]
        if not ticking_since:
            return None
        # The daemon runs since then. Just started, it had no time for the alerts sensor yet.
        return next(self.silent_sensors({ALERTS: ALERTS_SECONDS}, since=min(ticking_since), now=now), None)


def _longest_silence(interval_seconds: float) -> float:
    """Seconds that a sensor with this interval may go without a tick before it counts as silent."""
    return max(_INTERVALS * interval_seconds, LONGEST_SILENCE_SECONDS)


def _subject(name: str) -> str:
    return f"sensor/{name}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
