"""Dagster's run launcher for a Ray cluster, on top of dagster-ray's.

What lives here: which runs go to Ray, to which nodes, with what command, and what Ray says of a run's job.
What does not: whether a run lives (``sensors/cluster.py``, by heartbeats): Dagster's own monitoring is not
asked (``supports_check_run_worker_health``), so that liveness has one owner. Named in
``dagster-cluster.yaml``.

Checked with dagster-ray 0.4.8 and ray 2.60.0. Of dagster-ray only the configuration and the client are used:
its tag ``dagster-ray/config`` would let whoever submits a run choose commands and environments. Dagster's
private parts are in ``sensors/dagster_internals/launchers.py``.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster_ray import RayRunLauncher

from sensors.dagster_internals.launchers import (
    DagsterUserCodeUnreachableError,
    DefaultRunLauncher,
    JobLauncher,
    LaunchRunContext,
    execute_run_arguments,
)
from sensors.dagster_internals.runs import RAY_JOB, first_ray_job, said_ray_job
from vlm_durable.state.database import open_state
from vlm_durable.state.nodes import RAY_RUN, ClusterSnapshot, Nodes

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

NODE_LABEL = "vlm-assets/node"
"""Ray's label of a node: its host name."""

_ENTRY = "vlm_cluster.ray_run"
_PARTITION = "dagster/partition"
_ENDED = frozenset({"FAILED", "STOPPED", "SUCCEEDED"})
_ANSWER_SECONDS = 5.0
_AWAY_SECONDS = 15.0

_log = logging.getLogger(__name__)


class ClusterRunLauncher(RayRunLauncher, JobLauncher):
    """Runs of partitions are jobs of Ray, on nodes that beat; all others are processes of this machine.

    What they need (the catalogue, every published partition) is here, and none of them needs a device.
    """

    def __init__(self, *, state_url: str, gpus: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self._nodes = Nodes(open_state(Path("/nonexistent"), state_url))  # no file: it is all in Postgres
        self._gpus = gpus
        self._here = DefaultRunLauncher()
        self._asked_in_vain = -_AWAY_SECONDS

    @classmethod
    def config_type(cls) -> Any:
        """address: of Ray's dashboard. state_url: the database of heartbeats. gpus: of a run."""
        return {
            "address": dg.StringSource,
            "state_url": dg.StringSource,
            "gpus": dg.Field(dg.IntSource, is_required=False, default_value=1),
        }

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Any) -> ClusterRunLauncher:
        """As Dagster makes it from its settings."""
        return cls(inst_data=inst_data, **config_value)

    def register_instance(self, instance: Any) -> None:
        """Both launchers are of this instance."""
        super().register_instance(instance)
        self._here.register_instance(instance)

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Heartbeats say who lives: nobody else does."""
        return False

    @property
    def supports_resume_run(self) -> bool:
        """A run that died is started anew, and goes on from its journal."""
        return False

    @cached_property
    def client(self) -> JobSubmissionClient:
        """Asks Ray's job server; gives up after five seconds, as for a machine that was cut off."""
        from ray.job_submission import JobSubmissionClient

        class Client(JobSubmissionClient):  # type: ignore[misc]  # ray's types are not followed
            def _do_request(self, *arguments: Any, **options: Any) -> Any:
                return super()._do_request(*arguments, **{"timeout": _ANSWER_SECONDS, **options})

        return Client(self.address)

    def launch_run(self, context: LaunchRunContext) -> None:
        """Submit the run. Raises DagsterUserCodeUnreachableError, for which the queue takes it back."""
        run = context.dagster_run
        if not _is_for_ray(run):
            self._here.launch_run(context)
            return
        look = self._look()
        names = sorted(name for name, node in look.nodes.items() if node.takes_runs)
        if not names:
            raise DagsterUserCodeUnreachableError(
                f"No node of the cluster takes runs now, so run {run.run_id} waits in the queue. "
                + (
                    "; ".join(f"{node.name} {node.sentence()}" for node in look.nodes.values())
                    or "None ever joined."
                )
            )
        job = self._submit(run.run_id, _command(run, self._instance.get_ref()), names)
        self._instance.report_engine_event(
            f"Submitted to Ray as {job}, for one of the nodes {', '.join(names)}.", run, cls=self.__class__
        )

    def terminate(self, run_id: str) -> bool:
        """Have a run commit and end; False where it has ended, or Ray does not answer now."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        if not _is_for_ray(run):
            return bool(self._here.terminate(run_id))  # type: ignore[no-untyped-call]  # Dagster's
        self._instance.report_run_canceling(run)
        return self.stop(said_ray_job(run_id, run.tags) or first_ray_job(run_id))

    def stop(self, job: str) -> bool:
        """Have a job end: SIGTERM, a grace, SIGKILL. False where it has ended, or Ray does not answer."""
        if self._is_away:
            return False
        try:
            return bool(self.client.stop_job(job))
        except Exception as error:  # requests, ray and aiohttp each have their own
            if _is_unknown(error):
                return False
            _log.warning("Ray did not stop %s: %s", job, error)
            self._forget_client()
            return False

    def has_ended(self, job: str) -> bool:
        """Whether Ray says that a job has ended. What it does not know, or does not answer, means nothing."""
        if self._is_away:
            return False
        try:
            return self._status(job) in _ENDED
        except Exception as error:
            _log.info("Ray says nothing of %s: %s", job, error)
            self._forget_client()
            return False

    def join(self, timeout: int = 30) -> None:
        """Nothing to wait for."""

    def get_run_worker_debug_info(
        self, run: dg.DagsterRun, include_container_logs: bool | None = True
    ) -> None:
        """Nothing: Ray's job information repeats the command line."""

    def _look(self) -> ClusterSnapshot:
        try:
            return self._nodes.snapshot()
        except OSError as error:
            raise DagsterUserCodeUnreachableError(str(error)) from error

    def _submit(self, run_id: str, command: str, names: list[str]) -> str:
        """The id of the job. One that was submitted before and lives is not submitted again."""
        try:
            for number in range(1, 1000):
                job = first_ray_job(run_id) + (f"-{number}" if number > 1 else "")
                status = self._status(job)
                if status in _ENDED:
                    continue
                # First: whoever finds a run of Ray's without a node must know that it is Ray's.
                self._instance.add_run_tags(run_id, {RAY_JOB: job})
                if status is None:
                    self.client.submit_job(
                        submission_id=job,
                        entrypoint=command,
                        entrypoint_num_gpus=self._gpus,
                        entrypoint_label_selector={NODE_LABEL: f"in({','.join(names)})"},
                        metadata={"dagster/run-id": run_id},
                    )
                return job
        except Exception as error:
            self._forget_client()
            raise DagsterUserCodeUnreachableError(
                f"Ray did not take run {run_id}, which waits in the queue: {error}"
            ) from error
        raise DagsterUserCodeUnreachableError(f"Run {run_id} was submitted a thousand times.")

    def _status(self, job: str) -> str | None:
        try:
            return str(self.client.get_job_status(job).value)
        except RuntimeError as error:
            if _is_unknown(error):
                return None
            raise

    def _forget_client(self) -> None:
        """A client looks at the cluster once, when it is made."""
        self.__dict__.pop("client", None)
        self._asked_in_vain = time.monotonic()

    @property
    def _is_away(self) -> bool:
        """Whether Ray did not answer a moment ago: of many runs, only the first is asked for in vain."""
        return time.monotonic() - self._asked_in_vain < _AWAY_SECONDS


def _is_for_ray(run: dg.DagsterRun) -> bool:
    return _PARTITION in run.tags and run.asset_selection is not None


def _is_unknown(error: Exception) -> bool:
    """Whether Ray answered that it has no such job."""
    return isinstance(error, RuntimeError) and "404" in str(error)


def _command(run: dg.DagsterRun, instance_ref: Any) -> str:
    """The shell command of a run. Secrets are in the node's environment: Ray shows the command to everybody.

    Ray gives each process one thread; ours take those of their device.
    """
    environment = ["env", "-u", "OMP_NUM_THREADS", f"{RAY_RUN}={run.run_id}"]
    arguments = execute_run_arguments(run, instance_ref)
    return "exec " + shlex.join([*environment, sys.executable, "-m", _ENTRY, *arguments])
