"""``vlm-assets audit``: is everything there, once?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from vlm_assets.cli.options import AsJson, Deep, Home, app, chosen_settings, say_list
from vlm_assets.operate.terminal import say, say_json

if TYPE_CHECKING:
    from vlm_assets.operate.audit import Audit

_EXAMPLES = """\b
vlm-assets audit
vlm-assets audit --deep --json"""


@app.command(epilog=_EXAMPLES)
def audit(home: Home = None, deep: Deep = False, as_json: AsJson = False) -> None:
    """Prove from what is on disk that every published property is there once, ok or failed.

    Reads only. Exit code 1 if anything is wrong; partitions not published yet are counted, not wrong.
    """
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.audit import audit as look

    current = chosen_settings(home)
    found = look(current, Catalog.open(current.home), deep=deep)
    if as_json:
        say_json(found.to_json())
    else:
        _show(found)
    raise typer.Exit(0 if found.ok else 1)


def _show(found: Audit) -> None:
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
    say_list([f"{one.asset} {one.key or ''}: {one.sentence}" for one in found.wrong], "red")
    say_list([f"{one.asset} {one.key or ''}: {one.sentence}" for one in found.warnings], "yellow")
    say(found.verdict(), fg="green" if found.ok else "red", bold=True)
