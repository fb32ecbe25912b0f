"""Machines over one store without Ray and Dagster's daemon: a run begins in a tenth of a second.

What lives here: which run goes where. Runs are real ones (``faults/run_template.py``) on real machines, with
Postgres, the store and the example as in ``faults/cluster.py``; Dagster's history is in each run's memory. A
partition whose machine is struck goes to another one at once; in a cluster heartbeats or a launcher must
notice it first.
"""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from faults.cluster import ASSETS, Beat, Cluster, ClusterError
from faults.machines import Machine
from faults.run_template import Order, RunTemplate

_FAILURES = 10
"""Of a partition in a row, without a fault of a machine: something else is wrong."""


@dataclass(frozen=True)
class _Run:
    id: str
    partition: str
    machine: Machine


class MachinesAlone(Cluster):
    """All machines but one may be away at a time. Half of those that lose their power lose their disk too."""

    def __init__(self, folder: Path, *, machines: int, chance: random.Random) -> None:
        super().__init__(folder, machines=machines)
        self._chance = chance
        self._keys: list[str] = []
        self._roots: dict[str, str] = {}
        self._waiting: deque[str] = deque()
        self._running: dict[str, _Run] = {}
        """By id, until their process has ended: also runs whose partition was given to another one."""
        self._current: dict[str, _Run] = {}
        self._failures: Counter[str] = Counter()
        self._done: set[str] = set()

    @property
    def at_risk(self) -> Sequence[Machine]:
        """The reachable machines, unless only one is left."""
        reachable = [machine for machine in self.machines if machine.is_reachable]
        return reachable if len(reachable) > 1 else []

    def is_current(self, beat: Beat) -> bool:
        """Whether it is of the run that has its partition now."""
        run = self._current.get(beat.partition)
        return run is not None and run.id == beat.run_id

    def is_done(self, partition: str) -> bool:
        """Whether a run of this round has published it."""
        return partition in self._done

    def _environment(self, machine: Machine) -> dict[str, str]:
        # A partition is small: a commit after each batch makes it like one of hours.
        often = {"VLM_ASSETS_BATCH_SIZE": "2", "VLM_ASSETS_COMMIT_SECONDS": "0.2", "OMP_NUM_THREADS": "1"}
        return super()._environment(machine) | often

    def begin(self, *, properties: int, range_size: int, seed: int) -> None:
        """As the parent's, but for Ray and Dagster."""
        self._ingest(self._fill_store(properties, seed), range_size)
        starts = range(0, properties, range_size)
        self._keys = [f"{at:09d}-{min(at + range_size, properties) - 1:09d}" for at in starts]
        self._template = self._stack.enter_context(RunTemplate.started(self.logs / "template.log"))
        self._begin_to_listen()

    def backfill(self, config: Mapping[str, bool]) -> Callable[[], bool]:
        """Run all partitions, each with this config. What it gives launches what is next when it is asked."""
        self._roots = {}
        self._waiting = deque(self._keys)
        self._done.clear()

        def ended() -> bool:
            self._follow_runs()
            self._launch(config)
            return len(self._done) == len(self._keys) and not self._running

        return ended

    def switch_on(self, machine: Machine) -> None:
        """Start a machine that lost its power; in half of all cases with an empty disk."""
        if self._chance.random() < 0.5:
            shutil.rmtree(machine.disk)
        machine.start()
        (machine.disk / "tmp").mkdir(exist_ok=True)

    def _follow_runs(self) -> None:
        """Queue again what failed or lost its machine. Raises ClusterError."""
        for run_ in list(self._current.values()):
            if not run_.machine.is_reachable:
                del self._current[run_.partition]
                self._waiting.appendleft(run_.partition)
        for run, code in self._template.ended().items():
            run_ = self._running.pop(run)
            if self._current.get(run_.partition) is not run_:
                continue
            del self._current[run_.partition]
            if code == 0:
                self._done.add(run_.partition)
                self._failures[run_.partition] = 0
                continue
            self._waiting.append(run_.partition)
            self._failures[run_.partition] += 1
            if self._failures[run_.partition] > _FAILURES:
                raise ClusterError(f"{run_.partition} fails again and again: see {self._log(run_.machine)}")

    def _launch(self, config: Mapping[str, bool]) -> None:
        busy = {candidate.machine.name for candidate in self._running.values()}
        free = [
            candidate for candidate in self.machines if candidate.is_reachable and candidate.name not in busy
        ]
        self._chance.shuffle(free)
        # More at once than there are cores: a run waits for its store and its processes too.
        while free and self._waiting and len(self._current) <= (os.cpu_count() or 1):
            run = _Run(str(uuid.uuid4()), self._waiting.popleft(), free.pop())
            self._running[run.id] = self._current[run.partition] = run
            self._template.start(
                Order(
                    run=run.id,
                    # Retries go on with what a struck run had begun.
                    root=self._roots.setdefault(run.partition, run.id),
                    partition=run.partition,
                    assets=ASSETS,
                    config=config,
                    init=run.machine.init,
                    environment=run.machine.environment,
                    log=str(self._log(run.machine)),
                )
            )

    def _log(self, machine: Machine) -> Path:
        return self.logs / f"{machine.name}.log"
