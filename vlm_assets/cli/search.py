"""``vlm-assets search``: find properties by what was said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, Where, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say, visible_line

_EXAMPLES = """\b
vlm-assets search "stone cottage with a pool"
vlm-assets search "stone cottage" --where "floors <= 2" --html found.html
vlm-assets search --like ALDERNEY-00001 --limit 5 --json"""


@app.command(epilog=_EXAMPLES)
def search(
    text: Annotated[str | None, typer.Argument(help="What to look for, in words.")] = None,
    home: Home = None,
    where: Where = None,
    like: Annotated[str | None, typer.Option(metavar="ID", help="Neighbours of this property.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Properties to find, at most.")] = 20,
    html: Annotated[Path | None, typer.Option(help="Write a page with images to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find properties whose descriptions are near to a text or to another property, by the published vectors.

    Takes no device. With a text and --like, what is near to both.
    """
    if text is None and like is None:
        raise typer.BadParameter("Give a text, or --like ID.")
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.html_page import write_page
    from vlm_assets.operate.published_table import chosen
    from vlm_assets.operate.search import contact_sheet, image_paths
    from vlm_assets.operate.search import search as look

    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    mask = None if where is None else chosen(current, catalog, where)
    found = look(current, catalog, text=text, like=like, mask=mask, limit=limit)
    title = " ".join([*([text] if text else []), *([f"like {like}"] if like else [])])
    if html is not None:
        write_page(html, contact_sheet(current, catalog, title, found.hits))
    if as_json:
        say_as_json([{"property_id": one.property_id, "score": one.score} for one in found.hits])
        return
    for hit, path in zip(found.hits, image_paths(catalog, found.hits), strict=True):
        say(f"{hit.score:.3f}  {visible_line(hit.property_id)}  {visible_line(path)}")
    say(f"{len(found.hits)} of {found.scanned:,} properties with a vector.")
    if found.left_out:
        say(
            f"{len(found.left_out)} partitions were embedded by another model than the settings name, and"
            f" were not searched: {found.left_out[0]} is the first."
        )
    if html is not None:
        say(f"Page: {html}")
