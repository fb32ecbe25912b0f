"""The commands ``backup`` and ``restore``; ``services/home_backup.py`` does both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.commands.terminal import AsJson, Deep, Home, app, chosen_settings, say, say_as_json
from vlm_assets.services.home_backup import back_up, restore_home
from vlm_durable.commands import command
from vlm_durable.wording import counted

_BACKUP_EXAMPLES = """\b
vlm-assets backup /mnt/backup/properties
vlm-assets backup /mnt/backup/properties --deep    read all that was copied before, too"""


@app.command("backup", epilog=_BACKUP_EXAMPLES)
def backup_command(
    folder: Annotated[Path, typer.Argument(metavar="DEST", help="A folder, on another disk at best.")],
    home: Home = None,
    deep: Deep = False,
    as_json: AsJson = False,
) -> None:
    """Copy a home into a folder while work goes on; each time only what is new.

    Every file is compared with its digest as it is written.
    A backup that is killed leaves the one before it; the next one goes on.
    Not in it: .env, Dagster's history, .quarantine, and what lies in VLM_ASSETS_STORE.
    """
    backup = back_up(chosen_settings(home), folder, deep=deep)
    if as_json:
        say_as_json(vars(backup))
    else:
        say(backup.sentence())


_RESTORE_EXAMPLES = """\b
vlm-assets restore /mnt/backup/properties --home /srv/properties"""


@app.command("restore", epilog=_RESTORE_EXAMPLES)
def restore_command(
    folder: Annotated[Path, typer.Argument(metavar="SRC", help="The folder of a backup.")],
    home: Home = None,
) -> None:
    """Restore a backup into an empty home.

    Every file is compared with its digest as it is written.
    Work that was committed before the backup is not computed again; later work is.
    """
    settings = chosen_settings(home)
    content = restore_home(settings, folder)
    size = sum(kept.size for kept in content.files.values())
    say(
        f"{settings.home} holds what {content.about['home']} held on {content.about['at']}:"
        f" {counted(len(content.files), 'files')}, {size / 1e6:,.1f} MB, each as it was backed up."
        f" {command('status')} says where every partition stands; {command('run')} goes on."
    )
