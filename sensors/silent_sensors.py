"""Sensors, schedules and a whole daemon that have gone silent: nothing that crashes says so itself.

What lives here: judging silence by the ticks on disk (``ticks.py``). What does not: who looks: the alerts
sensor looks at the others, and ``vlm-assets alerts deliver``, run by the machine's own timer, at the daemon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from resources.alerts.alert import Alert
from sensors.ticks import LONGEST_SILENCE_SECONDS, last_ticks, longest_silence

SILENT, DAEMON_SILENT = "sensor_silent", "daemon_silent"

ALERTS, ALERTS_SECONDS = "alerts", 20
"""Name and interval of the sensor that looks at the others: it is looked at from outside Dagster."""

_DAEMON = "daemon"


def silent_sensors(
    directory: Path, watched: Mapping[str, float], *, since: float, now: float
) -> Iterator[Alert]:
    """Alerts of those that do not tick. watched: names and their intervals in seconds.

    since: from when they were expected to tick, where one never did. All times in unix seconds.
    """
    ticks = last_ticks(directory)
    for name, interval in watched.items():
        tick = ticks.get(name)
        last = max(tick.at, since) if tick else since
        if now - last <= longest_silence(interval):
            continue
        yield Alert(
            kind=SILENT,
            subject=_subject(name),
            occurrence=str(tick.at if tick else since),
            severity="error",
            title=f"{name} has gone silent",
            expected=f"a tick every {interval:.0f} s",
            found=f"no tick since {_clock(tick.at)}" if tick else "no tick ever",
            next_step=(
                f"Open Automation > {name}: its last ticks show an error, or it was switched off there."
                " Switch it on; after an error, reload the definitions; restart Dagster if it stays silent."
            ),
            page="automation",
            at=now,
        )


def ticking_again(
    directory: Path, open_subjects: Collection[str], *, now: float
) -> list[tuple[str, str, str]]:
    """(subject, occurrence, sentence) of what was silent and ticks; who asks is ticking, so the daemon is."""
    found = []
    if _DAEMON in open_subjects:
        found.append((_DAEMON, str(now), "The daemon ticks."))
    for tick in last_ticks(directory).values():
        if _subject(tick.name) in open_subjects and not tick.is_quiet(now):
            found.append((_subject(tick.name), str(tick.at), f"It ticked at {_clock(tick.at)}."))
    return found


def silent_daemon(directory: Path, *, now: float) -> Alert | None:
    """An alert where nothing at all has ticked for long; None where something did, or nothing ever did."""
    ticks = last_ticks(directory).values()
    if not ticks:
        return None
    last = max(tick.at for tick in ticks)
    if now - last <= LONGEST_SILENCE_SECONDS:
        return None
    return Alert(
        kind=DAEMON_SILENT,
        subject=_DAEMON,
        occurrence=str(last),
        severity="error",
        title="Dagster's daemon has gone silent",
        expected="a tick of some sensor every 30 s",
        found=f"no tick of any since {_clock(last)}",
        next_step=(
            "Is the machine short of memory or disk? Do the definitions load (Deployment in the UI)? Start"
            " Dagster again (`make run`, or its systemd units): everything goes on from where it was. If you"
            " stopped it on purpose, there is nothing to do."
        ),
        page="deployment/daemons",
        at=now,
    )


def silent_alerts(directory: Path, *, now: float) -> Alert | None:
    """An alert where others tick and the alerts sensor, which nobody inside Dagster looks at, does not."""
    others = [tick for tick in last_ticks(directory).values() if tick.name != ALERTS]
    ticking = [tick.since for tick in others if now - tick.at <= LONGEST_SILENCE_SECONDS]
    if not ticking:
        return None
    # From when the daemon runs: just started, it had no time for this one yet.
    found = silent_sensors(directory, {ALERTS: ALERTS_SECONDS}, since=min(ticking), now=now)
    return next(found, None)


def _subject(name: str) -> str:
    return f"sensor/{name}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
