"""Command ``vlm-assets withdraw``: arguments, the question, exit codes. ``operate/withdraw.py`` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.cli.options import Home, Yes, agreed, app, chosen_settings
from vlm_assets.operate.terminal import say
from vlm_assets.settings import PREFIX, SettingsError

_EXAMPLES = """\b
vlm-assets withdraw --ids ids.txt   one id a line
vlm-assets withdraw                 go on with a withdrawal that was cut short"""


@app.command(epilog=_EXAMPLES)
def withdraw(
    ids: Annotated[
        Path | None, typer.Option("--ids", help="A text file with one property id a line.", exists=True)
    ] = None,
    home: Home = None,
    yes: Yes = False,
) -> None:
    """Remove properties for good: from the catalogue, published files, earlier versions and journals.

    Their images, your listing and Dagster's own history are not touched.
    If it is cut short, the same command goes on. Exit code 0 if all is removed, 1 if not.
    """
    from vlm_assets.operate.withdraw import pending_withdrawal, plan_withdrawal
    from vlm_assets.operate.withdraw import withdraw as remove

    current = chosen_settings(home)
    if current.store is not None:
        raise SettingsError(
            f"{PREFIX}STORE is set, and withdraw does not reach what {current.store} holds, earlier versions"
            " among them. Nothing was changed."
        )
    wanted = pending_withdrawal(current)
    if wanted is not None:
        say("A withdrawal was cut short. It is finished first.", fg="yellow")
    elif ids is None:
        say("There is no withdrawal to go on with. Name the ids: `vlm-assets withdraw --ids FILE`.")
        raise typer.Exit(0)
    else:
        wanted = plan_withdrawal(current, [line for line in ids.read_text().splitlines() if line])
        where = f" of {len(wanted.keys)} partitions" if wanted.keys else ""
        if not agreed(f"Remove {len(wanted.tombstones)} properties{where} for good?", yes):
            raise typer.Exit(1)
    for sentence in remove(current, wanted):
        say(sentence)
    say(
        f"{len(wanted.tombstones)} properties are withdrawn. Take them out of your listing too; an ingest of"
        " it does not bring them back."
    )
