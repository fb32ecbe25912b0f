"""``vlm-assets review``: a person says which fields of a sample are right."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say

_EXAMPLES = """\b
vlm-assets review --sample 200
vlm-assets review --sample 100 --suspicious
vlm-assets review --json                  what was found right so far"""


@app.command(epilog=_EXAMPLES)
def review(
    home: Home = None,
    sample: Annotated[int, typer.Option(min=1, max=10_000, help="Properties to look at, at most.")] = 200,
    seed: Annotated[int, typer.Option(help="Draws the sample; the same seed draws the same.")] = 1,
    suspicious: Annotated[
        bool, typer.Option("--suspicious", help="Those first that dataset_quality finds odd.")
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page, on loopback.")] = 3200,
    as_json: AsJson = False,
) -> None:
    """Open a page where you mark fields right or wrong by keyboard; verdicts are kept in HOME/review.jsonl.

    With --json: no page, but how often each field was right so far, with a 95% interval.
    """
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.review import accuracy, draw_sample
    from vlm_assets.operate.review_page import serve_review

    current = chosen_settings(home)
    if as_json:
        shares = accuracy(current.home)
        say_as_json({name: asdict(share) for name, share in shares.items()})
        return
    catalog = Catalog.open(current.home)
    drawn = draw_sample(current, catalog, count=sample, seed=seed, suspicious=suspicious)

    def ready(address: str) -> None:
        say(f"{len(drawn)} properties: {address} (Ctrl-C ends it; each verdict is kept at once)")

    serve_review(current, catalog, drawn, port=port, ready=ready)
    for name, share in accuracy(current.home).items():
        say(f"{name}: right in {share.sentence()} of {share.of}")
