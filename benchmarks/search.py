"""How long a search takes: python -m benchmarks.search [--rows 1350000] [--width 384] [--folder DIR]

A home is made as the assets write it, in partitions of 1,000: descriptions of drawn example properties, and
random unit vectors in place of theirs. The whole of ``vlm_results.search.search`` is timed, from the records
to the hits, by words, by vectors and by both, without and with a condition, and DuckDB's own cosine over the
same files. The request's vector is random too: what its embedder takes is said apart. Wall and CPU seconds,
best of three, and the peak of the memory.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.described_home import Description, Vectors, make_home
from examples.truth import draw_truth
from vlm_assets.config.settings import Settings
from vlm_assets.services.request_vector import embed_text
from vlm_catalog.catalog import Catalog
from vlm_results import search as search_module
from vlm_results.search import search

WAYS = {"words": ("words",), "vectors": ("vectors",), "both": ("words", "vectors")}

REQUESTS = ("stone cottage with a pool", "timber bungalow with a garage", "brick terraced house")
"""The rows that have all of their words: 0.1% of all, 2% and 16%."""

_DRAWN = 100_000
"""Properties that differ; drawing more takes minutes and makes no index larger."""


def made(folder: Path, rows: int, width: int) -> Settings:
    """The home, made once."""
    random = np.random.default_rng(1)

    @lru_cache(_DRAWN)
    def describe(number: int) -> Description:
        return draw_truth("example", 7, number).model_dump()

    def embed(descriptions: Sequence[Description]) -> Vectors:
        vectors = random.standard_normal((len(descriptions), width), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    return make_home(folder, rows, describe=lambda ordinal: describe(ordinal * 7919 % _DRAWN), embed=embed)


def timed(name: str, work: Callable[[], object], times: int = 3) -> None:
    """Print the best of three."""
    best = (float("inf"), 0.0)
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        best = min(best, (time.perf_counter() - wall, time.process_time() - cpu))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name}: {best[0]:.2f} s, {best[1]:.2f} s of CPU, {peak:.0f} MiB at most so far", flush=True)


def main() -> None:
    """Make the home and search it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=1_350_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--folder", type=Path, help="keep the home here, for the next time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        settings = made(options.folder or Path(temporary), options.rows, options.width)
        catalog = Catalog.open(settings.home)
        size = sum(path.stat().st_size for path in settings.embeddings.published.glob("*.parquet"))
        print(
            f"{catalog.rows:,} vectors of {options.width} in {len(catalog.ranges)} files, {size / 1e9:.2f} GB"
        )
        query = np.random.default_rng(5).standard_normal(options.width).astype(np.float32)
        query /= np.linalg.norm(query)
        few = np.zeros(catalog.rows, dtype=np.bool_)
        few[::7] = True
        timed("words, the first time", partial(search, settings, catalog, text=REQUESTS[0], by=("words",)), 1)
        print(f"index of the words: {settings.layout.word_index.stat().st_size / 1e6:.0f} MB")
        with mock.patch.object(search_module, "embed_text", lambda *_: query):
            for way, by in WAYS.items():
                search_once = partial(search, settings, catalog, by=by)
                for text in REQUESTS if "words" in by else REQUESTS[:1]:
                    timed(f"{way}, {text}", partial(search_once, text=text))
                timed(f"{way}, {REQUESTS[0]}, of a seventh", partial(search_once, text=REQUESTS[0], mask=few))
        nearest = partial(of_duckdb, settings.embeddings.published, query.tolist(), options.width)
        timed("vectors, DuckDB", nearest)
        # Last: torch takes 400 MiB.
        timed(
            "the text's vector, with torch and the example's embedder", partial(embed_text, settings, "a"), 1
        )
        timed("the text's vector, with the example's embedder", partial(embed_text, settings, "a"))


def of_duckdb(folder: Path, query: list[float], width: int) -> None:
    """The nearest by DuckDB."""
    import duckdb

    with duckdb.connect(config={"memory_limit": "1GB"}) as connection:
        connection.execute(
            f"SELECT ordinal, array_cosine_similarity(embedding::FLOAT[{width}], $query::FLOAT[{width}]) AS s"
            f" FROM read_parquet('{folder}/*.parquet') WHERE embedding IS NOT NULL ORDER BY s DESC LIMIT 20",
            {"query": query},
        ).fetchall()


if __name__ == "__main__":
    main()
