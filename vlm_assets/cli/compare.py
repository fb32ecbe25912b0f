"""``vlm-assets compare``: which model or prompt is worth it, on a sample, before weeks of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say, visible_line
from vlm_assets.settings import load_settings, require_models

_EXAMPLES = """\b
vlm-assets compare --model A --model B --truth truth.csv --html compared.html
vlm-assets compare --prompt 'Describe the house.' --limit 100 --twice"""

Many = list[str] | None


@app.command(epilog=_EXAMPLES)
def compare(
    home: Home = None,
    model: Annotated[Many, typer.Option(help="A model's folder or hub id; repeat it.")] = None,
    prompt: Annotated[Many, typer.Option(help="Another prompt; repeat it.")] = None,
    schema: Annotated[Many, typer.Option(help="Another schema, as module:Class; repeat it.")] = None,
    processor_options: Annotated[
        Many, typer.Option(help="Other processor options, as JSON; repeat it.")
    ] = None,
    truth: Annotated[Path | None, typer.Option(help="CSV or parquet with ids and true fields.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Properties to describe with each.")] = 50,
    twice: Annotated[
        bool, typer.Option("--twice", help="Ask each twice: does it agree with itself?")
    ] = False,
    price_per_hour: Annotated[float | None, typer.Option(min=0.0, help="Of one device.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with images to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Describe the same sample with two or more models, prompts, schemas or processor options, and compare.

    Each option's value is a variant of the settings; a single one is compared with the settings as they are.
    No row is written. Intervals are 95%.
    """
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.compare import Variant, comparison_page
    from vlm_assets.operate.compare import compare as run
    from vlm_assets.operate.html_page import write_page

    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    given = {
        "model": model,
        "prompt": prompt,
        "description_schema": schema,
        "processor_options": processor_options,
    }
    asked = [(name, one) for name, values in given.items() for one in values or []]
    variants = [
        Variant(
            f"{name.removeprefix('description_')} {one}" if name != "model" else one,
            load_settings(**{name: one}),
        )
        for name, one in asked
    ]
    if len(variants) == 1 or not model:
        variants.insert(0, Variant("as set", current))
    for variant in variants:
        require_models(variant.settings)
    found = run(
        variants,
        catalog,
        limit=limit,
        truth=truth,
        twice=twice,
        price_per_hour=price_per_hour,
        tell=(lambda said: None) if as_json else lambda said: say(visible_line(said)),
    )
    if html is not None:
        write_page(html, comparison_page(catalog, found))
    if as_json:
        say_as_json(found.as_json())
        return
    for one in found.results:
        say(visible_line(one.name), bold=True)
        if one.overall is not None:
            say(f"  fields as the truth has them: {one.overall.sentence()}")
        if one.with_itself is not None:
            say(f"  agrees with itself: {one.with_itself.sentence()}")
        say(f"  failed: {one.failed.sentence()}; first answer invalid: {one.invalid.sentence()}")
        say(f"  {one.prompt_tokens:,.0f} tokens asked, {one.output_tokens:,.0f} answered, a property")
        cost = "" if one.cost is None else f", cost {one.cost:,.2f}"
        say(f"  {one.properties_per_second:.2f} properties/s a device; all in {one.days:.3g} days{cost}")
    for pair in found.pairs:
        say(visible_line(f"{pair.first} and {pair.second}: {pair.agreement.sentence()} of the fields alike"))
        if pair.better_by is not None:
            middle, low, high = pair.better_by
            say(f"  the first is better by {middle:+.1%} ({low:+.1%} to {high:+.1%})")
    say(f"They differ on {len(found.disagreements)} of {found.sample} properties.")
    if html is not None:
        say(f"Page: {html}")
