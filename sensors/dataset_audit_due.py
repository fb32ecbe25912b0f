"""When the data set is audited by itself: once a day, and again after files changed that were found wrong.

An audit that finds nothing wrong closes the alert of the audit before it, so a repair closes it by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import dagster as dg

from sensors.dagster_facts import DagsterFacts
from sensors.sensor_definition import Decided, Look, build_sensor
from sensors.ticks import Ticks

NAME = "dataset_audit_due"
INTERVAL_SECONDS = 60
DAY_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class LastAudit:
    """The latest audit: when it ended (unix seconds) and how many faults it found."""

    at: float
    problems: int


@dataclass(frozen=True)
class SeenFiles:
    """Signatures of the published files: when an audit was last requested, and at the last tick."""

    audited: str = ""
    seen: str = ""

    @classmethod
    def from_cursor(cls, cursor: str | None) -> SeenFiles:
        """What the last tick wrote; nothing if there is none, or another version wrote it."""
        try:
            return cls(**json.loads(cursor)) if cursor else cls()
        except (ValueError, TypeError):
            return cls()


def why_due(
    last: LastAudit | None, files: SeenFiles, signature: str, *, works: bool, now: float
) -> str | None:
    """Why an audit is due now; None if it is not. signature: of the files now; empty: there are none."""
    if not signature:
        return None
    if last is None:
        return None if works else "The data set was never audited."
    if now - last.at >= DAY_SECONDS:
        return "The last audit is a day old."
    # A repair writes many files: the audit waits until they stand still for one tick.
    is_settled = not works and signature == files.seen
    if last.problems and is_settled and signature != files.audited:
        return f"The last audit found {last.problems} faults, and files have changed since."
    return None


def last_audit(dagster: DagsterFacts, asset: str) -> LastAudit | None:
    """The latest audit that Dagster knows."""
    known = dagster.latest_materialization(asset)
    return None if known is None else LastAudit(known[0], int(known[1].get("problems", 0)))


def build_dataset_audit_sensor(
    target: dg.AssetsDefinition,
    *,
    signature: Callable[[], str],
    works: Callable[[], bool],
    paused: Callable[[], str | None],
    ticks: Ticks,
) -> dg.SensorDefinition:
    """The sensor. target: the audit. signature: changes with every published file; empty: there is none.

    works: whether a partition is worked on now. paused: the sentence of a pause. ticks: where each sensor
    notes that it ticked.
    """

    (asset,) = target.keys

    def decide(look: Look) -> Decided:
        pause, now = paused(), look.now
        if pause:
            return Decided(f"Nothing is started: {pause}.")
        last, files = last_audit(look.dagster, asset.to_user_string()), SeenFiles.from_cursor(look.cursor)
        if last is not None and not last.problems and now - last.at < DAY_SECONDS:
            # The usual tick looks at no file.
            return Decided("The last audit found nothing wrong.")
        found = signature()
        why = why_due(last, files, found, works=works(), now=now)
        if why is None:
            return Decided("No audit is due.", json.dumps(asdict(SeenFiles(files.audited, found))))
        # One run for each cause: a tick that is killed before its cursor is kept asks with the same key.
        run_key = f"{last.at if last else 0:.0f} {int(now // DAY_SECONDS)} {found}"
        request = dg.RunRequest(run_key=run_key, tags={"vlm-assets/why": why})
        return Decided(why, json.dumps(asdict(SeenFiles(found, found))), requests=[request])

    return build_sensor(
        NAME,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Audits the data set once a day, and again when files changed after an audit that found a fault,"
            " so that the alert of a fault closes by itself."
        ),
        ticks=ticks,
        target=target,
    )
