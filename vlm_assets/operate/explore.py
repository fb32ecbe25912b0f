"""Explore: all that was described as charts, a table and a map, in a browser (Embedding Atlas, Apple, MIT).

What lives here: the table that is shown (fields as columns, text, thumbnail, partition, model, a place on the
map and the nearest neighbours), its cache, and serving or exporting the page. What does not: the page, which
is the library's (https://github.com/apple/embedding-atlas), an extra of its own. The browser computes
everything by itself, so no SQL is run here for whoever asks.
"""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from resources.publishing.published import PublishedPartitions
from resources.storage.files import make_directory, write_replacing
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.operate.html_page import thumbnails
from vlm_assets.operate.search import comparable
from vlm_assets.operate.terminal import (
    AsJson,
    CommandError,
    Home,
    Port,
    app,
    chosen_settings,
    say,
    say_as_json,
)
from vlm_assets.settings import Settings

_THUMBNAIL_HEIGHT = 96
_NEIGHBOURS = 10
_SEED = 1
_OWN = ("device", "images_seen")


@dataclass(frozen=True)
class Explored:
    """What is shown. of: published properties with a vector, of which ``table`` has a sample."""

    table: pa.Table
    of: int


def explore_table(settings: Settings, catalog: Catalog, *, sample: int) -> Explored:
    """The table that is shown, drawn by a fixed seed where there is more; kept for the next time.

    Raises CommandError, PublishedError, OSError.
    """
    records, _ = comparable(settings, catalog)
    ranges = {one.key: one for one in catalog.ranges if one.key in records}
    ordinals = [ordinal for one in ranges.values() for ordinal in range(one.start, one.stop)]
    made_of = "\n".join(
        [
            f"{_SEED} {sample}",
            *(f"{key} {one.sha256}" for key, one in records.items()),
            *_descriptions(settings, ranges),
        ]
    )
    name = hashlib.sha256(made_of.encode()).hexdigest()[:24]
    kept = _folder(settings) / f"{name}.parquet"
    if kept.exists():
        return Explored(pq.read_table(kept), len(ordinals))
    drawn = ordinals
    if len(ordinals) > sample:
        drawn = random.Random(_SEED).sample(ordinals, sample)  # noqa: S311 - repeatable, not secret
    table, vectors, shown = _rows(settings, catalog, ranges, frozenset(drawn))
    table = _with_places(table, vectors)
    table = table.add_column(1, "thumbnail", _thumbnails(catalog, shown))
    _keep(kept, table)
    return Explored(table, len(ordinals))


def _descriptions(settings: Settings, ranges: Mapping[str, Any]) -> list[str]:
    published = PublishedPartitions(settings.descriptions)
    records = {key: published.record(key) for key in ranges}
    return [f"{key} {one.sha256}" for key, one in records.items() if one is not None]


def _rows(
    settings: Settings, catalog: Catalog, ranges: Mapping[str, Any], drawn: frozenset[int]
) -> tuple[pa.Table, npt.NDArray[np.float32], list[int]]:
    """The drawn rows that have a vector: fields as columns, the vectors, and the ordinals."""
    described, embedded = PublishedPartitions(settings.descriptions), PublishedPartitions(settings.embeddings)
    rows: list[dict[str, Any]] = []
    vectors: list[list[float]] = []
    ordinals: list[int] = []
    for key, one in ranges.items():
        if drawn.isdisjoint(range(one.start, one.stop)) or described.record(key) is None:
            continue
        of = {row["ordinal"]: row["embedding"] for row in embedded.read(key).to_table().to_pylist()}
        for row in described.read(key).to_table().to_pylist():
            vector = of.get(row["ordinal"])
            if row["ordinal"] in drawn and vector is not None and row["description"] is not None:
                fields = {name: value if not isinstance(value, dict | list) else str(value)
                          for name, value in row["description"].items()}  # fmt: skip
                own = {name: row[name] for name in _OWN if name in row}
                text = " ".join(value for value in fields.values() if isinstance(value, str))
                about = {"partition": key, "model": row.get("model"), **own}
                rows.append({"property_id": row["property_id"], **fields, "text": text, **about})
                vectors.append(vector)
                ordinals.append(row["ordinal"])
    return pa.Table.from_pylist(rows), np.asarray(vectors, dtype=np.float32), ordinals


def _with_places(table: pa.Table, vectors: npt.NDArray[np.float32]) -> pa.Table:
    """With a place on the map (UMAP, cosine, seeded) and the nearest rows of each."""
    rows = len(vectors)
    if rows > 3:
        umap = _extra("umap")
        places = umap.UMAP(
            n_neighbors=min(15, rows - 1),
            metric="cosine",
            n_jobs=1,
            random_state=_SEED,
            init="random" if rows < 20 else "spectral",
        ).fit_transform(vectors)
    else:
        places = np.stack([np.arange(rows), np.zeros(rows)], axis=1)
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    neighbours = []
    for start in range(0, rows, 1024):
        near = unit[start : start + 1024] @ unit.T
        best = np.argsort(-near, axis=1)[:, : _NEIGHBOURS + 1]
        for row, (indexes, scores) in enumerate(zip(best, near, strict=True), start=start):
            others = [int(one) for one in indexes if one != row][:_NEIGHBOURS]
            neighbours.append({"ids": others, "distances": [float(1.0 - scores[one]) for one in others]})
    return (
        table.append_column("map_x", pa.array(places[:, 0].astype(np.float32)))
        .append_column("map_y", pa.array(places[:, 1].astype(np.float32)))
        .append_column("neighbours", pa.array(neighbours))
    )


def _thumbnails(catalog: Catalog, ordinals: list[int]) -> pa.Array:
    """A small JPEG of the first image of each property; null where it cannot be read."""
    first = (uris[:1] for uris in catalog.images_of(ordinals))
    files = [made[0] if made else None for made in thumbnails(catalog, first, height=_THUMBNAIL_HEIGHT)]
    kind = pa.struct([("bytes", pa.binary())])
    return pa.array([None if one is None else {"bytes": one} for one in files], kind)


def _keep(path: Path, table: pa.Table) -> None:
    """Keep the table and forget earlier ones; it may be deleted and is made again."""
    make_directory(path.parent)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_replacing(path, sink.getvalue().to_pybytes())
    for old in path.parent.glob("*.parquet"):
        if old != path:
            old.unlink()


def forget_tables(settings: Settings) -> None:
    """Remove what is kept: it may show properties that are withdrawn. Raises OSError."""
    for path in _folder(settings).glob("*.parquet"):
        path.unlink()


def _folder(settings: Settings) -> Path:
    return settings.state_directory / "explore"


def export_page(explored: Explored, folder: Path) -> None:
    """Write the stand-alone page: a folder that any web server shows. Raises CommandError, OSError."""
    _source(explored).export_to_folder(_static(), str(folder))


def serve_page(settings: Settings, explored: Explored, *, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page on loopback until Ctrl-C. ready: told its address. Raises CommandError."""
    import uvicorn

    from vlm_assets.operate.dagster_server.guarded_pages import WebGuard
    from vlm_assets.operate.dagster_server.server import free_port

    make_server = _extra("embedding_atlas.server").make_server
    app = make_server(_source(explored), static_path=_static(), duckdb_uri="wasm", cors=False)
    with socket.create_server(("127.0.0.1", free_port(port))) as listening:
        ready(f"http://127.0.0.1:{listening.getsockname()[1]}")
        guarded = WebGuard(app, allowed_hosts=settings.hosts)
        uvicorn.Server(uvicorn.Config(guarded, log_level="warning")).run(sockets=[listening])


def _source(explored: Explored) -> Any:
    row_id = "row"
    table = explored.table.append_column(row_id, pa.array(range(explored.table.num_rows), pa.int32()))
    props = _extra("embedding_atlas.options").make_embedding_atlas_props(
        row_id=row_id, x="map_x", y="map_y", neighbors="neighbours", text="text", image="thumbnail"
    )
    digest = hashlib.sha256("\n".join(table["property_id"].to_pylist()).encode()).hexdigest()
    return _extra("embedding_atlas.data_source").DataSource(digest, table.to_pandas(), {"props": props})


def _static() -> str:
    return str(Path(str(_extra("embedding_atlas").__file__)).parent / "static")


def _extra(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise CommandError(
            "The page is an extra: `make explore` installs it and opens it, or"
            " `pip install -c constraints.txt -e '.[explore]'`."
        ) from error


_EXAMPLES = """\b
make explore                               installs the extra, then opens the page
vlm-assets explore --sample 20000
vlm-assets explore --export /srv/pages/properties"""


@app.command("explore", epilog=_EXAMPLES)
def explore_command(
    home: Home = None,
    port: Port = 3400,
    sample: Annotated[int, typer.Option(min=4, help="Properties shown, drawn by a fixed seed.")] = 5000,
    export: Annotated[
        Path | None, typer.Option(help="Write the stand-alone page into this folder instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Open charts, a table, a map and neighbours in a browser.

    Filters for every field, a table with thumbnails, a map and neighbours, on loopback.
    """
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
