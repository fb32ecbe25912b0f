"""``vlm-assets explore``: what was described as charts, a table and a map in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say

_EXAMPLES = """\b
make explore                               installs the extra, then opens the page
vlm-assets explore --sample 20000
vlm-assets explore --export /srv/pages/properties"""


@app.command(epilog=_EXAMPLES)
def explore(
    home: Home = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page, on loopback.")] = 3400,
    sample: Annotated[int, typer.Option(min=4, help="Properties shown, drawn by a fixed seed.")] = 5000,
    export: Annotated[
        Path | None, typer.Option(help="Write the stand-alone page into this folder instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Charts with filters for every field, a table with thumbnails, a map and neighbours, on loopback."""
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.explore import explore_table, export_page, serve_page

    current = chosen_settings(home)
    found = explore_table(current, Catalog.open(current.home), sample=sample)
    shown = found.table.num_rows
    if export is not None:
        export_page(found, export)

    def told(where: str) -> None:
        if as_json:
            say_as_json({"shown": shown, "of": found.of, "where": where})
        else:
            say(f"{shown:,} of {found.of:,} properties: {where}")

    if export is not None:
        told(str(export))
    else:
        serve_page(current, found, port=port, ready=told)
