"""When the data set is audited by itself: once a day, and again after files changed that were found wrong.

An audit that finds nothing wrong closes the alert of the audit before it, so a repair closes it by itself.
"""

# No postponed annotations here: Dagster reads a sensor's parameters from its real ones.

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import dagster as dg

from sensors.ticks import note_tick

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
    def from_cursor(cls, cursor: str | None) -> "SeenFiles":
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


def last_audit(instance: dg.DagsterInstance, asset: str) -> LastAudit | None:
    """The latest audit that Dagster knows."""
    entry = instance.get_latest_materialization_event(dg.AssetKey(asset))
    if entry is None or entry.asset_materialization is None:
        return None
    problems = entry.asset_materialization.metadata.get("problems")
    return LastAudit(entry.timestamp, int(str(problems.value)) if problems is not None else 0)


def build_dataset_audit_sensor(
    target: dg.AssetsDefinition,
    *,
    signature: Callable[[], str],
    works: Callable[[], bool],
    paused: Callable[[], str | None],
    ticks: Path,
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """The sensor. target: the audit. signature: changes with every published file; empty: there is none.

    works: whether a partition is worked on now. paused: the sentence of a pause. ticks: the folder where each
    sensor notes that it ticked.
    """

    @dg.sensor(
        name=NAME,
        target=target,
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Audits the data set once a day, and again when files changed after an audit that found a fault,"
            " so that the alert of a fault closes by itself."
        ),
    )
    def dataset_audit_due(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        now = clock()
        result = look(context.instance, SeenFiles.from_cursor(context.cursor), now)
        note_tick(ticks, NAME, now, interval_seconds=INTERVAL_SECONDS, log=lambda: context.log)
        return result

    def look(instance: dg.DagsterInstance, files: SeenFiles, now: float) -> dg.SensorResult:
        pause = paused()
        if pause:
            return dg.SensorResult(skip_reason=f"Nothing is started: {pause}.")
        (target_key,) = target.keys
        last = last_audit(instance, target_key.to_user_string())
        if last is not None and not last.problems and now - last.at < DAY_SECONDS:
            # The usual tick looks at no file.
            return dg.SensorResult(skip_reason="The last audit found nothing wrong.")
        found = signature()
        why = why_due(last, files, found, works=works(), now=now)
        if why is None:
            cursor = json.dumps(asdict(SeenFiles(files.audited, found)))
            return dg.SensorResult(skip_reason="No audit is due.", cursor=cursor)
        # One run for each cause: a tick that is killed before its cursor is kept asks with the same key.
        run_key = f"{last.at if last else 0:.0f} {int(now // DAY_SECONDS)} {found}"
        cursor = json.dumps(asdict(SeenFiles(found, found)))
        request = dg.RunRequest(run_key=run_key, tags={"vlm-assets/why": why})
        return dg.SensorResult(run_requests=[request], cursor=cursor)

    return dataset_audit_due
