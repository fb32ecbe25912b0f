"""A process with everything imported, from which runs are forked onto machines: imports are paid once.

What lives here: the program (``python -m faults.run_template``), and asking it. A run is the product's own
definitions in a process that has its machine's name, network, processes and disk, and holds the run's lock.
What does not: which run goes where (``faults/machines_alone.py``).
"""

from __future__ import annotations

import gc
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from faults.machines import enter

_READY = "ready"


@dataclass(frozen=True)
class Order:
    """A run that is to be started.

    root: the run of which it is a retry, or itself. config: of each asset. init: the first process of its
    machine.
    """

    run: str
    root: str
    partition: str
    assets: tuple[str, ...]
    config: Mapping[str, bool]
    init: int
    environment: Mapping[str, str]
    log: str


class RunTemplate:
    """The program as its user sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._ended: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        threading.Thread(target=self._hear, daemon=True).start()

    @classmethod
    @contextmanager
    def started(cls, log: Path) -> Iterator[RunTemplate]:
        """Have it import everything; it ends with the context."""
        # Its own definitions are of an empty home: each run builds those of its machine.
        with tempfile.TemporaryDirectory(prefix="template-") as nowhere, log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "faults.run_template"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | {"VLM_ASSETS_HOME": nowhere, "TOKENIZERS_PARALLELISM": "false"},
            )
            assert process.stdout is not None
            try:
                if process.stdout.readline().strip() != _READY:
                    raise RuntimeError(f"The template of runs did not start; see {log}")
                yield cls(process)
            finally:
                process.kill()
                process.wait()

    def start(self, order: Order) -> None:
        """Start a run."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(asdict(order))}\n")
        self._process.stdin.flush()

    def ended(self) -> dict[str, int]:
        """The runs that have ended since this was last asked, and their exit codes."""
        codes = {}
        while not self._ended.empty():
            run, code = self._ended.get()
            codes[run] = code
        return codes

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._ended.put(tuple(json.loads(line)))


def main() -> None:
    """Fork a run for each order, until there are no more."""
    _import_all()
    gc.collect()
    gc.freeze()  # so that children share these pages
    print(_READY, flush=True)
    orders = open(0, "rb", buffering=0)  # noqa: SIM115  # what is read ahead would not be polled
    living: dict[int, tuple[str, int]] = {}
    poll = select.poll()
    poll.register(orders)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in living:
                run, pid = living.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                print(json.dumps([run, os.waitstatus_to_exitcode(status)]), flush=True)
            elif line := orders.readline():
                order = Order(**json.loads(line))
                pid = os.fork()
                if pid == 0:
                    _on_its_machine(order)
                descriptor = os.pidfd_open(pid)
                living[descriptor] = order.run, pid
                poll.register(descriptor, select.POLLIN)
            else:
                return


def _import_all() -> None:
    import importlib

    for name in ("duckdb", "pyarrow.dataset", "sentence_transformers", "torch", "xgrammar"):
        importlib.import_module(name)
    from transformers import AutoProcessor, Idefics3ForConditionalGeneration, Idefics3Processor

    import vlm_assets.home_definitions

    del AutoProcessor, Idefics3ForConditionalGeneration, Idefics3Processor, vlm_assets


def _on_its_machine(order: Order) -> NoReturn:
    """Enter the machine, run in a child (see ``enter``), wait for it, and end as it does."""
    code = 1
    try:
        log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        enter(order.init)
        child = os.fork()
        code = _live(order) if child == 0 else int(os.waitpid(child, 0)[1] != 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _live(order: Order) -> int:
    """The run, as the process of a run on a node: 0 where it succeeded."""
    import dagster as dg

    from vlm_assets.config.settings import current_settings
    from vlm_assets.home_definitions import build_defs
    from vlm_durable.files.processes import boot_id
    from vlm_durable.state.nodes import RunLocks

    os.environ.clear()
    os.environ.update(order.environment)
    for cached in (boot_id, current_settings):
        cached.cache_clear()
    settings = current_settings()
    job = build_defs(settings).resolve_implicit_global_asset_job_def()
    config: dict[str, Any] = {"ops": {asset: {"config": dict(order.config)} for asset in order.assets}}
    with RunLocks(settings.state_directory).held(order.run), dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(
            run_config=config,
            instance=instance,
            partition_key=order.partition,
            asset_selection=[dg.AssetKey(asset) for asset in order.assets],
            run_id=order.run,
            tags={"dagster/root_run_id": order.root},
            raise_on_error=False,
        )
    return 0 if done.success else 1


if __name__ == "__main__":
    main()
