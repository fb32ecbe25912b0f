"""``vlm-assets show``: one property."""

from __future__ import annotations

from typing import Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say, visible_line

_EXAMPLES = """\b
vlm-assets show ALDERNEY-00001
vlm-assets show ' 007' --json"""


@app.command(epilog=_EXAMPLES)
def show(
    property_id: Annotated[str, typer.Argument(help="The property's id, as in the catalogue.")],
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show one property: its images, its description, errors and attempts, and the files that hold them."""
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.property_view import read_property

    current = chosen_settings(home)
    found = read_property(current, Catalog.open(current.home), property_id)
    if as_json:
        say_as_json(found.as_json())
        return
    for line in found.lines():
        say(visible_line(line))
