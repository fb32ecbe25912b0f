"""``vlm-assets repair``: what an audit found is put right, after a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.options import (
    AsJson,
    Deep,
    Home,
    Yes,
    agreed,
    app,
    chosen_settings,
    say_as_json,
    say_list,
)
from vlm_assets.operate.terminal import say

if TYPE_CHECKING:
    from vlm_assets.operate.audit import Audit
    from vlm_assets.operate.repair import Repair
    from vlm_assets.settings import Settings

_EXAMPLES = """\b
vlm-assets repair                   list what is wrong and what would be done
vlm-assets repair --deep --yes      read every byte, then do it
vlm-assets repair --failed --json   as JSON; nothing is changed without --yes"""


@app.command(epilog=_EXAMPLES)
def repair(
    home: Home = None,
    deep: Deep = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Try the properties that ended as failed again, too.")
    ] = False,
    accept_loss: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Give up this partition's committed rows that cannot be restored."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """List what is wrong and what would put it right; then, if you say so, do that.

    A damaged file comes back from its second copy at once.
    What must be computed again is launched in the running Dagster, else the commands are shown.
    Nothing is deleted: what is damaged is kept in .quarantine.
    Exit code 1 if anything is wrong still.
    """
    current = chosen_settings(home)
    if accept_loss is not None:
        if as_json:
            raise typer.BadParameter("--json and --accept-loss do not go together.")
        raise typer.Exit(_accept_loss(current, accept_loss, yes))
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.audit import audit as look
    from vlm_assets.operate.repair import plan_repairs

    found = look(current, Catalog.open(current.home), deep=deep)
    repairs = plan_repairs(current, found, failed=failed)
    if as_json:
        said: list[str] = []
        right = _repair(current, found, repairs, said.append) if repairs and yes else found.ok and not repairs
        planned = [
            {"asset": one.asset, "key": one.key, "way": one.way.name, "why": one.why, "path": one.path}
            for one in repairs
        ]
        say_as_json(
            {"right": right, "verdict": found.verdict(), "repairs": planned, "done": yes, "said": said}
        )
        raise typer.Exit(0 if right else 1)
    if not repairs:
        say(found.verdict() if found.ok else "Nothing here can be put right by itself.")
        if found.ok:
            say("Nothing to repair.")
        raise typer.Exit(0 if found.ok else 1)
    say_list([one.sentence() for one in repairs], "yellow")
    if not agreed(f"Do this ({len(repairs)} repairs)?", yes):
        raise typer.Exit(1)
    raise typer.Exit(0 if _repair(current, found, repairs, say) else 1)


def _repair(current: Settings, found: Audit, repairs: Sequence[Repair], tell: Callable[[str], None]) -> bool:
    """Do the repairs; returns whether all are done."""
    from vlm_assets.operate.repair import COMPUTING

    running = _running(current)
    for key in sorted({one.key for one in repairs if one.key in running}):
        tell(f"{key} is left to the run that works on it now; look again when it has ended.")
    left = [one for one in repairs if one.key not in running]
    done = _put_right(current, [one for one in left if one.way not in COMPUTING or one.forgets], tell)
    computed = _compute(current, found, [one for one in left if one.way in COMPUTING], tell)
    return done and computed and len(left) == len(repairs)


def _running(current: Settings) -> frozenset[str]:
    """Partitions that a process works on now."""
    from vlm_assets.resource_settings import build_gpu

    holders = build_gpu(current).leases().holders()
    return frozenset(held.record.holder.partition for held in holders if held.record)


def _put_right(current: Settings, repairs: Sequence[Repair], tell: Callable[[str], None]) -> bool:
    from resources.publishing.errors import PublishedError
    from vlm_assets.operate.repair import Way, put_right

    done = True
    for one in repairs:
        try:
            for sentence in put_right(current, one):
                tell(sentence)
        except (PublishedError, OSError) as error:
            done = False
            tell(f"Not repaired: {one.asset} {one.key or one.path}: {error}")
        done = done and one.way is not Way.BY_HAND
    return done


def _compute(current: Settings, found: Audit, repairs: Sequence[Repair], tell: Callable[[str], None]) -> bool:
    from vlm_assets.operate.dagster_server.api import DagsterApi
    from vlm_assets.operate.dagster_server.home import running_address
    from vlm_assets.operate.repair import commands, launch, recomputations

    if not repairs:
        return True
    wanted = recomputations(repairs, *found.assets)
    address = running_address(current.dagster_home)
    if address is not None:
        for sentence in launch(DagsterApi(address), wanted):
            tell(sentence)
        return True
    tell(
        "No Dagster runs on this home. Start it (`vlm-assets serve` or `vlm-assets run`) and repair again,"
        " or run:"
    )
    for line in commands(current, wanted):
        tell(f"  {line}")
    return False


def _accept_loss(current: Settings, key: str, yes: bool) -> int:
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.repair import accept_loss, find_losses

    losses = find_losses(current, Catalog.open(current.home), key)
    if not losses:
        say(f"Nothing of {key} is lost under these settings: a start goes on with all that is committed.")
        return 0
    for loss in losses:
        error = loss.error
        say(
            f"{loss.partition.asset} {key} (generation {loss.generation}): {loss.lost_rows} of"
            f" {error.promised_rows} committed rows cannot be restored; {error.restorable_rows} can.",
            bold=True,
        )
        say_list([f"missing: {reason}" for reason in error.reasons], "yellow")
        copies = ", ".join(map(str, error.copies)) or "none that the journal knows of"
        say(f"Copies to look at first: {copies}")
    if not agreed("Give these rows up? They are computed again at the next start.", yes):
        return 1
    for loss in losses:
        say(accept_loss(loss))
    return 0
