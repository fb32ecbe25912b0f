"""A machine as a node of the cluster: Ray's part there, the node's heartbeat, and its own watch.

The watch ends workers that stand still and processes whose run is over. Dagster's daemon decides whether a
silent node is dead (``cluster_watch.py``). When Ray ends on this machine, this process ends too, with the
runs on it, and a service manager starts both again.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import dagster as dg
import typer

from sensors.dagster_internals.events import DagsterFacts
from sensors.health_watch import Watch
from sensors.run_end import RunToEnd, end_gone_run
from vlm_assets.assets.stored_settings import refuse_at_start
from vlm_assets.automation.sensors import build_health_watcher
from vlm_assets.commands.device_commands import app as device_commands
from vlm_assets.commands.terminal import Home, chosen_settings, say, say_all
from vlm_assets.config.resource_settings import build_gpu, control_state
from vlm_assets.config.settings import PREFIX, Settings, SettingsError, of_env_file
from vlm_assets.services.command_error import CommandError
from vlm_assets.webserver.home import seed_settings
from vlm_assets.webserver.process_group import ProcessEndedError, ProcessGroup, interruptible
from vlm_cluster.cluster_extension import ClusterExtension
from vlm_cluster.ray_launcher import NODE_LABEL
from vlm_durable.files.files import make_directory
from vlm_durable.files.home_claim import claim_home
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.files.processes import boot_id, end_processes, process_start
from vlm_durable.state.nodes import NodeDevice, NodeRecord, Nodes, RunLocks
from vlm_durable.state.workers import Workers
from vlm_durable.wording import counted
from vlm_engine.devices.find import Device, DeviceError, DriverNvml
from vlm_engine.devices.health import HealthCheck

CHECK_SECONDS = 5.0
"""Between two checks of workers, devices and runs that are over."""

STALE_SECONDS = 60.0
"""A node whose last check is older takes no runs."""

_STOP_SLACK_SECONDS = 15
_WAIT_SECONDS = 0.2

_log = logging.getLogger(__name__)


class NodeError(RuntimeError):
    """This machine cannot be a node; the message says why, and what to do."""


@dataclass(frozen=True)
class Place:
    """The addresses of a node. address: its own, of the private interface. head: HOST:PORT of Ray's head, or
    None for the head itself. port: of the head. dashboard_port: of its job server.
    """

    address: str
    head: str | None
    port: int = 6379
    dashboard_port: int = 8265


@dataclass
class NodeWatch:
    """A node's check of its workers and runs. It is plain Python: Dagster's facts are handed in."""

    settings: Settings
    locks: RunLocks
    workers: Workers
    watch: Watch | None = None
    clock: Callable[[], float] = time.monotonic

    def check(self, dagster: DagsterFacts) -> list[str]:
        """End workers that stand still and runs that are over; returns sentences. Raises OSError."""
        now = self.clock()
        cursor = None if self.watch is None else self.watch.cursor()
        self.watch = Watch.read(cursor, now=now, unix=time.time())
        late = self._late(self.watch, dagster)
        sentences = build_health_watcher(self.settings).check(self.watch, dagster, late)
        return [*sentences, *self._end_runs_started_by_hand(dagster)]

    def _end_runs_started_by_hand(self, dagster: DagsterFacts) -> list[str]:
        """End runs that Ray did not launch and whose worker died.

        The cluster notices the end of Ray's runs. The end of others only this machine sees: a worker's lock
        is free.
        """
        dead = self.workers.dead()
        states = dagster.run_states({worker.run_id for worker in dead})
        sentences = []
        for worker in dead:
            run = states.get(worker.run_id)
            if run is not None and not run.finished and run.launcher_job is None:
                why = f"Its process on {worker.host} is gone without a word. What it had committed is there."
                if end_gone_run(dagster, run.run_id, why):
                    sentences.append(f"Run {run.run_id}, which Ray did not launch, was ended. {why}")
            self.workers.forget(worker)
        return sentences

    def _late(self, watch: Watch, dagster: DagsterFacts) -> list[RunToEnd]:
        """The processes here whose run is finished or being cancelled for longer than the grace.

        While a node was cut off, its runs may have been ended and started on another node. Ray may not have
        carried out a cancel.
        """
        living = self.locks.living()
        states = dagster.run_states(living)
        cancels = dg.DagsterRunStatus.CANCELING
        over = [
            run
            for run in living
            if run not in states or states[run].finished or states[run].status is cancels
        ]
        watch.after_end = {run: max(watch.after_end.get(run, watch.at), watch.since) for run in over}
        devices = {worker.run_id: worker.device for worker in self.workers.on_this_machine()}
        # A run is finished a moment before its process is.
        return [
            RunToEnd(
                run,
                who=f"The process of run {run}",
                why="outlived its run or its cancel",
                process=process,
                device=devices.get(run),
                occurrence=f"held after {run}",
            )
            for run, since in watch.after_end.items()
            if (process := living[run]) is not None and watch.at - since >= self.settings.grace_seconds
        ]


def without_slots_if_stale(record: NodeRecord, seconds: float) -> NodeRecord:
    """The record of a node whose last check ended so many seconds ago: without slots if that is too long.

    A node that checks nothing must take no runs: the driver may hang, and no stuck worker would be ended.
    """
    if seconds <= STALE_SECONDS:
        return record
    trouble = f"The node's last check of it ended {seconds:.0f} s ago: the driver may hang. Restart the node."
    devices = tuple(replace(device, trouble=trouble) for device in record.devices)
    return replace(record, slots=0, devices=devices)


def run_node(settings: Settings, place: Place, *, lends: bool, say: Callable[[str], None]) -> None:
    """Be a node until SIGTERM, Ctrl-C, or the end of Ray's part here.

    lends: whether its devices take runs; a head may hold none. Raises NodeError, ControlStateError,
    ProcessEndedError, DeviceError.
    """
    launcher = ClusterExtension().launcher(settings)
    if launcher is None:
        raise SettingsError(
            f"{PREFIX}RAY_ADDRESS is not set, so this machine belongs to no cluster. Set it on every machine"
            " to the address of the head's job server, such as http://10.0.0.1:8265."
        )
    name, home = socket.gethostname(), settings.dagster_home
    gpu, state = build_gpu(settings), control_state(settings)
    devices = gpu.usable() if lends else []
    locks, workers = RunLocks(settings.state_directory), Workers(state)
    device_records = _device_records(devices)

    record = NodeRecord(name, boot_id(), process_start(os.getpid()) or 0, place.address, slots=len(devices))

    def current_record() -> NodeRecord:
        """The record of a heartbeat. It asks no device: a call of the driver may hang."""
        living_workers = frozenset(worker.name for worker in workers.on_this_machine() if worker.pid)
        current = replace(
            record, devices=device_records, runs=frozenset(locks.living()), workers=living_workers
        )
        return without_slots_if_stale(current, time.monotonic() - checked_at)

    checked_at = time.monotonic()

    def send(number: signal.Signals) -> None:
        for process in locks.living().values():
            if process is not None:
                process.send(number)

    def have_ended(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while locks.living():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_WAIT_SECONDS)
        return True

    def stop_runs() -> None:
        nonlocal record
        record = replace(record, slots=0)  # so that it takes no more runs
        # Runs here commit and end before Ray ends with them.
        if not end_processes(send, have_ended, grace=settings.grace_seconds):
            _log.warning("Runs of this machine do not end, though they were killed: %s.", [*locks.living()])

    claim_home(settings.layout)
    make_directory(settings.state_directory)
    seed_settings(home, launcher.dagster_settings(settings))
    with ExitStack() as stack:
        lock = acquire_lock(settings.state_directory / "node.lock", seconds=5.0)
        if lock is None:
            raise NodeError(f"A node runs already on this machine for {settings.home}.")
        stack.callback(lock.close)
        stack.enter_context(Nodes(state).beating(current_record))
        group = stack.enter_context(ProcessGroup(grace_seconds=settings.grace_seconds))
        logs = home / "process_logs"
        logs.mkdir(parents=True, exist_ok=True)
        stack.callback(stop_runs)
        group.start(
            "ray",
            _ray_command(place, name, devices),
            environment=_environment(settings, devices),
            directory=home,
            log=logs / "ray.log",
        )
        say(
            f"{name} is a node with {counted(len(devices), 'devices')}, at {place.address}. Its log:"
            f" {logs / 'ray.log'}"
        )
        instance = stack.enter_context(dg.DagsterInstance.from_config(str(home)))
        watch = NodeWatch(settings, locks, workers)
        with interruptible():
            try:
                while True:
                    group.watch(CHECK_SECONDS)
                    try:
                        say_all(watch.check(DagsterFacts(instance)))
                        device_records = _device_records(devices)
                        checked_at = time.monotonic()
                        usable_ids = [device.id for device in gpu.usable()] if lends else []
                        if usable_ids != [device.id for device in devices]:
                            say("The devices that this node may use have changed: it restarts.")
                            return
                    except ProcessEndedError:
                        raise
                    except Exception as error:  # Postgres is away: the next check tries again
                        _log.warning("This check of workers and devices failed: %s", error)
            except KeyboardInterrupt:
                say("The node ends: its runs commit what they have finished, and go on elsewhere.")


_EXAMPLES = """\b
vlm-assets devices node --head --address 10.0.0.1
vlm-assets devices node --join 10.0.0.1:6379 --address 10.0.0.2"""


@device_commands.command("node", epilog=_EXAMPLES)
def node_command(
    address: Annotated[str, typer.Option(help="Address of this machine's private interface.")],
    head: Annotated[bool, typer.Option("--head", help="Be the head, which the others join.")] = False,
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The head to join.")] = None,
    lends: Annotated[bool, typer.Option("--devices/--no-devices", help="Whether it takes runs.")] = True,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the head.")] = 6379,
    dashboard_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of its job server.")] = 8265,
    home: Home = None,
) -> None:
    """Be a node of a cluster: Ray's part here, and this machine's heartbeat.

    Until SIGTERM or Ctrl-C; its runs commit then, and go on elsewhere. Whoever reaches Ray's ports runs
    commands on this machine, and Ray listens on all interfaces: only a firewall protects it.
    """
    if head == (join is not None):
        raise CommandError("Say either --head or --join HOST:PORT.")
    settings = chosen_settings(home)
    if lends:
        refuse_at_start(settings, say)
    run_node(settings, Place(address, join, port, dashboard_port), lends=lends, say=say)


def _ray_command(place: Place, name: str, devices: list[Device]) -> list[str | Path]:
    gpus = sum(len(device.members) for device in devices)
    program = Path(sys.executable).with_name("ray")
    place_options: list[str] = (
        [f"--address={place.head}"]
        if place.head is not None
        else [
            "--head",
            f"--port={place.port}",
            "--include-dashboard=true",
            f"--dashboard-host={place.address}",
            f"--dashboard-port={place.dashboard_port}",
        ]
    )
    return [
        program if program.exists() else str(shutil.which("ray")),
        "start",
        "--block",
        "--disable-usage-stats",
        *place_options,
        f"--node-ip-address={place.address}",
        f"--num-gpus={gpus}",
        # Runs ask Ray for no CPU: their threads are those of their device.
        "--num-cpus=1",
        f"--object-store-memory={80 << 20}",  # runs keep nothing there
        f"--labels={NODE_LABEL}={name}",
    ]


def _environment(settings: Settings, devices: list[Device]) -> Mapping[str, str]:
    """The environment of Ray's part and of each run on this node: the node's own settings and secrets."""
    environment = {
        **of_env_file(),
        **os.environ,
        f"{PREFIX}HOME": str(settings.home),
        "DAGSTER_HOME": str(settings.dagster_home),
        "PYTHONDONTWRITEBYTECODE": "",
        "RAY_JOB_STOP_WAIT_TIME_S": str(int(settings.grace_seconds) + _STOP_SLACK_SECONDS),
        # A worker that Ray starts ahead of need costs memory, and a run uses none of them.
        "RAY_enable_open_telemetry": "0",
    }
    if devices and devices[0].kind == "cuda":
        # Ray numbers these devices and gives each run its own.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(device.visible for device in devices)
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment[f"{PREFIX}DEVICES"] = "given"
    return environment


def _device_records(devices: list[Device]) -> tuple[NodeDevice, ...]:
    """The devices, each with its temperature and its trouble by the driver."""
    try:
        readings = {reading.uuid: reading for reading in DriverNvml().readings()}
        verdicts = HealthCheck(DriverNvml()).judge_all(devices)
    except DeviceError as error:
        return tuple(NodeDevice(device.id, device.name, trouble=str(error)) for device in devices)
    records = []
    for device in devices:
        members = [readings[member] for member in device.members if member in readings]
        temperatures = [reading.temperature for reading in members if reading.temperature is not None]
        verdict = verdicts.get(device.id)
        trouble = " ".join((*verdict.refused, *verdict.hot)) if verdict is not None else ""
        records.append(NodeDevice(device.id, device.name, max(temperatures, default=None), trouble))
    return tuple(records)
