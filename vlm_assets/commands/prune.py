"""The command ``prune``: lists what ``services/pruning.py`` finds, asks, and has it removed."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from vlm_assets.commands.terminal import (
    AsJson,
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
from vlm_assets.config.settings import Settings
from vlm_assets.services.progress import doing
from vlm_assets.services.pruning import (
    RemovalKind,
    delete_set,
    find_removable,
    remove,
    remove_stored,
    removed_set,
)
from vlm_catalog.catalog import Catalog
from vlm_durable.wording import counted

_EXAMPLES = """\b
vlm-assets prune            list it, then ask
vlm-assets prune --yes      remove it
vlm-assets prune --json     list it as JSON; nothing is removed without --yes
vlm-assets prune --set condition     delete all files of this question set, which no settings name"""


@app.command("prune", epilog=_EXAMPLES)
def prune_command(
    removed: Annotated[
        str | None,
        typer.Option("--set", metavar="NAME", help="Delete all files of this question set instead."),
    ] = None,
    home: Home = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """List what takes space and is needed no more; then remove it.

    Earlier versions, journals that a publication superseded, quarantined files, abandoned temporaries.
    Only where the published file and its second copy are whole to the byte.
    """
    settings = chosen_settings(home)
    if removed is not None:
        _delete_set(settings, removed, yes=yes, as_json=as_json)
        return
    doing("looking for what is needed no more")
    removable = find_removable(settings, Catalog.open(settings.home))
    removals, in_store = removable.removals, removable.in_store
    if as_json:
        sentences = [*remove(settings, removals), *remove_stored(settings, in_store)] if yes else []
        listed = [
            {
                "asset": removal.asset,
                "what": removal.kind,
                "path": removal.path,
                "bytes": removal.bytes,
                "why": removal.why,
            }
            for removal in removals
        ]
        listed += [{**vars(leftover), "what": "journal in the store"} for leftover in in_store]
        say_as_json(
            {
                "removals": listed,
                "kept": removable.kept,
                "bytes": removable.bytes,
                "done": yes,
                "sentences": sentences,
            }
        )
        return
    say_list(removable.kept, "yellow")
    if not removals and not in_store:
        say("Nothing to prune.")
        return
    say_list(
        [
            f"journal in the store: {leftover.key} of {leftover.asset}, generation {leftover.generation}"
            f" ({counted(leftover.objects, 'objects')}, {leftover.bytes:,} bytes; its work is published, or"
            " was given up)"
            for leftover in in_store
        ]
    )
    say_list(
        [
            f"{removal.kind.value}: {removal.path} ({removal.bytes:,} bytes; {removal.why})"
            for removal in removals
        ]
    )
    for kind in RemovalKind:
        if sizes := [removal.bytes for removal in removals if removal.kind is kind]:
            say(f"{len(sizes)} x {kind.value}: {sum(sizes) / 1e6:,.1f} MB")
    if agreed(f"Remove these for good ({removable.bytes / 1e6:,.1f} MB)?", yes):
        say_all(chain(remove(settings, removals), remove_stored(settings, in_store)))


def _delete_set(settings: Settings, name: str, *, yes: bool, as_json: bool) -> None:
    asset = removed_set(settings, name)
    published = len(asset.published_keys())
    if as_json:
        sentences = list(delete_set(settings, asset)) if yes else []
        say_as_json({"asset": asset.name, "published": published, "done": yes, "sentences": sentences})
        return
    rows = f"{counted(published, 'published partitions')} here, and what the store has of it"
    if agreed(f"Delete all files of the question set {name} for good ({rows})?", yes):
        say_all(delete_set(settings, asset))
