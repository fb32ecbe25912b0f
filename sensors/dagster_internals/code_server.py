"""Checks whether Dagster's code server can launch runs: it may load definitions, and hang at each launch.

A run's process waits on an event of its code server. To cancel a run, the server sets that event and holds
one lock until the process has woken up, and each launch takes the same lock. A process that is stopped
(SIGSTOP), or that hangs in a driver, never wakes up. Killing it frees no lock: a new server is needed.

Checked with dagster 1.13.27. Not public: ``DagsterGrpcClient`` and ``CanCancelExecution``, which takes that
lock and does nothing else. If they go: launch a run of a job that does nothing, which costs a process.
"""

from __future__ import annotations

from pathlib import Path

from vlm_durable.files.processes import ProcessIdentity, children


def can_launch(socket: Path, *, seconds: int) -> bool:
    """Whether the code server behind this socket would launch a run within so many seconds."""
    from dagster._core.errors import DagsterUserCodeUnreachableError
    from dagster._grpc.client import DagsterGrpcClient
    from dagster._grpc.types import CanCancelExecutionRequest

    question = CanCancelExecutionRequest(run_id="no run")
    try:
        DagsterGrpcClient(socket=str(socket)).can_cancel_execution(question, timeout=seconds)
    except DagsterUserCodeUnreachableError:
        return False
    return True


def serving_process(code_server: int) -> ProcessIdentity | None:
    """The child of the code server with this pid that serves the definitions now; None if there is none.

    The code server passes all requests on to this child, and starts a new child at each reload. An older
    child goes on beside it until its last run has ended.
    """
    identities = [ProcessIdentity.from_pid(pid) for pid in children(code_server) if _is_server(pid)]
    processes = [process for process in identities if process is not None]
    return max(processes, key=lambda process: process.start, default=None)


def _is_server(pid: int) -> bool:
    try:
        return b"grpc" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended since it was listed
