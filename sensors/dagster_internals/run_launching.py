"""Launching runs from inside a run: what a schedule's daemon does for it, for a job that a person launched.

What lives here: the steps that Dagster keeps to itself. What does not: which runs (``failed_partitions.py``).
"""

from __future__ import annotations

import dagster as dg


class NoQueueError(RuntimeError):
    """The run that is to launch others was not launched through Dagster itself, so there is no queue."""


def launch_run(context: dg.OpExecutionContext, job_name: str, request: dg.RunRequest) -> str:
    """Queue a run of one partition, as a schedule's request would be. Returns its id. Raises NoQueueError.

    request: with partition key, asset selection and run key.
    """
    from dagster._core.origin import JobPythonOrigin
    from dagster._core.remote_origin import RemoteJobOrigin

    own = context.run
    if own.remote_job_origin is None or own.job_code_origin is None:
        raise NoQueueError(
            f"{own.job_name} was not launched by a running Dagster, so it cannot queue runs. Launch it in the"
            " UI, or let the schedule do it."
        )
    repository = context.repository_def
    job = repository.get_job(job_name)
    resolved = request.with_resolved_tags_and_config(
        job, dynamic_partitions_requests=[], dynamic_partitions_store=None
    )
    tags = {**resolved.tags, "dagster/run_key": request.run_key or ""}
    run = context.instance.create_run_for_job(
        job_def=job,
        run_config=dict(resolved.run_config or {}),
        tags=tags,
        asset_selection=frozenset(request.asset_selection or ()),
        remote_job_origin=RemoteJobOrigin(own.remote_job_origin.repository_origin, job_name),
        job_code_origin=JobPythonOrigin(job_name, own.job_code_origin.repository_origin),
    )
    # The queue needs no workspace: the daemon that takes the run from it has one.
    context.instance.submit_run(run.run_id, workspace=None)  # type: ignore[arg-type]
    return run.run_id
