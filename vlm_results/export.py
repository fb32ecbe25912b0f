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
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted
from vlm_engine.schema import description_text
from vlm_results.published_table import Mask, Where, are_vectors_of, matching_rows, published_records


class Format(StrEnum):
    """What to write."""

    huggingface = "huggingface"
    jsonl = "jsonl"
    csv = "csv"


_SHARDS: Final = ".shards"
"""Folder of the lock and of a note on each finished shard, by which an export is resumed."""

_NOTE_FORMAT: Final = 2
"""Format 1 of a note did not name the models."""

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
    """The folder after an export. without_vector: rows that are described and not embedded (yet).

    kept: shards that an earlier export of the same rows, or an interrupted one, had written.
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

    where: the condition that the mask was made from. raw_cells: write texts into a CSV as they are, though a
    spreadsheet would compute some of them. Raises CommandError, PublishedError, OSError.
    """
    records = published_records(settings.descriptions, catalog)
    if not records:
        raise CommandError(f"No description is published yet: {command('run')}.")
    question = {"catalog_id": catalog.catalog_id, "rows_as": format_, "where": where, "raw_cells": raw_cells}
    doing("looking at what is published")
    rows = {key: record.rows for key, record in records.items()}
    if mask is not None:
        for key in records:
            bounds = PropertyRange.from_key(key)
            rows[key] = int(np.count_nonzero(mask[bounds.start : bounds.stop]))
        records = {key: record for key, record in records.items() if rows[key]}
    expected = sum(rows.values())
    with _locked(folder):
        _claim(folder, question)
        notes, kept = _write_shards(settings, catalog, folder, format_, records, mask, raw_cells=raw_cells)
        _remove_others(folder, format_, set(notes))
        _verify(folder, notes, expected=expected)
        exported = Exported(
            str(folder),
            format_,
            rows=expected,
            shards=len(notes),
            kept=kept,
            without_vector=sum(note["without_vector"] for note in notes.values()),
        )
        _finish(folder, question, notes, exported)
    return exported


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
    """Write the missing shards. Returns the note on each shard by its name, and how many existed already."""
    schemas: dict[str, pa.Schema] = {}
    embedded = published_records(settings.embeddings, catalog)
    width = _width(settings, embedded)
    notes: dict[str, dict[str, Any]] = {}
    kept = 0
    for number, (key, record) in enumerate(records.items()):
        name = _shard_name(format_, key)
        sources = {"described": record.sha256, "embedded": embedded[key].sha256 if key in embedded else None}
        note = _read_note(folder, key)
        if note is not None and note["sources"] == sources and _holds(folder / name, note):
            notes[name], kept = note, kept + 1
        else:
            table, sources = _shard(settings, catalog, key, mask, width)
            _refuse_other_schema(schemas, key, table.schema)
            _unfinish(folder)
            size, sha256 = _write(folder / name, _encoded(table, format_, raw_cells=raw_cells))
            missing = pc.sum(pc.and_(pc.equal(table["status"], "ok"), pc.is_null(table["embedding"]))).as_py()
            notes[name] = {
                "sources": sources,
                "rows": table.num_rows,
                "bytes": size,
                "sha256": sha256,
                "without_vector": missing or 0,
                "models": sorted(set(table["model"].to_pylist()) - {None}),
            }
            write_sealed(folder / _SHARDS / f"{key}.json", notes[name], format_=_NOTE_FORMAT)
        doing("writing partitions", number + 1, len(records))
    return notes, kept


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and lock it against other exports. Raises CommandError."""
    make_directory(folder.absolute())
    if not (folder / _SHARDS).is_dir() and any(folder.iterdir()):
        raise CommandError(f"{folder} holds other files: name an empty folder, or a new one.")
    make_directory((folder / _SHARDS).absolute())
    path = folder / _SHARDS / "lock"
    try:
        lock = acquire_lock(path)
        while lock is not None and not lock.is_at(path):
            # An export that ended at this moment removed the file.
            lock.close()
            lock = acquire_lock(path)
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
        # Removed before it is free: the next export makes a lock file of its own.
        with suppress(OSError):
            path.unlink()
        lock.close()


def _claim(folder: Path, question: Mapping[str, object]) -> None:
    """Record the question of a new export, or compare it with the recorded one. Raises CommandError."""
    path = folder / _SHARDS / "question.json"
    try:
        recorded = read_sealed(path)
    except FileNotFoundError:
        write_sealed(path, question)
        return
    except BrokenSealError as error:
        raise CommandError(f"{path} does not read ({error}): export into another folder.") from error
    if recorded != dict(question):
        raise CommandError(f"{folder} holds another export ({json.dumps(recorded)}): name another folder.")


def _read_note(folder: Path, key: str) -> dict[str, Any] | None:
    try:
        note = read_sealed(folder / _SHARDS / f"{key}.json", format_=_NOTE_FORMAT)
    except (OSError, BrokenSealError):
        return None  # The shard is written anew.
    return note if "models" in note else None


def _holds(path: Path, note: Mapping[str, Any]) -> bool:
    """Whether a shard has the size and digest of its note."""
    try:
        return bool(path.stat().st_size == note["bytes"] and sha256_of(path) == note["sha256"])
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
    """The rows of a partition, and the digests of the files that they come from."""
    described, embedded = PublishedPartitions(settings.descriptions), PublishedPartitions(settings.embeddings)
    for _ in range(_ATTEMPTS):
        record, vectors_record = described.record(key), embedded.record(key)
        rows = described.read(key).to_table(list(_COLUMNS))
        vectors = (
            None if vectors_record is None else embedded.read(key).to_table(["ordinal", "embedding", "model"])
        )
        # A partition that was published again meanwhile is read again.
        if (described.record(key), embedded.record(key)) == (record, vectors_record):
            break
    else:
        raise CommandError(f"Partition {key} changes all the time. Export it when its runs are over.")
    assert record is not None
    if mask is not None:
        rows = rows.filter(pa.array(mask[rows["ordinal"].to_numpy()]))
    if vectors_record is not None and not are_vectors_of(vectors_record, record):
        vectors = None  # They were made from other texts than those of these rows.
    rows = rows.combine_chunks()
    listed = catalog.slice(PropertyRange.from_key(key))
    positions = pc.index_in(rows["ordinal"], value_set=listed["ordinal"].combine_chunks())
    texts = [
        None if description is None else description_text(description)
        for description in rows["description"].to_pylist()
    ]
    rows = rows.append_column("text", pa.array(texts, pa.string()))
    rows = rows.append_column("image_uris", listed["image_uris"].take(positions))
    type_ = pa.list_(pa.float32(), width)
    if vectors is None:
        columns = [pa.nulls(rows.num_rows, type_), pa.nulls(rows.num_rows, pa.string())]
    else:
        if vectors.schema.field("embedding").type != type_:
            raise CommandError(
                f"The vectors of {key} are {vectors.schema.field('embedding').type}, others {type_}:"
                " materialize property_embeddings of those that are stale, or choose others with --where."
            )
        positions = pc.index_in(rows["ordinal"], value_set=vectors["ordinal"].combine_chunks())
        columns = [
            vectors[name].combine_chunks().take(positions.combine_chunks()) for name in ("embedding", "model")
        ]
    rows = rows.append_column("embedding", columns[0]).append_column("embedding_model", columns[1])
    sources = {
        "described": record.sha256,
        "embedded": None if vectors_record is None else vectors_record.sha256,
    }
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
        # Each field of a description becomes a column, however deep it is nested; lists become JSON.
        while any(pa.types.is_struct(type_) for type_ in table.schema.types):
            table = table.flatten()
        for number, field in enumerate(table.schema):
            if pa.types.is_nested(field.type):
                cells = [None if value is None else _json(value) for value in table[number].to_pylist()]
                table = table.set_column(number, field.name, pa.array(cells, pa.string()))
            elif pa.types.is_string(field.type) and not raw_cells:
                # A spreadsheet would compute such a text, and a formula can send other cells over a network.
                safe = pc.replace_substring_regex(table[number], _FORMULA, r"'\1")
                table = table.set_column(number, field.name, safe)
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
    """Remove temporary files that a kill left, and shards of earlier rows that are not among these names."""
    for path in folder.rglob(f".*{TEMPORARY_SUFFIX}"):
        path.unlink()
    pattern = _shard_name(format_, "*")
    for path in folder.glob(pattern):
        note = folder / _SHARDS / f"{path.stem.removeprefix('train-')}.json"
        # A file without a note is a person's own.
        if str(path.relative_to(folder)) not in names and note.exists():
            _unfinish(folder)
            path.unlink()
            note.unlink()


def _unfinish(folder: Path) -> None:
    """Remove the files that declare the folder complete, before a shard changes; ``_finish`` writes them."""
    for name in (_ABOUT, _SUMS):
        (folder / name).unlink(missing_ok=True)
    sync_directory(folder)


def _finish(
    folder: Path,
    question: Mapping[str, object],
    notes: Mapping[str, Mapping[str, Any]],
    exported: Exported,
) -> None:
    about = {
        "format_version": 1,
        **question,
        "rows": exported.rows,
        "without_vector": exported.without_vector,
        "shards": {name: {"rows": note["rows"], "sha256": note["sha256"]} for name, note in notes.items()},
    }
    write_replacing(folder / _ABOUT, json.dumps(about, indent=2).encode() + b"\n")
    sums = "".join(f"{note['sha256']}  {name}\n" for name, note in notes.items())
    write_replacing(folder / _SUMS, sums.encode())
    if exported.format == "huggingface":
        schema = "".join(pq.read_schema(folder / name).to_string(**_WHOLE) for name in list(notes)[:1])
        models = sorted({model for note in notes.values() for model in note["models"]})
        card = _card(models, question, exported, schema)
        write_replacing(folder / "README.md", card.encode())


_WHOLE: Final[Mapping[str, Any]] = {"show_schema_metadata": False, "element_size_limit": 1 << 20}
"""Arrow cuts a type of more than 100 characters."""


def _card(models: Sequence[str], question: Mapping[str, object], exported: Exported, schema: str) -> str:
    made_by = ", ".join(f"`{name.rstrip('/').rpartition('/')[2]}`" for name in models)
    columns = "\n".join(f"    {line}" for line in schema.splitlines())
    lacking = counted(exported.without_vector, "rows have", "row has")
    vectors = f"; {lacking} none yet" if exported.without_vector else ""
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

{counted(exported.rows, "properties")}, each described from its images by {made_by} (column `model`, exact
revision in `model_revision`), with the description as columns (`description`) and as text (`text`), and a
vector of the text (`embedding`, by `embedding_model`{vectors}). `status` is `ok`, or `failed` with the
reason. {where}

`{_SUMS}` has the digest of each file (`sha256sum -c {_SUMS}`), `{_ABOUT}` the rows of each.

## Columns

{columns}
"""


def _verify(folder: Path, notes: Mapping[str, Mapping[str, Any]], *, expected: int) -> None:
    """Read every shard again and compare its digest, and count the rows. Raises CommandError."""
    for number, (name, note) in enumerate(notes.items()):
        doing("reading each file once more", number, len(notes))
        if not _holds(folder / name, note):
            raise CommandError(
                f"{folder / name} is not what was written. Look at the disk, and export again."
            )
    rows = sum(note["rows"] for note in notes.values())
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
    mask = None if where is None else matching_rows(current, catalog, where)
    exported = export(current, catalog, folder, format_, where=where, mask=mask, raw_cells=raw_cells)
    if as_json:
        say_as_json(asdict(exported))
        return
    say(
        f"{counted(exported.rows, 'rows')} in {counted(exported.shards, 'files')} of {folder}, verified.",
        fg="green",
    )
    if exported.kept:
        say(f"{exported.kept} of the files were there already.")
    if exported.without_vector:
        say(f"{counted(exported.without_vector, 'rows have', 'row has')} no vector yet: {command('run')}.")
