"""A code server whose runs are forked from a process that has imported torch: 5 s of a core less a run.

What lives here: Dagster's own command line, started as ``python -m`` this module, with another way to start a
run's process. What does not: what is imported ahead (``run_imports.py``), and where runs may be forked
(``orchestrator/server.py``). Term: forkserver of ``multiprocessing``.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

PROGRAM = "sensors.dagster_internals.forked_runs"
"""The name of this module as a program, which takes the place of ``dagster``."""

READY = "From now on runs are forked from a process that has imported what they need."
"""In the code server's log."""

_log = logging.getLogger("dagster.code_server")
_IMPORTS = "sensors.dagster_internals.run_imports"


class RunProcesses:
    """What Dagster's code server takes for ``multiprocessing``'s way to spawn.

    Until the process that runs are forked from has shown that it works, and wherever it does not come about,
    a run is spawned as ever. One that is killed is started anew with the next run.
    """

    def __init__(self) -> None:
        self._spawning = multiprocessing.get_context("spawn")
        self._forking = multiprocessing.get_context("forkserver")
        self._ready = threading.Event()
        self.Queue = self._spawning.Queue
        self.Event = self._spawning.Event

    def warm_up(self) -> None:
        """Start the process that imports, and wait until something was forked from it."""
        forkserver.set_forkserver_preload([_IMPORTS])
        nothing = self._forking.Process()
        nothing.start()
        nothing.join()
        if nothing.exitcode == 0:
            self._ready.set()
            _log.info(READY)

    def Process(self, **arguments: Any) -> BaseProcess:  # noqa: N802 - Dagster calls it by that name
        """A process that is not started yet, as ``multiprocessing.Process``."""
        context = self._forking if self._ready.is_set() else self._spawning
        return context.Process(**arguments)


def main() -> None:
    """Dagster's command line, whose code servers are started as this program and fork their runs."""
    from dagster import _cli
    from dagster._grpc import server

    this_program = [sys.executable, "-m", PROGRAM]
    named: Any = server
    # The command that the code server's proxy starts, at first and for each reload of the definitions.
    named.get_python_environment_entry_point = lambda _: this_program
    if sys.argv[1:3] == ["api", "grpc"]:
        processes = RunProcesses()
        named.multiprocessing = SimpleNamespace(get_context=lambda _: processes)
        threading.Thread(target=processes.warm_up, name="forked-runs", daemon=True).start()
    _cli.main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
