"""Commands that look after what was published: ``vlm-assets audit``, ``repair`` and ``prune``.

What lives here: arguments, output, the question before anything is changed, exit codes. What does not: what
is found and done (``audit.py``, ``repair.py``, ``recomputation.py``, ``accepted_loss.py``, ``prune.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, chosen_settings
from vlm_assets.operate.terminal import say

if TYPE_CHECKING:
    from vlm_assets.operate.audit.audit import Audit
    from vlm_assets.operate.repair import Repair
    from vlm_assets.settings import Settings

SHOWN = 20
"""Lines of a list for people; the rest is counted."""

Deep = Annotated[bool, typer.Option("--deep", help="Read every byte of every file, copy and journal.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(audit)
    app.command()(repair)
    app.command()(prune)


def audit(home: Home = None, deep: Deep = False, as_json: AsJson = False) -> None:
    """Prove from what is on disk that every published property is there once, ok or failed.

    Reads only. Exit code 1 if anything is wrong; partitions not published yet are counted, not wrong.
    """
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.audit.audit import audit as look

    current = chosen_settings(home)
    found = look(current, Catalog.open(current.home), deep=deep)
    if as_json:
        say(found.to_json())
    else:
        _show_audit(found)
    raise typer.Exit(0 if found.ok else 1)


def _show_audit(found: Audit) -> None:
    from rich.table import Table

    from vlm_assets.assets.partition_state import State
    from vlm_assets.operate.terminal_console import TerminalConsole

    table = Table("Properties", *found.assets)
    totals = [found.total(asset) for asset in found.assets]
    for name in ("expected", "ok", "failed", "missing", "duplicate", "foreign", "not_yet"):
        said = "not published yet" if name == "not_yet" else name
        table.add_row(said, *(f"{getattr(total, name):,}" for total in totals))
    table.add_section()
    for state in State:
        counts = [found.partitions_in(asset, state) for asset in found.assets]
        if any(counts) or state is State.DONE:
            table.add_row(f"partitions {state.value}", *(f"{count:,}" for count in counts))
    TerminalConsole().print(table)
    _list([f"{one.asset} {one.key or ''}: {one.sentence}" for one in found.wrong], "red")
    _list([f"{one.asset} {one.key or ''}: {one.sentence}" for one in found.warnings], "yellow")
    say(found.verdict(), fg="green" if found.ok else "red", bold=True)


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
) -> None:
    """List what is wrong and what would put it right; then, if you say so, do that.

    A damaged file comes back from its second copy at once.
    What must be computed again is launched in the running Dagster, else the commands are shown.
    Nothing is deleted: what is damaged is kept in .quarantine.
    """
    current = chosen_settings(home)
    if accept_loss is not None:
        raise typer.Exit(_accept_loss(current, accept_loss, yes))
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.audit.audit import audit as look
    from vlm_assets.operate.repair import COMPUTING, plan_repairs

    found = look(current, Catalog.open(current.home), deep=deep)
    repairs = plan_repairs(current, found, failed=failed)
    if not repairs:
        say(found.verdict() if found.ok else "Nothing here can be put right by itself.")
        if found.ok:
            say("Nothing to repair.")
        raise typer.Exit(0 if found.ok else 1)
    _list([one.sentence() for one in repairs], "yellow")
    if not agreed(f"Do this ({len(repairs)} repairs)?", yes):
        raise typer.Exit(1)
    running = _running(current)
    for key in sorted({one.key for one in repairs if one.key in running}):
        say(f"{key} is left to the run that works on it now; look again when it has ended.")
    left = [one for one in repairs if one.key not in running]
    done = _put_right(current, [one for one in left if one.way not in COMPUTING or one.forgets])
    computed = _compute(current, found, [one for one in left if one.way in COMPUTING])
    done = done and len(left) == len(repairs)
    raise typer.Exit(0 if done and computed else 1)


def _running(current: Settings) -> frozenset[str]:
    """Partitions that a process works on now."""
    from vlm_assets.resource_settings import build_gpu

    holders = build_gpu(current).leases().holders()
    return frozenset(held.record.holder.partition for held in holders if held.record)


def _put_right(current: Settings, repairs: Sequence[Repair]) -> bool:
    from resources.publishing.errors import PublishedError
    from vlm_assets.operate.repair import Way, put_right

    done = True
    for one in repairs:
        try:
            for sentence in put_right(current, one):
                say(sentence)
        except (PublishedError, OSError) as error:
            done = False
            say(f"{one.asset} {one.key or one.path}: {error}", fg="red", err=True)
        done = done and one.way is not Way.BY_HAND
    return done


def _compute(current: Settings, found: Audit, repairs: Sequence[Repair]) -> bool:
    from vlm_assets.assets.recomputation import commands, launch, recomputations
    from vlm_assets.operate.dagster_server.api import DagsterApi
    from vlm_assets.operate.dagster_server.home import running_address

    if not repairs:
        return True
    wanted = recomputations(repairs, *found.assets)
    address = running_address(current.dagster_home)
    if address is not None:
        for sentence in launch(DagsterApi(address), wanted):
            say(sentence)
        return True
    say("No Dagster runs on this home. Start it (`make run`, or `vlm-assets demo`) and repair again, or run:")
    for line in commands(current, wanted):
        say(f"  {line}")
    return False


def _accept_loss(current: Settings, key: str, yes: bool) -> int:
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.accepted_loss import accept, find_losses

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
        _list([f"missing: {reason}" for reason in error.reasons], "yellow")
        copies = ", ".join(map(str, error.copies)) or "none that the journal knows of"
        say(f"Copies to look at first: {copies}")
    if not agreed("Give these rows up? They are computed again at the next start.", yes):
        return 1
    for loss in losses:
        say(accept(loss))
    return 0


def prune(home: Home = None, yes: Yes = False) -> None:
    """List what takes space and is needed no more; then, if you say so, remove it.

    Earlier versions, journals that a publication superseded, quarantined files, abandoned temporaries.
    Only where the published file and its second copy are whole to the byte.
    """
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.prune import by_kind, plan_prune, remove

    current = chosen_settings(home)
    plan = plan_prune(current, Catalog.open(current.home))
    _list(plan.kept, "yellow")
    if not plan.removals:
        say("Nothing to prune.")
        return
    _list([f"{one.what.value}: {one.path} ({one.bytes:,} bytes; {one.why})" for one in plan.removals], None)
    for what, (count, size) in by_kind(plan.removals).items():
        if count:
            say(f"{count} x {what.value}: {size / 1e6:,.1f} MB")
    if not agreed(f"Remove these for good ({plan.bytes / 1e6:,.1f} MB)?", yes):
        raise typer.Exit(1)
    for sentence in remove(current, plan.removals):
        say(sentence)


def agreed(question: str, yes: bool) -> bool:
    """What a person says; without a terminal and without --yes, no."""
    if yes:
        return True
    if not sys.stdin.isatty():
        say("Nothing was changed. With --yes it is done.")
        return False
    return typer.confirm(question)


def _list(sentences: Sequence[str], color: str | None) -> None:
    for sentence in sentences[:SHOWN]:
        say(sentence, fg=color)
    if len(sentences) > SHOWN:
        say(f"... and {len(sentences) - SHOWN} more", fg=color)
