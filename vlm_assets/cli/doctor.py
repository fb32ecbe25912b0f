"""``vlm-assets doctor``: is all there that a long run will need?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say

_EXAMPLES = """\b
vlm-assets doctor
vlm-assets doctor --quick --json"""

COLORS = {"ok": "green", "warning": "yellow", "error": "red"}

Quick = Annotated[bool, typer.Option("--quick", help="Only what takes under two seconds.")]


@app.command(epilog=_EXAMPLES)
def doctor(home: Home = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Try all that a long run will need: storage, space, devices, model, images, alerts, limits, Dagster.

    Describes one property, sends a test message to each alert target, and takes two minutes at most. Nothing
    of the home is changed. Exit code 1 where a check finds an error.
    """
    from vlm_assets.operate.doctor import examine

    found = []
    for one in examine(chosen_settings(home), quick=quick):
        found.append(one)
        if not as_json:
            say(f"{one.level:7}  {one.check}: {one.message}", fg=COLORS[one.level])
    if as_json:
        say_as_json([asdict(one) for one in found])
    raise typer.Exit(1 if any(one.level == "error" for one in found) else 0)
