"""How well a search finds what was asked for: python -m benchmarks.search_quality [HOME] [--drawn N]

HOME is a described example (``vlm-assets demo --exit --home HOME``). Without it, the true texts of 240
example properties are searched: what a model without errors would say. Thirty requests that the embedder
never learned from are searched for by words, by vectors and by both. With --drawn, N other requests of the
kind that it learned from are drawn: a way of searching is chosen by those, and the thirty only judge it.

A property is relevant if its truth has all that the request names. R-precision: of as many hits as there are
relevant properties, the share that is relevant.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

from benchmarks.described_home import Description, Vectors, make_home, name
from examples.requests import HELD_OUT, Request, draw_request
from examples.truth import draw_truth
from vlm_assets.config.property_description import PropertyDescription
from vlm_assets.config.resource_settings import build_text_embedding_model
from vlm_assets.config.settings import Settings, load_settings
from vlm_catalog.catalog import Catalog
from vlm_engine.devices.find import Device
from vlm_engine.schema import description_text
from vlm_results.search import search

WAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "words": ("words",),
    "vectors": ("vectors",),
    "both": ("words", "vectors"),
}

Truths = Mapping[str, Mapping[str, Any]]
"""What is true of each described property, by its id."""

_PROPERTIES: Final = 240
_SEED: Final = 7


def r_precision(settings: Settings, request: Request, truths: Truths, way: str) -> float:
    """The share of relevant hits."""
    relevant = {name for name, truth in truths.items() if not request.unmet(truth)}
    result = search(
        settings, Catalog.open(settings.home), text=request.text, limit=len(relevant), by=WAYS[way]
    )
    return sum(hit.property_id in relevant for hit in result.hits) / len(relevant)


def described_truths(settings: Settings) -> Truths:
    """The truths of an example's home."""
    described = {
        row["property_id"]
        for path in sorted(settings.descriptions.published.glob("*.parquet"))
        for row in pq.read_table(path, columns=["property_id", "status"], partitioning=None).to_pylist()
        if row["status"] == "ok"
    }
    rows = pq.read_table(settings.home / "example" / "truth.parquet").to_pylist()
    return {row["property_id"]: row["truth"] for row in rows if row["property_id"] in described}


def true_home(folder: Path) -> tuple[Settings, Truths]:
    """A home whose descriptions are the truths of example properties, embedded by the example's embedder."""
    drawn = [draw_truth("example", _SEED, index).model_dump() for index in range(_PROPERTIES)]
    settings = load_settings(home=folder, model="example", embedding_model="example")
    embedder = build_text_embedding_model(settings).load(Device("cpu-search", "cpu", "search", None, ""))

    def embed(descriptions: Sequence[Description]) -> Vectors:
        return np.asarray(
            embedder.embed([description_text(description) for description in descriptions]), np.float32
        )

    try:
        made = make_home(folder, _PROPERTIES, describe=drawn.__getitem__, embed=embed, range_size=60)
    finally:
        embedder.close()
    return made, {name(ordinal): truth for ordinal, truth in enumerate(drawn)}


def draw_requests(truths: Truths, count: int) -> Iterator[Request]:
    """Requests that at least one of these properties answers; the same ones each time."""
    rng, fields = random.Random("requests to choose by"), list(truths.values())
    for _ in range(count):
        yield draw_request(PropertyDescription(**{"summary": "", **rng.choice(fields)}), rng)


def report(settings: Settings, truths: Truths, requests: Sequence[Request]) -> None:
    """Print a table of all requests, and the means."""
    totals = dict.fromkeys(WAYS, 0.0)
    print("| request | relevant |", " | ".join(WAYS), "|")
    for request in requests:
        relevant = sum(not request.unmet(truth) for truth in truths.values())
        if not relevant:
            raise SystemExit(f"no property of this example answers {request.text!r}")
        shares = {way: r_precision(settings, request, truths, way) for way in WAYS}
        totals = {way: totals[way] + share / len(requests) for way, share in shares.items()}
        print(
            f"| {request.text} | {relevant} |", " | ".join(f"{share:.2f}" for share in shares.values()), "|"
        )
    print(
        f"| mean of {len(requests)} | {len(truths)} described |",
        " | ".join(f"{share:.3f}" for share in totals.values()),
        "|",
    )


def main() -> None:
    """Measure a home, or the true texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("home", type=Path, nargs="?", help="a described example; else the true texts")
    parser.add_argument("--drawn", type=int, metavar="N", help="draw so many requests, not the held-out ones")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.home is None:
            settings, truths = true_home(Path(folder))
        else:
            settings = load_settings(home=options.home)
            truths = described_truths(settings)
        report(settings, truths, list(draw_requests(truths, options.drawn)) if options.drawn else HELD_OUT)


if __name__ == "__main__":
    main()
