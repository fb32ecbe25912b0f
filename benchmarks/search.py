"""How long a search takes: python -m benchmarks.search [--rows 1350000] [--width 384] [--folder DIR]

Random unit vectors are written as partitions of 1,000 rows, as the assets write them, and scanned as
``vlm-assets search`` scans them. Beside it DuckDB's own cosine over the same files. Wall and CPU seconds,
best of three, and the peak of the memory.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from vlm_assets.assets.property_embeddings import embedding_rows
from vlm_durable.files.files import TemporaryFile, publish_replacing
from vlm_durable.versions.partition_rows import PartitionRows, write_rows
from vlm_results.search import scan

ROWS_A_FILE = 1000


def write(folder: Path, rows: int, width: int) -> list[Path]:
    """The files, made once."""
    chance, schema, paths = np.random.default_rng(1), embedding_rows(width), []
    for start in range(0, rows, ROWS_A_FILE):
        count = min(ROWS_A_FILE, rows - start)
        path = folder / f"{start:09d}-{start + count - 1:09d}.parquet"
        paths.append(path)
        if path.exists():
            continue
        vectors = chance.standard_normal((count, width), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        columns = [
            pa.array([f"P{number:08d}" for number in range(start, start + count)]),
            pa.array(range(start, start + count), pa.int64()),
            pa.array(["ok"] * count),
            pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), width),
            *[pa.array(["made"] * count)] * 5,
            pa.array([datetime.now(UTC)] * count, schema.field("embedded_at").type),
        ]
        sink = TemporaryFile(path)
        write_rows(sink, pa.Table.from_arrays(columns, schema=schema).to_batches(), schema)
        sink.seal()
        publish_replacing(sink.path, path)
    return paths


def timed(name: str, look: Callable[[], object]) -> None:
    """Print the best of three."""
    best = (float("inf"), 0.0)
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        look()
        best = min(best, (time.perf_counter() - wall, time.process_time() - cpu))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name}: {best[0]:.2f} s, {best[1]:.2f} s of CPU, {peak:.0f} MiB at most so far")


def main() -> None:
    """Make the files and scan them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=1_350_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--folder", type=Path, help="keep the files here, for the next time")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        paths = {path.stem: path for path in write(folder, asked.rows, asked.width)}
        size = sum(path.stat().st_size for path in paths.values())
        print(f"{asked.rows:,} vectors of {asked.width} in {len(paths)} files, {size / 1e9:.2f} GB")
        query = np.random.default_rng(5).standard_normal(asked.width).astype(np.float32)
        query /= np.linalg.norm(query)
        timed("search", lambda: scan(list(paths), lambda key: PartitionRows(paths[key]), query))
        few = np.zeros(asked.rows, dtype=np.bool_)
        few[::7] = True
        timed(
            "search, a seventh chosen",
            lambda: scan(list(paths), lambda key: PartitionRows(paths[key]), query, mask=few),
        )
        timed("DuckDB", lambda: of_duckdb(folder, query.tolist(), asked.width))


def of_duckdb(folder: Path, query: list[float], width: int) -> None:
    """The same by DuckDB."""
    import duckdb

    with duckdb.connect(config={"memory_limit": "1GB"}) as connection:
        connection.execute(
            f"SELECT ordinal, array_cosine_similarity(embedding::FLOAT[{width}], $query::FLOAT[{width}]) AS s"
            f" FROM read_parquet('{folder}/*.parquet') WHERE embedding IS NOT NULL ORDER BY s DESC LIMIT 20",
            {"query": query},
        ).fetchall()


if __name__ == "__main__":
    main()
