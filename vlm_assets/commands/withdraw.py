"""The command ``withdraw``: asks, and has ``services/withdrawal.py`` remove properties for good."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.commands.terminal import Home, Yes, agreed, app, chosen_settings, say, say_all
from vlm_assets.config.settings import Settings
from vlm_assets.services.progress import doing
from vlm_assets.services.withdrawal import (
    Withdrawal,
    begin_list,
    pending_withdrawal,
    prepare_withdrawal,
    returned_ids,
    undo_withdrawal,
    withdraw,
)
from vlm_catalog.catalog import Catalog
from vlm_catalog.withdrawn_ids import share_withdrawn
from vlm_durable.commands import command
from vlm_durable.wording import counted

_EXAMPLES = """\b
vlm-assets withdraw --ids ids.txt   one id a line
vlm-assets withdraw                 go on with one that was cut short; withdraw again what came back
vlm-assets withdraw --undo ID       let an ingest take this property in again"""


@app.command("withdraw", epilog=_EXAMPLES)
def withdraw_command(
    ids: Annotated[
        Path | None, typer.Option("--ids", help="A text file with one property id a line.", exists=True)
    ] = None,
    undo: Annotated[
        list[str] | None,
        typer.Option("--undo", metavar="ID", help="Take this id off the list of withdrawn ids."),
    ] = None,
    new_list: Annotated[
        bool,
        typer.Option("--new-list", help="Begin the list of withdrawn ids anew, after both copies were lost."),
    ] = False,
    home: Home = None,
    yes: Yes = False,
) -> None:
    """Remove properties for good, from files, versions and journals.

    Takes them out of the catalogue, published files, earlier versions and journals, and keeps them out.
    Their images, your listing and Dagster's own history are not touched.
    If it is cut short, the same command goes on, and a command with other ids finishes it first.
    Exit code 0 if all is removed, 1 if not.
    """
    settings = chosen_settings(home)
    doing("looking for what is to be removed")
    if undo:
        undo_withdrawal(settings, undo)
        say(
            f"{counted(len(undo), 'ids are', 'id is')} off the list. The next ingest that lists them gives"
            " them new numbers."
        )
        raise typer.Exit(0)
    if new_list:
        has_list = share_withdrawn(settings.home, settings.mirror) is not None
        if not has_list:
            begin_list(settings, accepts_loss=True)
        say("The list is there already." if has_list else "A new list of withdrawn ids was begun.")
        raise typer.Exit(0)
    named_ids = None if ids is None else [line for line in ids.read_text().splitlines() if line]
    pending = pending_withdrawal(settings)
    if pending is not None:
        say("A withdrawal was cut short. It is finished first.", fg="yellow")
        _withdraw(settings, pending)
        named_ids = [property_id for property_id in named_ids or () if property_id not in pending.tombstones]
    if pending is None or named_ids:
        _withdraw(settings, _agreed_withdrawal(settings, named_ids, yes))


def _withdraw(settings: Settings, withdrawal: Withdrawal) -> None:
    say_all(withdraw(settings, withdrawal))
    say(
        f"{counted(len(withdrawal.tombstones), 'properties are', 'property is')} withdrawn. Take them out of"
        " your listing too; an ingest of"
        " it does not bring them back."
    )


def _agreed_withdrawal(settings: Settings, named_ids: Collection[str] | None, yes: bool) -> Withdrawal:
    """The withdrawal of the named ids, or of those that came back, where a person agrees; else it exits."""
    if named_ids is None:
        named_ids = returned_ids(settings, Catalog.open(settings.home))
        if not named_ids:
            say(
                f"There is no withdrawal to go on with. Name the ids: {command('withdraw', '--ids', 'FILE')}."
            )
            raise typer.Exit(0)
        say(
            f"{counted(len(named_ids), 'properties')} that were withdrawn are in the catalogue again.",
            fg="yellow",
        )
    withdrawal = prepare_withdrawal(settings, named_ids)
    place = f" of {counted(len(withdrawal.keys), 'partitions')}" if withdrawal.keys else ""
    if not agreed(f"Remove {counted(len(withdrawal.tombstones), 'properties')}{place} for good?", yes):
        raise typer.Exit(1)
    return withdrawal
