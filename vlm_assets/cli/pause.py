"""Commands ``vlm-assets pause`` and ``resume``: before a reboot, or for a night's rest.

What lives here: arguments, output, and waiting until the devices are free. What does not: the pause
(``resources/state/pause.py``) and what stands still for it (``vlm_assets/assets/run_progress.py``).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.options import Home, app, chosen_settings
from vlm_assets.operate.terminal import CommandError, say
from vlm_assets.settings import PREFIX

if TYPE_CHECKING:
    from resources.devices.resource import GpuResource
    from vlm_assets.settings import Settings

DRAIN_SECONDS = 120.0
"""Longest wait for materializations to commit and end: a batch takes 20 s by plan, a model loads longer."""

_LOOK_SECONDS = 0.5


@app.command(epilog="vlm-assets pause --reason 'a new kernel'")
def pause(
    home: Home = None,
    reason: Annotated[str, typer.Option(help="Why, for whoever looks at the pages.")] = "",
) -> None:
    """Let every schedule, retry and materialization stand still; returns when the devices are free.

    Running materializations commit what is finished and end as interrupted; what starts meanwhile waits.
    Model servers that wait for their next partition are ended.
    Exit code 1 if a device is still held after two minutes.
    """
    from resources.devices.loaded_servers import end_loaded_servers
    from resources.state.pause import pause as stand_still
    from vlm_assets.resource_settings import build_gpu, control_state

    current = _of_a_home(chosen_settings(home))
    standing = stand_still(control_state(current), reason, now=time.time())
    say(f"Everything is {standing.sentence()}.")
    left = _drained(build_gpu(current))
    left += end_loaded_servers(current.state_directory, logging.getLogger(__name__))
    for sentence in left:
        say(sentence, fg="yellow")
    if left:
        say("Still paused. Wait for them, or terminate their runs in the UI: committed rows stay.")
        raise typer.Exit(1)
    say("No device is held: the machine can be rebooted.")


def _of_a_home(settings: Settings) -> Settings:
    """The same, where anything was ever done there. Raises CommandError."""
    from vlm_assets.catalog.catalog import catalog_path

    if not catalog_path(settings.home).exists() and not settings.state_directory.is_dir():
        raise CommandError(
            f"There is no data set in {settings.home}, so nothing was changed, and whatever runs elsewhere"
            f" goes on. Name its folder: --home DIR, or {PREFIX}HOME."
        )
    return settings


def _drained(gpu: GpuResource) -> list[str]:
    """Wait until no device is held; what is said of those that still are after DRAIN_SECONDS."""
    leases = gpu.leases()
    deadline = time.monotonic() + DRAIN_SECONDS
    while (holders := leases.holders()) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return [held.sentence() for held in holders]


@app.command(epilog="vlm-assets resume")
def resume(home: Home = None) -> None:
    """Lift the pause: waiting runs go on at once, schedules at their next tick."""
    from resources.state.pause import resume as go_on
    from vlm_assets.resource_settings import control_state

    stood = go_on(control_state(_of_a_home(chosen_settings(home))))
    say("Nothing was paused." if stood is None else "The pause is lifted: everything goes on.")
