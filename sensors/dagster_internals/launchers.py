"""The parts of Dagster that an extension's run launcher uses, and the calls that the sensors make to it.

Checked with dagster 1.13.27. Not public: ``ExecuteRunArgs`` and the command ``dagster api execute_run``;
``DefaultRunLauncher``; ``DagsterUserCodeUnreachableError``, for which Dagster's queue takes a run back
(``max_user_code_failure_retries``). If the last goes: a run that meets no machine ends as failed, and the
retry schedule takes its partition up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import dagster as dg
from dagster._core.errors import DagsterUserCodeUnreachableError as DagsterUserCodeUnreachableError
from dagster._core.launcher import DefaultRunLauncher as DefaultRunLauncher
from dagster._core.launcher import LaunchRunContext as LaunchRunContext

from sensors.dagster_internals.instance_needs import wait_for_postgres


class JobLauncher(ABC):
    """A launcher whose runs are jobs of another program, on other machines."""

    @abstractmethod
    def stop(self, job: str) -> bool:
        """Have a job end: SIGTERM, a grace, SIGKILL. False if it has ended, or if there is no answer."""

    @abstractmethod
    def has_ended(self, job: str) -> bool:
        """Whether the program says that a job has ended; False if it does not answer."""


def job_launcher_of(instance: dg.DagsterInstance) -> JobLauncher | None:
    """The instance's launcher if its runs are jobs, else None."""
    launcher = instance.run_launcher
    return launcher if isinstance(launcher, JobLauncher) else None


def execute_run_arguments(run: dg.DagsterRun, instance_ref: Any) -> Sequence[str]:
    """The arguments of ``execute`` in the process that works on a run."""
    from dagster._grpc.types import ExecuteRunArgs

    origin = run.job_code_origin
    assert origin is not None, "a run of a code location has an origin"
    arguments = ExecuteRunArgs(
        job_origin=origin, run_id=run.run_id, instance_ref=instance_ref, set_exit_code_on_failure=True
    )
    return arguments.get_command_args()[-2:]


def execute(arguments: Sequence[str]) -> None:
    """Run ``dagster api`` in this process."""
    from dagster._cli.api import api_cli

    wait_for_postgres()
    api_cli.main(list(arguments), prog_name="dagster api")
