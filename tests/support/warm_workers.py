"""Forks the templates of worker pools from one process, which has imported what they need.

Each imports for 0.15 s of a core by itself, and a run starts two. All else of them is real.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from vlm_engine.images import worker, worker_process


class ForkedTemplate:
    """What ``worker_process`` asks of a process that it started."""

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        ends = [Connection(os.dup(descriptor)) for descriptor in (*how["pass_fds"], how["stderr"])]
        context, given = multiprocessing.get_context("forkserver"), (*ends, dict(how["env"]))
        self._process = context.Process(target=become_template, args=given, daemon=True)
        self._process.start()
        self.kill = self._process.kill

    def wait(self, seconds: float) -> int:
        """See subprocess.Popen."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a template", seconds)
        return code

    def poll(self) -> int | None:
        """See subprocess.Popen."""
        return self._process.exitcode


def become_template(control: Connection, complaints: Connection, environment: Mapping[str, str]) -> None:
    """Be the program of the workers, as by exec."""
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(complaints.fileno(), 2)
    complaints.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["worker", str(os.getppid()), str(os.dup(control.fileno()))]
    control.close()
    worker.main()


@pytest.fixture(scope="session")
def process_of_templates() -> Iterator[None]:
    """The process that templates are forked from, which ends with the tests."""
    multiprocessing.set_forkserver_preload([__name__, "vlm_engine.images.thumbnails", "PIL.JpegImagePlugin"])
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def warm_workers(process_of_templates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker pools of this process fork their templates."""
    names = {**vars(subprocess), "Popen": ForkedTemplate}
    monkeypatch.setattr(worker_process, "subprocess", SimpleNamespace(**names))
