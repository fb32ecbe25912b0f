"""``vlm-assets status``: where every partition stands."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings
from vlm_assets.operate.terminal import say_json

if TYPE_CHECKING:
    from vlm_assets.operate.status import Status

_EXAMPLES = """\b
vlm-assets status
vlm-assets status --watch
vlm-assets status --since 2026-01-31T08:00"""

_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
"""Local times, as people write them."""


@app.command(epilog=_EXAMPLES)
def status(
    home: Home = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep it up to date until Ctrl-C.")] = False,
    since: Annotated[
        datetime | None,
        typer.Option(formats=_TIMES, help="List what was tried again and done since then; else a day ago."),
    ] = None,
) -> None:
    """Say where every partition stands, what is left, and in which order it runs; reads what is on disk."""
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate import status_view
    from vlm_assets.operate.status import read_status
    from vlm_assets.operate.terminal_console import TerminalConsole

    current = chosen_settings(home)

    def read() -> Status:
        catalog = Catalog.open(current.home)
        return read_status(current, catalog, since=since.timestamp() if since else None)

    if as_json:
        say_json(read().to_json())
    elif watch:
        status_view.watch(read, TerminalConsole())
    else:
        status_view.show(TerminalConsole(), read())
