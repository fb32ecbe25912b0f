"""Explore: all that was described as charts, a table and a map, in a browser (Embedding Atlas, Apple, MIT).

The page is the library's (https://github.com/apple/embedding-atlas), an extra of its own; here is the table
that it shows. The browser computes everything by itself, so no SQL is run here for whoever asks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.partition import OK
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.commands.html_page import thumbnails
from vlm_assets.commands.terminal import AsJson, Home, Port, app, chosen_settings, say, say_as_json
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing, doing_each
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory, write_replacing
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted
from vlm_results.published_table import are_vectors_of, published_records
from vlm_results.search import comparable
from vlm_results.word_index import forget_words

_THUMBNAIL_HEIGHT = 96
_NEIGHBOURS = 10
_SEED = 1
_OWN = ("model", "device", "images_seen")
_NAMES = frozenset(
    {
        "property_id", "ordinal", "text", "partition", "thumbnail", "vector", "map_x", "map_y", "neighbours",
        "row", *_OWN,
    }
)  # fmt: skip
"""Columns that are no fields; a field of such a name has an underscore after it."""

OF = b"of"
_FORMAT = 2


def explore_table(settings: Settings, catalog: Catalog, *, sample: int) -> pa.Table:
    """The table that is shown, drawn by a fixed seed where there is more; kept for the next time.

    Its metadata say under OF of how many properties with a vector it is. Raises CommandError, PublishedError,
    OSError.
    """
    embedded, _ = comparable(settings, published_records(settings.embeddings, catalog))
    described = published_records(settings.descriptions, catalog)
    keys = [key for key, one in embedded.items() if key in described and are_vectors_of(one, described[key])]
    made_of = [_FORMAT, sample, *((key, described[key].sha256, embedded[key].sha256) for key in keys)]
    kept = _folder(settings) / f"{digest_of(made_of)}.parquet"
    if kept.exists():
        return pq.read_table(kept)
    partitions = PublishedPartitions(settings.embeddings)
    # The vectors themselves are not read yet.
    with_status = [
        partitions.read(key).to_table(["ordinal", "status"])
        for key in doing_each("reading which properties have a vector, partitions", keys)
    ]
    with_vectors = [one.filter(pc.equal(one["status"], OK))["ordinal"].to_numpy() for one in with_status]
    if not any(map(len, with_vectors)):
        raise CommandError(f"No property has a vector of its present description: {command('run')}.")
    drawn = with_vector = np.concatenate(with_vectors)
    if len(drawn) > sample:
        drawn = np.random.default_rng(_SEED).choice(drawn, sample, replace=False)
    ranges = [PropertyRange.from_key(key) for key in keys]
    # Permissive: a field that is null in all rows of a partition has no type of its own there.
    table = pa.concat_tables(
        [
            _rows(settings, one, pa.array(here))
            for one in doing_each("reading the sample, partitions", ranges)
            if len(here := _within(drawn, one))
        ],
        promote_options="permissive",
    )
    doing("laying out the map")
    table = _with_places(table.filter(pc.is_valid(table["vector"])))
    # A small JPEG of the first image of each property; null where it cannot be read.
    first = (uris[:1] for uris in catalog.images_of(table["ordinal"].to_pylist()))
    files = [made[0] if made else None for made in thumbnails(catalog, first, height=_THUMBNAIL_HEIGHT)]
    small = [None if one is None else {"bytes": one} for one in files]
    table = table.add_column(1, "thumbnail", pa.array(small, pa.struct([("bytes", pa.binary())])))
    table = table.drop_columns(["ordinal"]).replace_schema_metadata({OF: str(len(with_vector))})
    _keep(kept, table)
    return table


def _within(ordinals: npt.NDArray[np.int64], wanted: PropertyRange) -> npt.NDArray[np.int64]:
    return ordinals[(ordinals >= wanted.start) & (ordinals < wanted.stop)]


def _rows(settings: Settings, wanted: PropertyRange, drawn: pa.Array) -> pa.Table:
    """The drawn rows of one partition: fields as columns, and the vector last."""
    described, embedded = PublishedPartitions(settings.descriptions), PublishedPartitions(settings.embeddings)
    table = described.read(wanted.key).to_table(["property_id", "ordinal", "description", *_OWN])
    table = table.filter(pc.is_in(table["ordinal"], value_set=drawn))
    vectors = embedded.read(wanted.key).to_table(["ordinal", "embedding"]).combine_chunks()
    at = pc.index_in(table["ordinal"], value_set=vectors["ordinal"].chunk(0))
    rows = []
    for row in table.to_pylist():
        fields = _fields(row.pop("description"))
        text = " ".join(value for value in fields.values() if isinstance(value, str))
        first = {"property_id": row["property_id"], **fields, "text": text, "partition": wanted.key}
        rows.append(first | row)
    return pa.Table.from_pylist(rows).append_column("vector", vectors["embedding"].take(at))


def _fields(description: Mapping[str, Any]) -> dict[str, Any]:
    """A column for each field: numbers, texts, and what is nested as JSON."""
    return {
        f"{name}_" if name in _NAMES else name: json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict | list)
        else value
        for name, value in description.items()
    }


def _with_places(table: pa.Table) -> pa.Table:
    """With a place on the map (UMAP, cosine, seeded) and the nearest rows of each."""
    rows = table.num_rows
    vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(rows, -1)
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
    """Remove what is kept of rows, the words of searches too: withdrawn properties may be among them.

    Raises OSError.
    """
    forget_words(settings.layout)
    for path in _folder(settings).glob("*.parquet"):
        path.unlink()


def _folder(settings: Settings) -> Path:
    return settings.state_directory / "explore"


def export_page(shown: pa.Table, folder: Path) -> None:
    """Write the stand-alone page: a folder that any web server shows. Raises CommandError, OSError."""
    _source(shown).export_to_folder(_static(), str(folder))


def _source(shown: pa.Table) -> Any:
    row_id = "row"
    table = shown.append_column(row_id, pa.array(range(shown.num_rows), pa.int32()))
    props = _extra("embedding_atlas.options").make_embedding_atlas_props(
        row_id=row_id, x="map_x", y="map_y", neighbors="neighbours", text="text", image="thumbnail"
    )
    digest = hashlib.sha256("\n".join(table["property_id"].to_pylist()).encode()).hexdigest()
    return _extra("embedding_atlas.data_source").DataSource(digest, table, {"props": props})


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
    shown, of = found.num_rows, int(found.schema.metadata[OF])

    def told(where: str) -> None:
        if as_json:
            say_as_json({"shown": shown, "of": of, "where": where})
        else:
            say(f"{shown:,} of {counted(of, 'properties')}: {where}")

    if export is not None:
        export_page(found, export)
        told(str(export))
    else:
        from vlm_assets.webserver.server import serve_page

        make_server = _extra("embedding_atlas.server").make_server
        page = make_server(_source(found), static_path=_static(), duckdb_uri="wasm", cors=False)
        serve_page(page, allowed_hosts=current.hosts, port=port, ready=told)
