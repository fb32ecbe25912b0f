"""What a run launcher of an extension takes from Dagster, and what the sensors ask of such a launcher.

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

from sensors.dagster_internals.patience import wait_for_postgres


class JobLauncher(ABC):
    """A launcher whose runs are jobs of another program, on other machines."""

    @abstractmethod
    def stop(self, job: str) -> bool:
        """Have a job end: SIGTERM, a grace, SIGKILL. False where it has ended, or nobody answers."""

    @abstractmethod
    def has_ended(self, job: str) -> bool:
        """Whether the program says that a job has ended. No answer means nothing."""


def job_launcher_of(instance: dg.DagsterInstance) -> JobLauncher | None:
    """The instance's launcher, where its runs are jobs."""
    launcher = instance.run_launcher
    return launcher if isinstance(launcher, JobLauncher) else None


def execute_run_arguments(run: dg.DagsterRun, instance_ref: Any) -> Sequence[str]:
    """What a process hands to ``execute`` to work on a run."""
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
