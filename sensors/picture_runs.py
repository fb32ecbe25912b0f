"""Runs that drew a picture which a later one replaced: forgotten, so that a month of them costs no disk.

What lives here: which of them go. What does not: deleting one (``dagster_internals/run_files.py``), and when
a picture is drawn (``progress_picture.py``).
"""

from __future__ import annotations

from datetime import UTC, datetime

import dagster as dg

from sensors.dagster_internals.run_files import forget_run
from sensors.dagster_internals.runs import FINISHED

KEPT_SECONDS = 24 * 3600.0
MOST_A_TICK = 10

_SENSOR = "dagster/sensor_name"


def forget_old_pictures(instance: dg.DagsterInstance, sensor: str, *, now: float) -> int:
    """Forget finished runs of this sensor that are older than a day; returns how many, a few at a time.

    The last good one of each day stays, for the plots over time, and so the asset's latest materialization
    does. What a person launched is left alone.
    """
    old = dg.RunsFilter(
        tags={_SENSOR: sensor},
        statuses=list(FINISHED),
        created_before=datetime.fromtimestamp(now - KEPT_SECONDS, UTC),
    )
    records = instance.get_run_records(old, ascending=True)
    last_of_day = {
        record.create_timestamp.date(): record.dagster_run.run_id
        for record in records
        if record.dagster_run.status is dg.DagsterRunStatus.SUCCESS
    }
    kept = set(last_of_day.values())
    # Never the newest: without its events the next ones would be given their numbers again, unseen by those
    # who read on from the highest.
    gone = [one for one in (record.dagster_run.run_id for record in records[:-1]) if one not in kept]
    for run_id in gone[:MOST_A_TICK]:
        forget_run(instance, run_id)
    return len(gone[:MOST_A_TICK])
