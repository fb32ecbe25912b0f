"""The schedule and the button of the re-materialization: two ways to the same tick.

What lives here: the schedule, the job that a person launches (the button), and the sensor that answers it.
What does not: which runs are launched (``failed_partitions.py``). The button's run launches nothing itself:
only schedules and sensors can do that through Dagster's public calls.
"""

# No postponed annotations here: Dagster reads the parameters of schedules and ops from their real ones.

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import GOES_ON_WITH, LAUNCHED_BY, RETRY
from sensors.failed_partitions import FailedPartitions, Launch, sentences
from sensors.retry_ledger import AskedLook, ask_for_look, asked_look, look_answered
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks

SCHEDULE = "failed_partitions_again"
BUTTON = "failed_partitions_now"
ANSWER = "failed_partitions_asked"
"""The sensor that looks when a person has pressed the button."""
ANSWER_SECONDS = 5
JOB = "failed_partitions"
WHY = "vlm-assets/why"
"""Run tag: why a run of ours was launched."""

_TAG_LENGTH = 250


class FailedPartitionsNow(dg.Config):
    """at_once: wait for no back-off, and try again what was given up. What a person cancelled stays so."""

    at_once: bool = False


@dataclass(frozen=True)
class Retrying:
    """What the definitions take. jobs: that of the launched runs, and the button."""

    jobs: tuple[Any, ...]
    schedule: dg.ScheduleDefinition
    sensor: dg.SensorDefinition


RunConfigOf = Callable[[Sequence[str], Mapping[str, Any]], tuple[Mapping[str, Any], bool]]
"""The run config of a run over these assets that comes after one with that run config, and whether it goes on
with what a person had asked of that one: as a retry of it, under its root run."""


def request(dagster: DagsterFacts, launch: Launch, run_config: RunConfigOf) -> dg.RunRequest:
    """The run of a launch. What a person asked of the run before it is asked of this one too."""
    before = dagster.run_config(launch.after) if launch.after is not None else None
    config, goes_on = run_config(launch.assets, before[0] if before is not None else {})
    tags = {LAUNCHED_BY: RETRY, WHY: launch.why[:_TAG_LENGTH]}
    if goes_on and before is not None and launch.after is not None:
        tags |= {"dagster/root_run_id": before[1], "dagster/parent_run_id": launch.after}
        tags |= {GOES_ON_WITH: launch.after}
    return dg.RunRequest(
        run_key=launch.run_key,
        partition_key=launch.key,
        asset_selection=[dg.AssetKey(asset) for asset in launch.assets],
        run_config=dict(config),
        tags=tags,
    )


def answer(failed_partitions: FailedPartitions, run_config: RunConfigOf, at: Situation) -> Decided:
    """Look, where a person asked for it and was not answered yet."""
    asked = asked_look(failed_partitions.state)
    if asked is None:
        return Decided("Nobody has asked for a look.")
    # A tick that is killed is repeated under the same name, and launches the same runs.
    ticked = failed_partitions.tick(at.dagster, tick=asked.run_id, now=at.now, at_once=asked.at_once)
    requests = [request(at.dagster, launch, run_config) for launch in ticked.launches]
    if not ticked.is_void:
        look_answered(failed_partitions.state, asked)
    return Decided(ticked.sentence, requests=requests, logged=[ticked.sentence, *sentences(ticked.launches)])


def build_retrying(
    failed_partitions: FailedPartitions,
    *,
    every_minutes: int,
    run_config: RunConfigOf,
    ticks: Ticks,
) -> Retrying:
    """Schedule and button over the watched assets."""
    watched = failed_partitions.watched.assets
    again = dg.define_asset_job(
        JOB,
        selection=dg.AssetSelection.assets(*watched),
        description="One partition, materialized again. Launched by the schedule and the button beside it.",
    )

    @dg.schedule(
        name=SCHEDULE,
        cron_schedule=f"*/{every_minutes} * * * *" if every_minutes < 60 else "0 * * * *",
        job=again,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=(
            "Materializes partitions again that failed, were interrupted, have a failed check, or whose file"
            " is not what was published. Backs off, and gives up where nothing gets on."
        ),
    )
    def failed_partitions_again(context: dg.ScheduleEvaluationContext):  # type: ignore[no-untyped-def]
        at = context.scheduled_execution_time
        dagster = DagsterFacts(context.instance)
        ticked = failed_partitions.tick(dagster, tick=at.isoformat(), now=time.time())
        if ticked.launches:
            context.log.info(ticked.sentence)
        for sentence in sentences(ticked.launches):
            context.log.info(sentence)
        requests = [request(dagster, launch, run_config) for launch in ticked.launches]
        ticks.note(
            SCHEDULE,
            at.timestamp(),
            interval_seconds=every_minutes * 60.0,
            log=lambda: context.log,
        )
        return requests or dg.SkipReason(ticked.sentence)

    failed_partitions_asked = build_sensor(
        ANSWER,
        lambda at: answer(failed_partitions, run_config, at),
        interval_seconds=ANSWER_SECONDS,
        description=f"Looks for partitions to materialize again when a person has launched {BUTTON}.",
        ticks=ticks,
        job=again,
    )

    @dg.op
    def ask_for_a_look(context: dg.OpExecutionContext, config: FailedPartitionsNow) -> None:
        ask_for_look(failed_partitions.state, AskedLook(context.run.run_id, config.at_once))
        context.log.info(f"Asked: the sensor {ANSWER} looks within seconds and says what it launches.")

    @dg.job(
        name=BUTTON,
        description=(
            "Asks for a look at once, as the schedule takes one every few minutes. With `at_once: true` it"
            " waits for no back-off and tries again what was given up."
        ),
        executor_def=dg.in_process_executor,
    )
    def failed_partitions_now() -> None:
        ask_for_a_look()

    return Retrying((again, failed_partitions_now), failed_partitions_again, failed_partitions_asked)
