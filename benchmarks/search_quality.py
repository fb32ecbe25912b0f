"""How well a search finds what was asked for: python -m benchmarks.search_quality HOME

HOME is a described example (``vlm-assets demo --exit --home HOME``). Thirty requests that its embedder
never learned from are searched for by words, by vectors and by both. A property is relevant if its rendered
truth has all that the request names. R-precision: of as many hits as there are relevant properties, the share
that is relevant.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from examples.requests import HELD_OUT, Request
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.settings import Settings, load_settings
from vlm_results.search import search

WAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "words": ("words",),
    "vectors": ("vectors",),
    "both": ("words", "vectors"),
}


def r_precision(
    settings: Settings, request: Request, truths: Mapping[str, Mapping[str, Any]], way: str
) -> float:
    """The share of relevant hits. truths: by id, of the described properties."""
    relevant = {name for name, truth in truths.items() if not request.unmet(truth)}
    found = search(
        settings, Catalog.open(settings.home), text=request.text, limit=len(relevant), by=WAYS[way]
    )
    return sum(hit.property_id in relevant for hit in found.hits) / len(relevant)


def described_truths(settings: Settings) -> dict[str, Mapping[str, Any]]:
    """The truth of each described property of an example, by its id."""
    described = {
        row["property_id"]
        for path in sorted(settings.descriptions.published.glob("*.parquet"))
        for row in pq.read_table(path, columns=["property_id", "status"], partitioning=None).to_pylist()
        if row["status"] == "ok"
    }
    rows = pq.read_table(settings.home / "example" / "truth.parquet").to_pylist()
    return {row["property_id"]: row["truth"] for row in rows if row["property_id"] in described}


def main() -> None:
    """Print a table of all requests, and the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("home", type=Path)
    settings = load_settings(home=parser.parse_args().home)
    truths = described_truths(settings)
    totals = dict.fromkeys(WAYS, 0.0)
    print("| request | relevant |", " | ".join(WAYS), "|")
    for request in HELD_OUT:
        relevant = sum(not request.unmet(truth) for truth in truths.values())
        if not relevant:
            raise SystemExit(f"no property of this example answers {request.text!r}")
        shares = {way: r_precision(settings, request, truths, way) for way in WAYS}
        totals = {way: totals[way] + share / len(HELD_OUT) for way, share in shares.items()}
        print(
            f"| {request.text} | {relevant} |", " | ".join(f"{share:.2f}" for share in shares.values()), "|"
        )
    print(
        f"| mean of {len(HELD_OUT)} | {len(truths)} described |",
        " | ".join(f"{share:.3f}" for share in totals.values()),
        "|",
    )


if __name__ == "__main__":
    main()
