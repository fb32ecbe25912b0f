"""``vlm-assets devices``, with ``pause`` and ``resume``: before a reboot, or for a night's rest.

``vlm_durable/state/pause.py`` keeps the pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from resources.gpu import GpuResource
from vlm_assets.catalog.catalog import catalog_path
from vlm_assets.commands.terminal import AsJson, Home, chosen_settings, say, say_as_json
from vlm_assets.commands.terminal import app as commands
from vlm_assets.config.resource_settings import build_gpu, control_state
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_durable.mirror.store_claim import forget_machine
from vlm_durable.state.nodes import DEAD_SECONDS, Nodes
from vlm_durable.state.pause import pause, pause_node, resume, resume_node
from vlm_durable.state.workers import Workers
from vlm_durable.wording import counted
from vlm_engine.devices.left_out import LeftOutDevices
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
    current = _of_a_home(chosen_settings(home))
    standing = pause(control_state(current), reason, now=time.time())
    say(f"Everything is {standing.sentence()}.")
    left = _drained(current)
    doing("ending model servers")
    left += end_loaded_servers(current.state_directory, logging.getLogger(__name__))
    for sentence in left:
        say(sentence, fg="yellow")
    if left:
        say("Still paused. Wait for them, or terminate their runs in the UI: committed rows stay.")
        raise typer.Exit(1)
    say("No device is held: the machine can be rebooted.")


def _pause_node(settings: Settings, node: str, reason: str) -> None:
    state = control_state(settings)
    nodes = Nodes(state)
    if node not in (known := nodes.snapshot().nodes):
        raise CommandError(
            f"There is no node {node}, so nothing was changed. Known: {', '.join(known) or 'none'}."
        )
    say(f"{pause_node(state, node, reason, now=time.time()).sentence()}.")
    deadline, most = time.monotonic() + DRAIN_SECONDS, 0
    while (standing := nodes.snapshot().nodes[node]).record.runs and not standing.is_dead:
        most = max(most, len(standing.record.runs))
        doing(_DRAINING, most - len(standing.record.runs), most)
        if time.monotonic() >= deadline:
            say(f"Still there: the runs {', '.join(sorted(standing.record.runs))}.", fg="yellow")
            raise typer.Exit(1)
        time.sleep(_LOOK_SECONDS)
    say(f"{node} holds no run: it can be taken away or rebooted.")


def _of_a_home(settings: Settings) -> Settings:
    """The same, where anything was ever done there. Raises CommandError."""
    if not catalog_path(settings.home).exists() and not settings.state_directory.is_dir():
        raise CommandError(
            f"There is no data set in {settings.home}, so nothing was changed, and whatever runs elsewhere"
            f" goes on. Name its folder: --home DIR, or {PREFIX}HOME."
        )
    return settings


def _drained(settings: Settings) -> list[str]:
    """Wait until no device is held, on any machine; what is said of those that still are in the end."""
    leases, workers = build_gpu(settings).leases(), Workers(control_state(settings))

    def holders() -> list[str]:
        at_work = workers.living() if settings.ray_address is not None else []
        held = [f"{one.partition} is worked on at {one.host}, by run {one.run_id}." for one in at_work]
        return held or [one.sentence() for one in leases.holders()]

    deadline, most = time.monotonic() + DRAIN_SECONDS, 0
    while (found := holders()) and time.monotonic() < deadline:
        most = max(most, len(found))
        doing(_DRAINING, most - len(found), most)
        time.sleep(_LOOK_SECONDS)
    return found


@app.command("resume", epilog="vlm-assets devices resume")
def resume_command(home: Home = None, node: OfNode = None) -> None:
    """Lift the pause: waiting runs go on at once.

    Schedules go on at their next tick.
    """
    if node is not None:
        lifted = resume_node(control_state(chosen_settings(home)), node)
        say(f"{node} takes work again." if lifted else f"{node} was not paused.")
        return
    stood = resume(control_state(_of_a_home(chosen_settings(home))))
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
    current = chosen_settings(home)
    if context.invoked_subcommand is not None:
        return
    gpu = build_gpu(current)
    if take_back is not None:
        forgotten = len(gpu.left_out_devices().take_back(take_back).failures)
        say(f"{take_back} is used again; {counted(forgotten, 'failures are', 'failure is')} forgotten.")
        return
    if forget_node is not None:
        _forget(current, forget_node)
        return
    shown = list(_of_cluster(current) if current.ray_address is not None else _of_this_machine(gpu))
    if as_json:
        say_as_json(shown)
        return
    for one in shown:
        say(f"{one['id']}  {one['name']}: {one['state']}. {one['said']}".rstrip())


def _of_this_machine(gpu: GpuResource) -> Iterator[dict[str, object]]:
    records = gpu.left_out_devices().records()
    held = {one.device.id: one for one in gpu.leases().holders()}
    servers = {one.device: one for one in gpu.loaded_servers().living()}
    for device in gpu.find():
        record = records.get(device.id)
        state = "held" if device.id in held else "free"
        if record is not None and record.left_out_at is not None:
            state = "left out"
        said = [of[device.id].sentence() for of in (held, servers) if device.id in of]
        said += [record.sentence(device.id)] if record is not None else []
        yield {"id": device.id, "name": device.name, "state": state, "said": " ".join(said)}


def _forget(settings: Settings, name: str) -> None:
    nodes = Nodes(control_state(settings))
    alone = settings.store if settings.state_url is None else None
    if alone is not None and forget_machine(alone, name, settings.home):
        say(f"{name} is forgotten: this machine works over {alone} now.")
    elif nodes.forget(name):
        say(f"{name} is forgotten.")
    else:
        there = nodes.snapshot().nodes.get(name)
        raise CommandError(
            f"No node {name} is known."
            if there is None
            else f"{name} is not dead ({there.sentence()}), and its runs would be ended. Stop the service"
            f" there, and forget it {DEAD_SECONDS:.0f} s later."
        )


def _of_cluster(settings: Settings) -> Iterator[dict[str, object]]:
    state = control_state(settings)
    records = LeftOutDevices(state).records()
    at_work = {worker.device: worker for worker in Workers(state).living() if worker.device}
    for name, node in Nodes(state).snapshot().nodes.items():
        for device in node.record.devices:
            record, worker = records.get(device.id), at_work.get(device.id)
            word = "held" if worker is not None else "free" if node.takes_runs else "not used"
            if record is not None and record.left_out_at is not None:
                word = "left out"
            said = [f"{name} {node.sentence()}."]
            said += [f"It works on {worker.partition}, run {worker.run_id}."] if worker is not None else []
            said += [f"{device.temperature} °C."] if device.temperature is not None else []
            said += [device.trouble] if device.trouble else []
            said += [record.sentence(device.id)] if record is not None else []
            about = {"temperature": device.temperature, "said": " ".join(said)}
            yield {"id": device.id, "node": name, "name": device.name, "state": word, **about}
