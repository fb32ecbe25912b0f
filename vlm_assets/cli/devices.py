"""The command ``vlm-assets devices``: what there is to work on, who has it, and taking a left-out one back.

What lives here: arguments and output. What does not: what is found and noted (``resources/devices``).
"""

from __future__ import annotations

from typing import Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say

TakeBack = Annotated[
    str | None, typer.Option("--take-back", metavar="ID", help="Use a device again that was left out.")
]


@app.command(epilog="vlm-assets devices --take-back GPU-1")
def devices(home: Home = None, take_back: TakeBack = None, as_json: AsJson = False) -> None:
    """Show the devices: free, held by which run, with a model server, failed before, or left out."""
    from vlm_assets.resource_settings import build_gpu

    gpu = build_gpu(chosen_settings(home))
    if take_back is not None:
        forgotten = len(gpu.left_out().take_back(take_back).failures)
        say(f"{take_back} is used again; {forgotten} failures are forgotten.")
        return
    records = gpu.left_out().records()
    held = {one.device.id: one for one in gpu.leases().holders()}
    servers = {one.device: one for one in gpu.loaded_servers().living()}
    shown = []
    for device in gpu.find():
        record = records.get(device.id)
        state = "free"
        if device.id in held:
            state = "held"
        if record is not None and record.left_out_at is not None:
            state = "left out"
        said = [held[device.id].sentence()] if device.id in held else []
        said += [record.sentence(device.id)] if record is not None else []
        said += [servers[device.id].sentence()] if device.id in servers else []
        shown.append({"id": device.id, "name": device.name, "state": state, "said": " ".join(said)})
    if as_json:
        say_as_json(shown)
        return
    for one in shown:
        say(f"{one['id']}  {one['name']}: {one['state']}. {one['said']}".rstrip())
