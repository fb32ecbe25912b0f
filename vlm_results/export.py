"""Export: published rows as a folder that others can read, a shard a partition, verified and resumable.

``published_table.py`` knows which rows a condition chooses.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import typer

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_durable.commands import command
from vlm_durable.files.files import (
    TEMPORARY_SUFFIX,
    TemporaryFile,
    make_directory,
    publish_replacing,
    sha256_of,
    sync_directory,
    write_replacing,
)
from vlm_durable.files.lock_files import taken
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted
from vlm_engine.schema import description_text
from vlm_results.published_table import Mask, Where, are_vectors_of, chosen, published_records


class Format(StrEnum):
    """What to write."""

    huggingface = "huggingface"
    jsonl = "jsonl"
    csv = "csv"


_SHARDS: Final = ".shards"
"""Folder of what is known of each finished shard, for a resumption, and of the lock."""

_NOTE_FORMAT: Final = 2
"""Of what is known of a shard; format 1 did not name the models."""

_SUMS: Final = "SHA256SUMS"
_ABOUT: Final = "export.json"
_ATTEMPTS: Final = 3

_FORMULA: Final = r"\A([=+\-@\t\r])"
"""How a text begins that a spreadsheet takes for a formula."""

_COLUMNS: Final = (
    "property_id", "ordinal", "status", "description", "error_kind", "error", "model", "model_revision"
)  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """What lies in the folder now. without_vector: rows that are described and not embedded (yet).

    kept: shards that were there already, from an export that was interrupted or of the same rows.
    """

    folder: str
    format: Format
    rows: int
    shards: int
    kept: int
    without_vector: int


def export(
    settings: Settings,
    catalog: Catalog,
    folder: Path,
    format_: Format,
    *,
    where: str | None = None,
    mask: Mask | None = None,
    raw_cells: bool = False,
) -> Exported:
    """Write all published rows, or those of the mask, and verify them. Goes on with an interrupted export.

    where: the condition that the mask stands for. raw_cells: of CSV, texts as they are, though a spreadsheet
    would compute some of them. Raises CommandError, PublishedError, OSError.
    """
    records = published_records(settings.descriptions, catalog)
    if not records:
        raise CommandError(f"No description is published yet: {command('run')}.")
    question = {"catalog_id": catalog.catalog_id, "rows_as": format_, "where": where, "raw_cells": raw_cells}
    expected = sum(one.rows for one in records.values())
    doing("looking at what is published")
    if mask is not None:
        ranges = {key: PropertyRange.from_key(key) for key in records}
        chosen_rows = {key: int(np.count_nonzero(mask[of.start : of.stop])) for key, of in ranges.items()}
        records = {key: one for key, one in records.items() if chosen_rows[key]}
        expected = sum(chosen_rows.values())
    with _locked(folder):
        _claim(folder, question)
        done, kept = _write_shards(settings, catalog, folder, format_, records, mask, raw_cells=raw_cells)
        _remove_others(folder, format_, set(done))
        _verify(folder, done, expected=expected)
        found = Exported(
            str(folder),
            format_,
            rows=expected,
            shards=len(done),
            kept=kept,
            without_vector=sum(one["without_vector"] for one in done.values()),
        )
        _finish(folder, question, done, found)
    return found


def _write_shards(
    settings: Settings,
    catalog: Catalog,
    folder: Path,
    format_: Format,
    records: Mapping[str, PublishedRecord],
    mask: Mask | None,
    *,
    raw_cells: bool,
) -> tuple[dict[str, dict[str, Any]], int]:
    """Write the shards that are not there yet. Returns what is known of each by name, and how many were."""
    schemas: dict[str, pa.Schema] = {}
    embedded = published_records(settings.embeddings, catalog)
    width = _width(settings, embedded)
    done: dict[str, dict[str, Any]] = {}
    kept = 0
    for number, (key, record) in enumerate(records.items()):
        name = _shard_name(format_, key)
        sources = {"described": record.sha256, "embedded": embedded[key].sha256 if key in embedded else None}
        known = _known(folder, key)
        if known is not None and known["sources"] == sources and _holds(folder / name, known):
            done[name], kept = known, kept + 1
        else:
            table, sources = _shard(settings, catalog, key, mask, width)
            _refuse_other_schema(schemas, key, table.schema)
            _unfinish(folder)
            size, sha256 = _write(folder / name, _encoded(table, format_, raw_cells=raw_cells))
            missing = pc.sum(pc.and_(pc.equal(table["status"], "ok"), pc.is_null(table["embedding"]))).as_py()
            done[name] = {
                "sources": sources,
                "rows": table.num_rows,
                "bytes": size,
                "sha256": sha256,
                "without_vector": missing or 0,
                "models": sorted(set(table["model"].to_pylist()) - {None}),
            }
            write_sealed(folder / _SHARDS / f"{key}.json", done[name], format_=_NOTE_FORMAT)
        doing("writing partitions", number + 1, len(records))
    return done, kept


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other exports out of it meanwhile. Raises CommandError."""
    make_directory(folder.absolute())
    if not (folder / _SHARDS).is_dir() and any(folder.iterdir()):
        raise CommandError(f"{folder} holds other files: name an empty folder, or a new one.")
    make_directory((folder / _SHARDS).absolute())
    path = folder / _SHARDS / "lock"
    try:
        lock = taken(path)
        while lock is not None and not lock.is_at(path):
            # An export that ended in this moment removed it.
            lock.close()
            lock = taken(path)
    except OSError as error:
        raise CommandError(
            f"{folder} cannot be locked ({error.strerror or error}). Give this user the right to write there,"
            " or name a folder on a file system that has locks."
        ) from error
    if lock is None:
        raise CommandError(f"Another export writes into {folder} now: wait for it, or name another folder.")
    try:
        yield
    finally:
        # Before it is free: the next one's lock is a file of its own.
        with suppress(OSError):
            path.unlink()
        lock.close()


def _claim(folder: Path, question: Mapping[str, object]) -> None:
    """Note the question, or go on where the same one was asked before. Raises CommandError."""
    asked = folder / _SHARDS / "question.json"
    try:
        before = read_sealed(asked)
    except FileNotFoundError:
        write_sealed(asked, question)
        return
    except BrokenSealError as error:
        raise CommandError(f"{asked} does not read ({error}): export into another folder.") from error
    if before != dict(question):
        raise CommandError(f"{folder} holds another export ({json.dumps(before)}): name another folder.")


def _known(folder: Path, key: str) -> dict[str, Any] | None:
    try:
        known = read_sealed(folder / _SHARDS / f"{key}.json", format_=_NOTE_FORMAT)
    except (OSError, BrokenSealError):
        return None  # The shard is written anew.
    return known if "models" in known else None


def _holds(path: Path, known: Mapping[str, Any]) -> bool:
    try:
        return bool(path.stat().st_size == known["bytes"] and sha256_of(path) == known["sha256"])
    except OSError:
        return False


def _shard_name(format_: Format, key: str) -> str:
    if format_ == "huggingface":
        return f"data/train-{key}.parquet"
    return f"{key}.{format_}"


def _width(settings: Settings, embedded: Mapping[str, PublishedRecord]) -> int:
    for key in embedded:
        type_ = PublishedPartitions(settings.embeddings).read(key).schema.field("embedding").type
        return int(type_.list_size)
    return 1


def _shard(
    settings: Settings, catalog: Catalog, key: str, mask: Mask | None, width: int
) -> tuple[pa.Table, dict[str, str | None]]:
    """The rows of one partition, and the digests of the files that they come from."""
    described, embedded = PublishedPartitions(settings.descriptions), PublishedPartitions(settings.embeddings)
    for _ in range(_ATTEMPTS):
        record, of_vectors = described.record(key), embedded.record(key)
        rows = described.read(key).to_table(list(_COLUMNS))
        vectors = (
            None if of_vectors is None else embedded.read(key).to_table(["ordinal", "embedding", "model"])
        )
        # A partition that was published anew meanwhile is read again.
        if (described.record(key), embedded.record(key)) == (record, of_vectors):
            break
    else:
        raise CommandError(f"Partition {key} changes all the time. Export it when its runs are over.")
    assert record is not None
    if mask is not None:
        rows = rows.filter(pa.array(mask[rows["ordinal"].to_numpy()]))
    if of_vectors is not None and not are_vectors_of(of_vectors, record):
        vectors = None  # Made from other texts than these: no vectors of these rows.
    rows = rows.combine_chunks()
    listed = catalog.slice(PropertyRange.from_key(key))
    at = pc.index_in(rows["ordinal"], value_set=listed["ordinal"].combine_chunks())
    texts = [None if one is None else description_text(one) for one in rows["description"].to_pylist()]
    rows = rows.append_column("text", pa.array(texts, pa.string()))
    rows = rows.append_column("image_uris", listed["image_uris"].take(at))
    type_ = pa.list_(pa.float32(), width)
    if vectors is None:
        columns = [pa.nulls(rows.num_rows, type_), pa.nulls(rows.num_rows, pa.string())]
    else:
        if vectors.schema.field("embedding").type != type_:
            raise CommandError(
                f"The vectors of {key} are {vectors.schema.field('embedding').type}, others {type_}:"
                " materialize property_embeddings of those that are stale, or choose others with --where."
            )
        at = pc.index_in(rows["ordinal"], value_set=vectors["ordinal"].combine_chunks())
        columns = [
            vectors[name].combine_chunks().take(at.combine_chunks()) for name in ("embedding", "model")
        ]
    rows = rows.append_column("embedding", columns[0]).append_column("embedding_model", columns[1])
    sources = {"described": record.sha256, "embedded": None if of_vectors is None else of_vectors.sha256}
    return rows.replace_schema_metadata(None), sources


def _refuse_other_schema(schemas: dict[str, pa.Schema], key: str, schema: pa.Schema) -> None:
    first = next(iter(schemas), None)
    if first is not None and not schemas[first].equals(schema):
        raise CommandError(
            f"Partitions {first} and {key} have other columns: the description schema was changed between"
            " them. Materialize the stale one, or choose rows of one of them with --where"
            " \"fingerprint = '…'\"."
        )
    schemas[key] = schema


def _encoded(table: pa.Table, format_: Format, *, raw_cells: bool) -> Iterator[bytes]:
    if format_ == "huggingface":
        stream = io.BytesIO()
        dictionary = [name for name in table.schema.names if name != "embedding"]
        pq.write_table(table, stream, compression="zstd", use_dictionary=dictionary, write_page_checksum=True)
        yield stream.getvalue()
    elif format_ == "csv":
        # A description's fields are each a column of its own, however deep; lists are JSON.
        while any(pa.types.is_struct(one) for one in table.schema.types):
            table = table.flatten()
        for at, field in enumerate(table.schema):
            if pa.types.is_nested(field.type):
                cells = [None if one is None else _json(one) for one in table[at].to_pylist()]
                table = table.set_column(at, field.name, pa.array(cells, pa.string()))
            elif pa.types.is_string(field.type) and not raw_cells:
                # A spreadsheet would compute such a text, and a formula can send other cells over a network.
                safe = pc.replace_substring_regex(table[at], _FORMULA, r"'\1")
                table = table.set_column(at, field.name, safe)
        stream = io.BytesIO()
        pa.csv.write_csv(table, stream)
        yield stream.getvalue()
    else:
        for batch in table.to_batches(max_chunksize=256):
            for row in batch.to_pylist():
                yield _json(row).encode() + b"\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _write(path: Path, pieces: Iterator[bytes]) -> tuple[int, str]:
    """Write a shard durably, read it back, and give it its name. Returns its size and SHA-256."""
    make_directory(path.parent)
    file = TemporaryFile(path)
    try:
        for piece in pieces:
            file.write(piece)
        sha256 = file.seal()
        publish_replacing(file.path, path)
    except BaseException:
        file.discard()
        raise
    return file.size, sha256


def _remove_others(folder: Path, format_: Format, names: set[str]) -> None:
    """Remove shards of an earlier state of the data set that are none of this one's, and what a kill left."""
    for left in folder.rglob(f".*{TEMPORARY_SUFFIX}"):
        left.unlink()
    pattern = _shard_name(format_, "*")
    for path in folder.glob(pattern):
        note = folder / _SHARDS / f"{path.stem.removeprefix('train-')}.json"
        # What has no note is a person's own file.
        if str(path.relative_to(folder)) not in names and note.exists():
            _unfinish(folder)
            path.unlink()
            note.unlink()


def _unfinish(folder: Path) -> None:
    """Before a shard changes: nothing says that the folder is whole until ``_finish`` says it again."""
    for name in (_ABOUT, _SUMS):
        (folder / name).unlink(missing_ok=True)
    sync_directory(folder)


def _finish(
    folder: Path,
    question: Mapping[str, object],
    done: Mapping[str, Mapping[str, Any]],
    found: Exported,
) -> None:
    about = {
        "format_version": 1,
        **question,
        "rows": found.rows,
        "without_vector": found.without_vector,
        "shards": {name: {"rows": one["rows"], "sha256": one["sha256"]} for name, one in done.items()},
    }
    write_replacing(folder / _ABOUT, json.dumps(about, indent=2).encode() + b"\n")
    sums = "".join(f"{one['sha256']}  {name}\n" for name, one in done.items())
    write_replacing(folder / _SUMS, sums.encode())
    if found.format == "huggingface":
        schema = "".join(pq.read_schema(folder / name).to_string(**_WHOLE) for name in list(done)[:1])
        models = sorted({name for one in done.values() for name in one["models"]})
        card = _card(models, question, found, schema)
        write_replacing(folder / "README.md", card.encode())


_WHOLE: Final[Mapping[str, Any]] = {"show_schema_metadata": False, "element_size_limit": 1 << 20}
"""Arrow cuts a type of more than 100 characters."""


def _card(models: Sequence[str], question: Mapping[str, object], found: Exported, schema: str) -> str:
    made_by = ", ".join(f"`{name.rstrip('/').rpartition('/')[2]}`" for name in models)
    columns = "\n".join(f"    {line}" for line in schema.splitlines())
    lack = counted(found.without_vector, "rows have", "row has")
    vectors = f"; {lack} none yet" if found.without_vector else ""
    where = f"Rows: those where `{question['where']}`." if question["where"] else "Rows: all published ones."
    return f"""---
license: other
license_name: fill-in
pretty_name: Property descriptions
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

# Property descriptions

**Licence: fill this in before you publish.** Images are named by their paths and not part of this folder.

{counted(found.rows, "properties")}, each described from its images by {made_by} (column `model`, exact
revision in `model_revision`), with the description as columns (`description`) and as text (`text`), and a
vector of the text (`embedding`, by `embedding_model`{vectors}). `status` is `ok`, or `failed` with the
reason. {where}

`{_SUMS}` has the digest of each file (`sha256sum -c {_SUMS}`), `{_ABOUT}` the rows of each.

## Columns

{columns}
"""


def _verify(folder: Path, done: Mapping[str, Mapping[str, Any]], *, expected: int) -> None:
    """Read every shard again: digests, and the number of rows. Raises CommandError."""
    for number, (name, one) in enumerate(done.items()):
        doing("reading each file once more", number, len(done))
        if not _holds(folder / name, one):
            raise CommandError(
                f"{folder / name} is not what was written. Look at the disk, and export again."
            )
    rows = sum(one["rows"] for one in done.values())
    if rows != expected:
        raise CommandError(
            f"{counted(rows, 'rows were', 'row was')} written and {expected:,} should be:"
            f" {command('audit')} says what is wrong."
        )


_EXAMPLES = """\b
vlm-assets export /srv/out --format huggingface
vlm-assets export cottages --format csv --where "building_type = 'cottage'\""""


@app.command("export", epilog=_EXAMPLES)
def export_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    format_: Annotated[
        Format, typer.Option("--format", help="A Hugging Face dataset, JSON lines, or flat CSV.")
    ] = Format.huggingface,
    home: Home = None,
    where: Where = None,
    raw_cells: Annotated[
        bool, typer.Option("--raw-cells", help="CSV: no ' before texts that begin with = + - or @.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write published rows, texts and vectors as a folder for others.

    Each row has its id, image paths, description, text and vector; each partition is a file.
    Counts and digests are verified at the end. The same command goes on with an export that was interrupted,
    and brings a finished one up to date.
    """
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    mask = None if where is None else chosen(current, catalog, where)
    found = export(current, catalog, folder, format_, where=where, mask=mask, raw_cells=raw_cells)
    if as_json:
        say_as_json(asdict(found))
        return
    say(
        f"{counted(found.rows, 'rows')} in {counted(found.shards, 'files')} of {folder}, verified.",
        fg="green",
    )
    if found.kept:
        say(f"{found.kept} of the files were there already.")
    if found.without_vector:
        say(f"{counted(found.without_vector, 'rows have', 'row has')} no vector yet: {command('run')}.")
