"""``vlm-assets rehearse``: the whole run before the run, with its faults."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say

if TYPE_CHECKING:
    from vlm_assets.rehearsal.rehearse import Rehearsal

_EXAMPLES = """\b
vlm-assets rehearse --days 25 --devices 10 --nodes 4     your catalogue
vlm-assets rehearse --properties 1350000 --seed 7        a made-up one"""


@app.command(epilog=_EXAMPLES)
def rehearse(
    home: Home = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Draws the faults; the same seed is replayed exactly.")
    ] = 1,
    days: Annotated[float, typer.Option(min=0.01, help="Days that the run takes if nothing happens.")] = 25.0,
    devices: Annotated[int, typer.Option(min=1, max=1000, help="GPUs in all.")] = 10,
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Machines that they are in.")] = 4,
    faults: Annotated[int | None, typer.Option(min=0, help="How many; default: four a day.")] = None,
    properties: Annotated[
        int | None, typer.Option(min=1, help="Of a made-up catalogue; default: the home's own.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write the timeline as a picture (PNG) to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse the run on a simulated clock: faults by a seed, real decisions, real journals.

    Nothing of the home is changed. Exit code 1 if a row is lost or doubled, or a partition is left over.
    """
    from vlm_assets.rehearsal.rehearse import Scenario, rehearse
    from vlm_assets.rehearsal.timeline import draw_timeline

    scenario = Scenario(seed, days, devices, nodes, faults, properties)
    found = rehearse(chosen_settings(home), scenario)
    if picture is not None:
        picture.write_bytes(draw_timeline(found))
    if as_json:
        shown = asdict(found)
        for name in ("spans", "struck", "progress"):
            del shown[name]
        say_as_json(shown)
    else:
        _show(found, picture)
    if not found.nothing_is_lost:
        raise typer.Exit(1)


def _show(found: Rehearsal, picture: Path | None) -> None:
    say(
        f"{found.properties:,} properties in {found.partitions:,} partitions on {found.devices} devices of"
        f" {found.nodes} machines, {sum(found.faults.values())} faults (seed {found.seed}):"
    )
    say("  " + ", ".join(f"{count} {kind}" for kind, count in found.faults.items()))
    lost = "nothing is lost and nothing comes twice" if not (found.lost or found.doubled) else "BROKEN"
    say(f"Rows lost: {found.lost}. Doubled: {found.doubled}. So {lost}.", bold=True)
    say(f"Recomputed: {found.recomputed:,} rows, after {found.deaths} deaths of a process at its journal.")
    say(
        f"Done after {found.days_simulated:.1f} days; without faults it would be {found.days_planned:.1f}."
        + (f" {found.unfinished} partitions are left over." if found.unfinished else "")
    )
    told = ", ".join(f"{count} {kind}" for kind, count in found.alerts_by_kind.items()) or "none"
    say(f"Alerts: {found.alerts} ({told}). A person put {found.by_hand} partitions right by hand.")
    say(f"Rehearsed in {found.seconds:.0f} s." + (f" Timeline: {picture}" if picture else ""))
