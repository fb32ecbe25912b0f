"""The command ``changes``: lists changes of what is published, or of the Iceberg table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_json
from vlm_assets.services.command_error import CommandError
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.mirror.bucket import place_of
from vlm_durable.wording import counted
from vlm_results.changes import Change, Kind, PointInTime, SnapshotWriter, changes, line_of, told_before

_EXAMPLES = """\b
vlm-assets changes --next seen.1 --json                   everything is new
vlm-assets changes --since seen.1 --next seen.2 --json    what changed from then on
vlm-assets changes --since 2026-11-01                     how much, without a snapshot
vlm-assets changes --table DIR --since 8127360123         between two snapshots of an Iceberg table"""


@app.command("changes", epilog=_EXAMPLES)
def changes_command(
    home: Home = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="SNAPSHOT|TIME", help="What --next wrote, or a time (UTC unless it says)."),
    ] = None,
    following: Annotated[
        Path | None,
        typer.Option("--next", metavar="SNAPSHOT", help="Write here what to give to --since next time."),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Compare snapshots of the Iceberg table in this folder, not what is published: --since is"
            " the id of one, or a time.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List published properties that are new, changed or withdrawn, for a database that follows.

    With --json: one line of JSON a property, and a last one with the counts. Take them over, then keep the
    snapshot of --next in place of the one before: nothing is missed, and nothing told twice.
    """
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    if following is not None and since is not None and following.resolve() == Path(since).resolve():
        raise CommandError(
            "--next names the snapshot of --since. Name another file: until what is told was taken over, the"
            " earlier snapshot is needed."
        )
    counts: Counter[Kind] = Counter()

    def report(compared: Iterable[Change]) -> None:
        for change in compared:
            counts[change.change] += 1
            if as_json:
                say_json(line_of(change))

    next_ = None if following is None else str(following)
    not_compared: list[str] = []
    if table is not None:
        from vlm_results.described_table import TableChanges, TablePlace

        if following is not None:
            raise CommandError(
                "A table keeps its snapshots itself: leave out --next. The last line names the newest."
            )
        between = TableChanges(TablePlace.from_settings(current, place_of(table)).read(), since)
        report(between.changes())
        next_ = str(between.snapshot)
    else:
        before = told_before(since, current, catalog)
        with SnapshotWriter.opened(following, catalog) as writer:
            report(changes(current, catalog, before, writer))
            if writer is not None:
                writer.finish()
        not_compared = before.not_compared if isinstance(before, PointInTime) else []
    total = {kind.value: counts[kind] for kind in Kind}
    if as_json:
        say_json(json.dumps({**total, "not_compared": len(not_compared), "next": next_}))
        return
    say(", ".join(f"{count:,} {kind}" for kind, count in total.items()))
    if not_compared:
        say(
            f"{counted(len(not_compared), 'partitions')}, such as {not_compared[0]}: their version of that"
            " time is kept no more, and all of their rows count as changed. A snapshot is exact:"
            f" {command('changes', '--next', 'FILE')}."
        )
