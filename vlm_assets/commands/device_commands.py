"""``vlm-assets devices``, with ``pause`` and ``resume``: before a reboot, or for a night's rest.

``vlm_durable/state/pause.py`` keeps the pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from resources.gpu import GpuResource
from vlm_assets.commands.terminal import AsJson, Home, choose_home, chosen_settings, say, say_as_json
from vlm_assets.commands.terminal import app as commands
from vlm_assets.config.extensions import launcher_of
from vlm_assets.config.resource_settings import build_gpu, control_state
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import catalog_path
from vlm_durable.commands import given_command
from vlm_durable.mirror.store_claim import forget_machine
from vlm_durable.state.nodes import DEAD_SECONDS, Nodes
from vlm_durable.state.pause import pause, pause_node, resume, resume_node
from vlm_durable.state.workers import Workers
from vlm_durable.wording import counted
from vlm_engine.devices.loaded_servers import end_loaded_servers

DRAIN_SECONDS = 120.0
"""Longest wait for materializations to commit and end: a batch takes 20 s by plan, a model loads longer."""

_DRAINING = f"waiting until running materializations have ended, {DRAIN_SECONDS:.0f} s at most"

_LOOK_SECONDS = 0.5

app = typer.Typer(
    help="Show the devices: free, held, failed before, or left out.",
    epilog="vlm-assets devices --take-back GPU-1",
    invoke_without_command=True,
)
commands.add_typer(app, name="devices")

OfNode = Annotated[
    str | None, typer.Option("--node", metavar="NAME", help="Of a cluster, this machine alone.")
]


@app.command("pause", epilog="vlm-assets devices pause --reason 'a new kernel'")
def pause_command(
    home: Home = None,
    reason: Annotated[str, typer.Option(help="Why, for whoever looks at the pages.")] = "",
    node: OfNode = None,
) -> None:
    """Let everything stand still, and wait until the devices are free.

    Every schedule, retry and materialization stands still.
    Running materializations commit what is finished and end as interrupted; what starts meanwhile waits.
    Model servers that wait for their next partition are ended.
    Exit code 1 if a device is still held after two minutes. With --node, one machine of a cluster alone: it
    takes nothing more, and its runs commit and go on elsewhere.
    """
    if node is not None:
        _pause_node(chosen_settings(home), node, reason)
        return
    current = _refuse_without_home(chosen_settings(home))
    standing = pause(control_state(current), reason, now=time.time())
    say(f"Everything is {standing.sentence()}.")
    holders = _wait_until_drained(current)
    doing("ending model servers")
    holders += end_loaded_servers(current.devices_directory, logging.getLogger(__name__))
    for sentence in holders:
        say(sentence, fg="yellow")
    if holders:
        say("Still paused. Wait for them, or terminate their runs in the UI: committed rows stay.")
        raise typer.Exit(1)
    say("No device is held: the machine can be rebooted.")


def _pause_node(settings: Settings, node: str, reason: str) -> None:
    state = control_state(settings)
    nodes = Nodes(state)
    names = nodes.snapshot().nodes
    if node not in names:
        raise CommandError(
            f"There is no node {node}, so nothing was changed. Known: {', '.join(names) or 'none'}."
        )
    say(f"{pause_node(state, node, reason, now=time.time()).sentence()}.")

    def runs() -> list[str]:
        standing = nodes.snapshot().nodes[node]
        return [] if standing.is_dead else sorted(standing.record.runs)

    if left := _wait_until_none(runs):
        say(f"Still there: the runs {', '.join(left)}.", fg="yellow")
        raise typer.Exit(1)
    say(f"{node} holds no run: it can be taken away or rebooted.")


def _refuse_without_home(settings: Settings) -> Settings:
    """The settings, if their home holds a data set. Raises CommandError."""
    if not catalog_path(settings.home).exists() and not settings.state_directory.is_dir():
        raise CommandError(
            f"There is no data set in {settings.home}, so nothing was changed, and whatever runs elsewhere"
            f" goes on. Name its folder: {given_command('--home', 'DIR')}, or set {PREFIX}HOME."
        )
    return settings


def _wait_until_drained(settings: Settings) -> list[str]:
    """Wait until no run works on any machine. Returns a sentence for each device or run that is left."""
    leases, workers = build_gpu(settings).leases(), Workers(control_state(settings))

    def holders() -> list[str]:
        held = [lease.sentence() for lease in leases.holders()]
        return held or [
            f"{worker.partition} is worked on at {worker.host}, by run {worker.run_id}."
            for worker in workers.living()
        ]

    return _wait_until_none(holders)


def _wait_until_none(holders: Callable[[], list[str]]) -> list[str]:
    """Wait until nothing is held, DRAIN_SECONDS at most. Returns the holders that are left."""
    deadline, most = time.monotonic() + DRAIN_SECONDS, 0
    while (left := holders()) and time.monotonic() < deadline:
        most = max(most, len(left))
        doing(_DRAINING, most - len(left), most)
        time.sleep(_LOOK_SECONDS)
    return left


@app.command("resume", epilog="vlm-assets devices resume")
def resume_command(home: Home = None, node: OfNode = None) -> None:
    """Lift the pause: waiting runs go on at once.

    Schedules go on at their next tick.
    """
    if node is not None:
        lifted = resume_node(control_state(chosen_settings(home)), node)
        say(f"{node} takes work again." if lifted else f"{node} was not paused.")
        return
    stood = resume(control_state(_refuse_without_home(chosen_settings(home))))
    say("Nothing was paused." if stood is None else "The pause is lifted: everything goes on.")


@app.callback()
def devices_command(
    context: typer.Context,
    home: Home = None,
    take_back: Annotated[
        str | None, typer.Option(metavar="ID", help="Use a device again that was left out.")
    ] = None,
    forget_node: Annotated[
        str | None, typer.Option(metavar="NAME", help="Forget a machine that is gone for good.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the devices: free, held, failed before, or left out.

    Also by which run they are held, and which have a model server. Of a cluster, those of all nodes.
    """
    if context.invoked_subcommand is not None:
        # `vlm-assets devices --home DIR pause` means the same home; one named after it wins.
        choose_home(home)
        return
    current = chosen_settings(home)
    gpu = build_gpu(current)
    if take_back is not None:
        forgotten = len(gpu.left_out_devices().take_back(take_back).failures)
        say(f"{take_back} is used again; {counted(forgotten, 'failures are', 'failure is')} forgotten.")
        return
    if forget_node is not None:
        _forget(current, forget_node)
        return
    listed = launcher_of(current).listed_devices(current)
    devices = list(_devices_here(gpu)) if listed is None else listed
    if as_json:
        say_as_json(devices)
        return
    for device in devices:
        say(f"{device['id']}  {device['name']}: {device['state']}. {' '.join(device['sentences'])}".rstrip())


def _devices_here(gpu: GpuResource) -> Iterator[dict[str, Any]]:
    records = gpu.left_out_devices().records()
    leases = {lease.device.id: lease for lease in gpu.leases().holders()}
    servers = {server.device: server for server in gpu.loaded_servers().living()}
    for device in gpu.find():
        record = records.get(device.id)
        state = "held" if device.id in leases else "free"
        if record is not None and record.left_out_at is not None:
            state = "left out"
        sentences = [leases[device.id].sentence()] if device.id in leases else []
        sentences += [servers[device.id].sentence()] if device.id in servers else []
        sentences += [record.sentence(device.id)] if record is not None else []
        yield {"id": device.id, "name": device.name, "state": state, "sentences": sentences}


def _forget(settings: Settings, name: str) -> None:
    nodes = Nodes(control_state(settings))
    if settings.state_url is None and forget_machine(settings.mirror, name, settings.home):
        say(f"{name} is forgotten: this machine works over {settings.mirror} now.")
    elif nodes.forget(name):
        say(f"{name} is forgotten.")
    else:
        node = nodes.snapshot().nodes.get(name)
        raise CommandError(
            f"No node {name} is known."
            if node is None
            else f"{name} is not dead ({node.sentence()}), and its runs would be ended. Stop the service"
            f" there, and forget it {DEAD_SECONDS:.0f} s later."
        )
