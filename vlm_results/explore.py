"""Explore: the descriptions as charts, a table and a map, in a browser (Embedding Atlas, Apple, MIT).

The page is the library's (https://github.com/apple/embedding-atlas), an extra of its own. The table that it
shows is made here. The browser computes everything by itself, so no visitor can run SQL on this machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.partition import CONFIDENCE, OK
from vlm_assets.commands.html_page import thumbnails
from vlm_assets.commands.terminal import AsJson, Home, Port, app, chosen_settings, say, say_as_json
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing, doing_each
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory, write_replacing
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted
from vlm_results.guarantee import Guarantee
from vlm_results.joined_rows import further_records, shown_version
from vlm_results.published_table import are_vectors_of, field_confidences, published_records, read_rows
from vlm_results.search import comparable
from vlm_results.word_index import forget_words

_THUMBNAIL_HEIGHT = 96
_NEIGHBOURS = 10
_SEED = 1
_SURE = "_confidence"
"""Ends the column of a field's confidences."""

_OWN = ("model", "device", "images_seen")
_NAMES = frozenset(
    {
        "property_id", "ordinal", "text", "partition", "thumbnail", "vector", "map_x", "map_y", "neighbours",
        "row", *_OWN,
    }
)  # fmt: skip
"""Columns that are no fields; a field of such a name has an underscore after it."""

TOTAL = b"total"
_FORMAT = 4


def explore_table(settings: Settings, catalog: Catalog, *, sample: int) -> pa.Table:
    """The table that the page shows: a sample of the properties with a vector. It is kept for the next time.

    Its metadata have the number of properties with a vector under TOTAL. A fixed seed draws the sample.
    Raises CommandError, PublishedError, OSError.
    """
    embedded, _ = comparable(settings, published_records(settings.embeddings, catalog))
    described = published_records(settings.descriptions, catalog)
    keys = [
        key
        for key, vectors_record in embedded.items()
        if key in described and are_vectors_of(vectors_record, described[key])
    ]
    guarantee = Guarantee.read(settings)
    shown_as = {
        key: shown_version(settings, guarantee, described[key], further_records(settings, key))
        for key in keys
    }
    made_of = [_FORMAT, sample, *((key, shown_as[key], embedded[key].sha256) for key in keys)]
    kept = _folder(settings) / f"{digest_of(made_of)}.parquet"
    if kept.exists():
        return pq.read_table(kept)
    partitions = PublishedPartitions(settings.embeddings)
    # The vectors themselves are not read yet.
    embedded_ordinals = []
    for key in doing_each("reading which properties have a vector, partitions", keys):
        rows = partitions.read(key).to_table(["ordinal", "status"])
        embedded_ordinals.append(rows.filter(pc.equal(rows["status"], OK))["ordinal"].to_numpy())
    if not any(map(len, embedded_ordinals)):
        raise CommandError(f"No property has a vector of its present description: {command('run')}.")
    with_vector = drawn = np.concatenate(embedded_ordinals)
    if len(drawn) > sample:
        drawn = np.random.default_rng(_SEED).choice(drawn, sample, replace=False)
    ranges = [PropertyRange.from_key(key) for key in keys]
    tables = []
    for bounds in doing_each("reading the sample, partitions", ranges):
        drawn_here = drawn[(drawn >= bounds.start) & (drawn < bounds.stop)]
        if len(drawn_here):
            tables.append(_rows(settings, guarantee, bounds.key, pa.array(drawn_here)))
    # Permissive: a field that is null in all rows of a partition has no type of its own in this partition.
    table = pa.concat_tables(tables, promote_options="permissive")
    doing("laying out the map")
    table = _with_places(table.filter(pc.is_valid(table["vector"])))
    # A small JPEG of the first image of each property; null if the image cannot be read.
    first_uris = (uris[:1] for uris in catalog.images_of(table["ordinal"].to_pylist()))
    files = thumbnails(catalog, first_uris, height=_THUMBNAIL_HEIGHT)
    small = [{"bytes": made[0]} if made and made[0] is not None else None for made in files]
    table = table.add_column(1, "thumbnail", pa.array(small, pa.struct([("bytes", pa.binary())])))
    table = table.drop_columns(["ordinal"]).replace_schema_metadata({TOTAL: str(len(with_vector))})
    _keep(kept, table)
    return table


def _rows(settings: Settings, guarantee: Guarantee, key: str, drawn: pa.Array) -> pa.Table:
    """The drawn rows of a partition: fields and their confidences as columns, and the vector last."""
    columns = ["property_id", "ordinal", "description", *_OWN]
    table = read_rows(settings, guarantee, key, [*columns, CONFIDENCE], ordinals=drawn)
    vectors = (
        PublishedPartitions(settings.embeddings).read(key).to_table(["ordinal", "embedding"]).combine_chunks()
    )
    positions = pc.index_in(table["ordinal"], value_set=vectors["ordinal"].chunk(0))
    rows = []
    for row in table.select(columns).to_pylist():
        fields = _fields(row.pop("description"))
        text = " ".join(value for value in fields.values() if isinstance(value, str))
        first = {"property_id": row["property_id"], **fields, "text": text, "partition": key}
        rows.append(first | row)
    made = _with_confidences(pa.Table.from_pylist(rows), table)
    return made.append_column("vector", vectors["embedding"].take(positions))


def _with_confidences(table: pa.Table, rows: pa.Table) -> pa.Table:
    """Add a column for each field that has confidences, by which the map can be coloured.

    rows: the confidences of the same rows. A column whose name a field has gets an underscore after it.
    """
    for field in rows.schema.field(CONFIDENCE).type if CONFIDENCE in rows.column_names else ():
        sure = field_confidences(rows[CONFIDENCE], field.name)
        if not np.isfinite(sure).any():
            continue
        column = f"{field.name}{_SURE}"
        while column in table.column_names:
            column += "_"
        table = table.append_column(column, pa.array(sure, pa.float32(), mask=~np.isfinite(sure)))
    return table


def _fields(description: Mapping[str, Any]) -> dict[str, Any]:
    """A column for each field: numbers, texts, and nested values as JSON."""
    fields = {}
    for name, value in description.items():
        column = f"{name}_" if name in _NAMES else name
        fields[column] = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
    return fields


def _with_places(table: pa.Table) -> pa.Table:
    """Add the place of each row on the map (UMAP, cosine, seeded) and its nearest rows."""
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
            others = [int(index) for index in indexes if index != row][:_NEIGHBOURS]
            distances = [float(1.0 - scores[other]) for other in others]
            neighbours.append({"ids": others, "distances": distances})
    return (
        table.append_column("map_x", pa.array(places[:, 0].astype(np.float32)))
        .append_column("map_y", pa.array(places[:, 1].astype(np.float32)))
        .append_column("neighbours", pa.array(neighbours))
    )


def _keep(path: Path, table: pa.Table) -> None:
    """Keep the table and remove earlier ones. It may be deleted, and is made again."""
    make_directory(path.parent)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_replacing(path, sink.getvalue().to_pybytes())
    for other in path.parent.glob("*.parquet"):
        if other != path:
            other.unlink()


def forget_tables(settings: Settings) -> None:
    """Remove the kept tables and the word index: they may hold withdrawn properties.

    Raises OSError.
    """
    forget_words(settings.layout)
    for path in _folder(settings).glob("*.parquet"):
        path.unlink()


def _folder(settings: Settings) -> Path:
    return settings.state_directory / "explore"


def export_page(shown: pa.Table, folder: Path) -> None:
    """Write the stand-alone page: a folder that any web server can serve. Raises CommandError, OSError."""
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
            " `pip install -c constraints.txt -e 'distributions/results[explore]'`."
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
    table = explore_table(current, Catalog.open(current.home), sample=sample)
    shown, total = table.num_rows, int(table.schema.metadata[TOTAL])

    def announce(where: str) -> None:
        if as_json:
            say_as_json({"shown": shown, "total": total, "where": where})
        else:
            say(f"{shown:,} of {counted(total, 'properties')}: {where}")

    if export is not None:
        export_page(table, export)
        announce(str(export))
    else:
        from vlm_assets.webserver.server import serve_page

        make_server = _extra("embedding_atlas.server").make_server
        page = make_server(_source(table), static_path=_static(), duckdb_uri="wasm", cors=False)
        serve_page(page, allowed_hosts=current.hosts, port=port, ready=announce)
