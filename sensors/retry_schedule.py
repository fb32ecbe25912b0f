"""The schedule and the button of the re-materialization: two ways to the same tick.

The button is a job that a person launches, and a sensor answers it. The button's run launches nothing itself:
through Dagster's public calls only schedules and sensors can.
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
from sensors.retry_ledger import TickRequest, forget_request, pending_request, request_tick
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks

SCHEDULE = "failed_partitions_again"
BUTTON = "failed_partitions_now"
ANSWER = "failed_partitions_asked"
"""The sensor that ticks when a person has pressed the button."""
ANSWER_SECONDS = 5
JOB = "failed_partitions"
WHY = "vlm-assets/why"
"""Run tag: why a run of ours was launched."""

_TAG_LENGTH = 250


class FailedPartitionsNow(dg.Config):
    """at_once: wait for no back-off, and try given-up partitions again. Cancelled ones stay cancelled."""

    at_once: bool = False


@dataclass(frozen=True)
class Retrying:
    """The definitions of the re-materialization. jobs: the job of the launched runs, and the button."""

    jobs: tuple[Any, ...]
    schedule: dg.ScheduleDefinition
    sensor: dg.SensorDefinition


RunConfigOf = Callable[[str, Sequence[str], Mapping[str, Any]], tuple[Mapping[str, Any], bool]]
"""Makes the run config of a retry from its partition, its assets, and the run config of the run before.

Returns it, and whether the retry keeps what a person asked of that run: then it counts under its root run."""


def run_request(dagster: DagsterFacts, launch: Launch, run_config: RunConfigOf) -> dg.RunRequest:
    """The run of a launch. What a person asked of the run before counts for this run too."""
    before = dagster.run_config(launch.after) if launch.after is not None else None
    config_before, root_run_id = before if before is not None else ({}, None)
    config, goes_on = run_config(launch.key, launch.assets, config_before)
    tags = {LAUNCHED_BY: RETRY, WHY: launch.why[:_TAG_LENGTH]}
    if goes_on and root_run_id is not None and launch.after is not None:
        tags |= {"dagster/root_run_id": root_run_id, "dagster/parent_run_id": launch.after}
        tags |= {GOES_ON_WITH: launch.after}
    return dg.RunRequest(
        run_key=launch.run_key,
        partition_key=launch.key,
        asset_selection=[dagster.names.key(asset) for asset in launch.assets],
        run_config=dict(config),
        tags=tags,
    )


def answer_button(
    failed_partitions: FailedPartitions, run_config: RunConfigOf, situation: Situation
) -> Decided:
    """Tick if a person has pressed the button and no tick has answered yet."""
    request = pending_request(failed_partitions.state)
    if request is None:
        return Decided("Nobody has pressed the button.")
    # A tick that is killed is repeated under the same name, and launches the same runs.
    tick_result = failed_partitions.tick(
        situation.dagster, tick=request.run_id, now=situation.now, at_once=request.at_once
    )
    requests = [run_request(situation.dagster, launch, run_config) for launch in tick_result.launches]
    if tick_result.is_void:
        # Nothing for the log: it would be a file of its own every five seconds of a pause.
        return Decided(tick_result.sentence)
    forget_request(failed_partitions.state, request)
    log_lines = [tick_result.sentence, *sentences(tick_result.launches)]
    return Decided(tick_result.sentence, requests=requests, logged=log_lines)


def build_retrying(
    failed_partitions: FailedPartitions,
    *,
    every_minutes: int,
    run_config: RunConfigOf,
    ticks: Ticks,
) -> Retrying:
    """Schedule and button over the watched assets."""
    names = ticks.names
    watched = [names.key(asset) for asset in failed_partitions.watched.assets]
    job = dg.define_asset_job(
        names.name(JOB),
        selection=dg.AssetSelection.assets(*watched),
        description="One partition, materialized again. Launched by the schedule and the button beside it.",
    )

    @dg.schedule(
        name=names.name(SCHEDULE),
        cron_schedule=f"*/{every_minutes} * * * *" if every_minutes < 60 else "0 * * * *",
        job=job,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=(
            "Materializes partitions again that failed, were interrupted, have a failed check, or whose file"
            " is not what was published. Backs off, and gives up after attempts without progress."
        ),
    )
    def failed_partitions_again(context: dg.ScheduleEvaluationContext):  # type: ignore[no-untyped-def]
        ticks.name_home()
        scheduled_at = context.scheduled_execution_time
        dagster = DagsterFacts(context.instance, names)
        tick_result = failed_partitions.tick(dagster, tick=scheduled_at.isoformat(), now=time.time())
        if tick_result.launches:
            context.log.info(tick_result.sentence)
        for sentence in sentences(tick_result.launches):
            context.log.info(sentence)
        requests = [run_request(dagster, launch, run_config) for launch in tick_result.launches]
        ticks.note(
            SCHEDULE,
            scheduled_at.timestamp(),
            interval_seconds=every_minutes * 60.0,
            log=lambda: context.log,
        )
        return requests or dg.SkipReason(tick_result.sentence)

    failed_partitions_asked = build_sensor(
        ANSWER,
        lambda situation: answer_button(failed_partitions, run_config, situation),
        interval_seconds=ANSWER_SECONDS,
        description=(
            f"Looks for partitions to materialize again when a person has launched {names.name(BUTTON)}."
        ),
        ticks=ticks,
        job=job,
    )

    @dg.op(name=names.name("ask_for_a_look"))
    def ask_for_a_look(context: dg.OpExecutionContext, config: FailedPartitionsNow) -> None:
        request_tick(failed_partitions.state, TickRequest(context.run.run_id, config.at_once))
        context.log.info(
            f"Asked: the sensor {names.name(ANSWER)} looks within seconds and says what it launches."
        )

    @dg.job(
        name=names.name(BUTTON),
        description=(
            "Asks for a look at once, as the schedule takes one every few minutes. With `at_once: true` it"
            " waits for no back-off and tries again what was given up."
        ),
        executor_def=dg.in_process_executor,
    )
    def failed_partitions_now() -> None:
        ask_for_a_look()

    return Retrying((job, failed_partitions_now), failed_partitions_again, failed_partitions_asked)
