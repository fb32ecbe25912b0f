"""``vlm-assets export``: published rows as a folder for others."""

from __future__ import annotations

import enum
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, Where, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say

_EXAMPLES = """\b
vlm-assets export /srv/out --format huggingface
vlm-assets export cottages --format csv --where "building_type = 'cottage'\""""


class Format(enum.StrEnum):
    """What to write."""

    huggingface = "huggingface"
    jsonl = "jsonl"
    csv = "csv"


@app.command(epilog=_EXAMPLES)
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    format_: Annotated[
        Format, typer.Option("--format", help="A Hugging Face dataset, JSON lines, or flat CSV.")
    ] = Format.huggingface,
    home: Home = None,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Write published rows with ids, image paths, descriptions, texts and vectors, a file a partition.

    Counts and digests are verified at the end. The same command goes on with an export that was interrupted,
    and brings a finished one up to date.
    """
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.export import export as write
    from vlm_assets.operate.published_table import chosen

    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    mask = None if where is None else chosen(current, catalog, where)
    found = write(current, catalog, folder, format_.value, where=where, mask=mask)
    if as_json:
        say_as_json(asdict(found))
        return
    say(f"{found.rows:,} rows in {found.shards} files of {folder}, verified.", fg="green")
    if found.kept:
        say(f"{found.kept} of the files were there already.")
    if found.without_vector:
        say(f"{found.without_vector:,} rows have no vector yet: `vlm-assets run`.")
