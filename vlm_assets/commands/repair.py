"""The command ``repair``: lists what ``services/repairs.py`` finds, asks, and has it done.

A person may also choose a catalogue, and accept what was lost, here.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vlm_assets.assets.stored_settings import accept_settings as forget_settings
from vlm_assets.commands.terminal import (
    AsJson,
    Deep,
    Home,
    Yes,
    agreed,
    app,
    chosen_settings,
    say,
    say_all,
    say_as_json,
    say_list,
)
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.home_audit import audit
from vlm_assets.services.journal_losses import accept_loss, find_losses
from vlm_assets.services.progress import doing
from vlm_assets.services.repairs import carry_out, find_repairs, older_versions
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_copies import quarantine
from vlm_catalog.chosen_catalog import check_catalog, put_in_place
from vlm_catalog.stored_catalog import pull_catalog
from vlm_durable.mirror.stored_journal import HeadDamagedError
from vlm_durable.state.workers import Workers
from vlm_durable.wording import counted

_EXAMPLES = """\b
vlm-assets repair                   list what is wrong and what would be done
vlm-assets repair --deep --yes      read every byte, then do it
vlm-assets repair --failed --json   as JSON; nothing is changed without --yes"""


@app.command("repair", epilog=_EXAMPLES)
def repair_command(
    home: Home = None,
    deep: Deep = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Try the properties that ended as failed again, too.")
    ] = False,
    accept_loss: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Give up this partition's committed rows that cannot be restored."),
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Make this file, or object on S3, the catalogue. It is checked first.",
        ),
    ] = None,
    accept_version: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Let this partition's older version that was put back count as the newest."
        ),
    ] = None,
    newest_here: Annotated[
        bool,
        typer.Option(
            "--newest-here",
            help="Fill VLM_ASSETS_STORE, which lost files, from here: no other machine has newer ones.",
        ),
    ] = False,
    accept_settings: Annotated[
        bool,
        typer.Option(
            "--accept-settings",
            help="Let the next run over VLM_ASSETS_STORE say what all machines must have.",
        ),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """List what is wrong and what would put it right; then do it.

    A damaged file comes back from its second copy at once.
    What must be computed again is launched in the running Dagster; if none runs, it says what is not done.
    Nothing is deleted: what is damaged is kept in .quarantine.
    Exit code 1 if anything is wrong still.
    """
    settings = chosen_settings(home)
    doing("looking at what is here")
    if catalog is not None:
        raise typer.Exit(_choose_catalog(settings, catalog, yes))
    if accept_settings:
        forget_settings(settings.mirror, [asset.name for asset in settings.partitioned_assets])
        say("The next run says which settings, models and code all machines must have.")
        raise typer.Exit(0)
    if accept_version is not None:
        raise typer.Exit(_accept_version(settings, accept_version, yes))
    if accept_loss is not None:
        if as_json:
            raise typer.BadParameter("--json and --accept-loss do not go together.")
        raise typer.Exit(_accept_loss(settings, accept_loss, yes))

    audited = audit(settings, Catalog.open(settings.home), deep=deep)
    repairs = find_repairs(settings, audited, failed=failed)
    if as_json:
        sentences: list[str] = []
        is_right = audited.ok and not repairs
        if repairs and yes:
            is_right = carry_out(settings, repairs, sentences.append, newest_here=newest_here)
        listed = [
            {
                "asset": repair.asset,
                "key": repair.key,
                "remedy": repair.remedy.name,
                "why": repair.why,
                "findings": [asdict(finding) for finding in repair.findings],
                "path": repair.path,
            }
            for repair in repairs
        ]
        say_as_json(
            {
                "right": is_right,
                "verdict": audited.verdict(),
                "repairs": listed,
                "done": yes,
                "sentences": sentences,
            }
        )
        raise typer.Exit(0 if is_right else 1)
    if not repairs:
        say(audited.verdict() if audited.ok else "Nothing here can be put right by itself.")
        if audited.ok:
            say("Nothing to repair.")
        raise typer.Exit(0 if audited.ok else 1)
    say_list([repair.sentence() for repair in repairs], "yellow")
    if not agreed(f"Do this ({counted(len(repairs), 'repairs')})?", yes):
        raise typer.Exit(1)
    raise typer.Exit(0 if carry_out(settings, repairs, say, newest_here=newest_here) else 1)


def _choose_catalog(settings: Settings, place: str, yes: bool) -> int:
    doing(f"comparing {place} with what was published")
    chosen = check_catalog(settings.home, place, settings.mirror)
    say_all(chosen.sentences())
    if not agreed(f"Make it the catalogue of {settings.home}?", yes):
        return 1
    header = put_in_place(settings.home, chosen, settings.mirror)
    say(
        f"It is the catalogue now, as ingest {header.sequence}. What stood there is kept in"
        f" {quarantine(settings.home)}."
    )
    return 0


def _accept_loss(settings: Settings, key: str, yes: bool) -> int:
    if _is_worked_on(settings, key):
        return 1
    pull_catalog(settings.home, settings.mirror)
    losses = find_losses(settings, Catalog.open(settings.home), key, report=say)
    if not losses:
        say(f"Nothing of {key} is lost under these settings: a start goes on with all that is committed.")
        return 0
    for loss in losses:
        error = loss.error
        if isinstance(error, HeadDamagedError):
            say(f"{loss.partition.asset} {key} (generation {loss.generation}): {error}", bold=True)
            continue
        say(
            f"{loss.partition.asset} {key} (generation {loss.generation}): {loss.lost_rows} of"
            f" {counted(error.promised_rows, 'committed rows')} cannot be restored; {error.restorable_rows}"
            " can.",
            bold=True,
        )
        say_list([f"missing: {reason}" for reason in error.reasons], "yellow")
        copies = ", ".join(map(str, error.copies)) or "none that the journal knows of"
        say(f"Copies to look at first: {copies}")
    if not agreed("Give these rows up? They are computed again at the next start.", yes):
        return 1
    for loss in losses:
        say(accept_loss(loss, settings.mirror))
    return 0


def _accept_version(settings: Settings, key: str, yes: bool) -> int:
    if _is_worked_on(settings, key):
        return 1
    older = list(older_versions(settings, key))
    if not older:
        say(f"{key} was not put back to an older version: there is nothing to accept.")
        return 0
    say_list([sentence for _, sentence in older], "yellow")
    if not agreed("Let the older version count as the newest? What came after it is given up.", yes):
        return 1
    for versions, _ in older:
        say_all(versions.accept_older(key))
    return 0


def _is_worked_on(settings: Settings, key: str) -> bool:
    """Whether a run works on a partition; then say so."""
    workers = Workers(control_state(settings)).living()
    working = [worker for worker in workers if worker.partition == key]
    if working:
        say(f"Run {working[0].run_id} works on {key} on {working[0].host}. Nothing was changed.")
    return bool(working)
