"""Dagster's run launcher for a Ray cluster, on top of dagster-ray's.

What lives here: which runs go to Ray, to which nodes, with what command, and Ray's answers about a run's job.
What does not: whether a run lives. Only ``cluster_watch.py`` decides that, by heartbeats: Dagster's own
monitoring is switched off (``supports_check_run_worker_health``). Named in ``dagster-cluster.yaml``.

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
from sensors.dagster_internals.runs import LAUNCHER_JOB, first_launcher_job, tagged_launcher_job
from vlm_cluster.ray_run import RAY_RUN
from vlm_durable.state.database import open_state
from vlm_durable.state.nodes import Nodes

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
    """Launches runs of partitions as Ray jobs, on nodes that beat; all other runs as processes here.

    The other runs need the catalogue and every published partition, which are on this machine, and no device.
    """

    def __init__(self, *, state_url: str, gpus: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self._nodes = Nodes(open_state(Path("/nonexistent"), state_url))  # no file: it is all in Postgres
        self._gpus = gpus
        self._here = DefaultRunLauncher()
        self._unanswered_at = -_AWAY_SECONDS

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
        """The launcher from Dagster's settings."""
        return cls(inst_data=inst_data, **config_value)

    def register_instance(self, instance: Any) -> None:
        """Register the instance with both launchers."""
        super().register_instance(instance)
        self._here.register_instance(instance)

    @property
    def supports_check_run_worker_health(self) -> bool:
        """False: only heartbeats decide whether a run lives."""
        return False

    @property
    def supports_resume_run(self) -> bool:
        """False: a run that died is started anew, and goes on from its journal."""
        return False

    @cached_property
    def client(self) -> JobSubmissionClient:
        """The client of Ray's job server. It gives up after five seconds: the server may be cut off."""
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
        try:
            nodes = self._nodes.snapshot().nodes
        except OSError as error:
            raise DagsterUserCodeUnreachableError(str(error)) from error
        names = sorted(name for name, node in nodes.items() if node.takes_runs)
        if not names:
            raise DagsterUserCodeUnreachableError(
                f"No node of the cluster takes runs now, so run {run.run_id} waits in the queue. "
                + (
                    "; ".join(f"{node.name} {node.sentence()}" for node in nodes.values())
                    or "None ever joined."
                )
            )
        job = self._submit(run.run_id, _command(run, self._instance.get_ref()), names)
        self._instance.report_engine_event(
            f"Submitted to Ray as {job}, for one of the nodes {', '.join(names)}.", run, cls=self.__class__
        )

    def terminate(self, run_id: str) -> bool:
        """Have a run commit and end; False if it has ended, or Ray does not answer now."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        if not _is_for_ray(run):
            return bool(self._here.terminate(run_id))  # type: ignore[no-untyped-call]  # Dagster's
        self._instance.report_run_canceling(run)
        return self.stop(tagged_launcher_job(run_id, run.tags) or first_launcher_job(run_id))

    def stop(self, job: str) -> bool:
        """Have a job end: SIGTERM, a grace, SIGKILL. False if it has ended, or Ray does not answer."""
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
        """Whether Ray says that a job has ended; False if it does not know the job, or does not answer."""
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

    def _submit(self, run_id: str, command: str, names: list[str]) -> str:
        """Submit a run and return the id of its job. A job that was submitted before and lives is kept."""
        try:
            for number in range(1, 1000):
                job = first_launcher_job(run_id) + (f"-{number}" if number > 1 else "")
                status = self._status(job)
                if status in _ENDED:
                    continue
                # The tag comes first: a run that waits in Ray for a node must be known as Ray's.
                self._instance.add_run_tags(run_id, {LAUNCHER_JOB: job})
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
        """Have the next call make a new client: a client reads the cluster's state once, when it is made."""
        self.__dict__.pop("client", None)
        self._unanswered_at = time.monotonic()

    @property
    def _is_away(self) -> bool:
        """Whether Ray did not answer a moment ago: then it is not asked about the next of many runs."""
        return time.monotonic() - self._unanswered_at < _AWAY_SECONDS


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
