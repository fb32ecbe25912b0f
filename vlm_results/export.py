"""Export: published rows as a folder that others can read, a shard a partition, verified and resumable.

``exported_rows.py`` makes the rows, ``published_table.py`` knows which a condition chooses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import typer

from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_all, say_as_json
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command, given_command
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
from vlm_durable.mirror.bucket import Place, place_of
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted
from vlm_results.exported_images import FOLDER, ExportedImages, Images, ShardImages, huggingface_features
from vlm_results.exported_rows import ChosenRows, ExportedRows, in_order
from vlm_results.guarantee import Guarantee, as_json
from vlm_results.joined_rows import SETS, further_records, lacking_sentences
from vlm_results.published_table import Where, lacking_rows, published_records


class Format(StrEnum):
    """What to write."""

    huggingface = "huggingface"
    jsonl = "jsonl"
    csv = "csv"
    iceberg = "iceberg"


_SHARDS: Final = ".shards"
"""Folder of the lock and of a note on each finished shard, by which an export is resumed."""

_NOTE_FORMAT: Final = 4
"""Format 1 of a note did not name the models, 2 did not count images; 3 was of a shard without confidence."""

_ABOUT_FORMAT: Final = 2
"""Format 1 of ``export.json`` did not say where images are: rows had the catalogue's names of them alone."""

_SUMS: Final = "SHA256SUMS"
_ABOUT: Final = "export.json"

_FORMULA: Final = r"\A([=+\-@\t\r])"
"""How a text begins that a spreadsheet takes for a formula."""


@dataclass(frozen=True)
class Exported:
    """The folder after an export. without_vector: rows that are described and not embedded (yet).

    kept: shards that an earlier export of the same rows, or an interrupted one, had written. images: those
    that rows have a URI of, images_missing: those that could not be read, null in the rows. lacking: rows
    without a row of a further question set (yet), by its name.
    """

    folder: str
    format: Format
    rows: int
    shards: int
    kept: int
    without_vector: int
    images: int
    images_missing: int
    lacking: Mapping[str, int]


@dataclass(frozen=True)
class _Task:
    """What an export reads, and what it makes of it."""

    folder: Path
    format: Format
    rows: ExportedRows
    raw_cells: bool
    embedded: Mapping[str, PublishedRecord]


@dataclass(frozen=True)
class ExportOptions:
    """Which rows an export has, and how they are written.

    where: the condition for which rows; None: all that are published. raw_cells: write texts into a CSV as
    they are, though a spreadsheet would compute some of them. images, image_base_url: see
    ``exported_images.py``.
    """

    where: str | None = None
    raw_cells: bool = False
    images: Images = Images.link
    image_base_url: str | None = None


ALL_ROWS: Final = ExportOptions()


def export(
    settings: Settings, catalog: Catalog, folder: Path, format_: Format, options: ExportOptions = ALL_ROWS
) -> Exported:
    """Write published rows, and verify them. Goes on with an interrupted export.

    Raises CommandError, PublishedError, StoreAwayError, OSError.
    """
    images = options.images
    if images is Images.embed and format_ is Format.csv:
        raise CommandError(
            f"A cell of a CSV holds no image: {given_command('--images', 'copy')}, or"
            f" {given_command('--format', 'huggingface')}."
        )
    records = published_records(settings.descriptions, catalog)
    if not records:
        raise CommandError(f"No description is published yet: {command('run')}.")
    exported_images = ExportedImages(catalog, folder, images, options.image_base_url)
    exported_images.refuse_away()
    question = {
        "catalog_id": catalog.catalog_id,
        "rows_as": format_,
        "where": options.where,
        "raw_cells": options.raw_cells,
        **_asked_images(images, options.image_base_url),
    }
    doing("looking at what is published")
    chosen = None
    rows = {key: record.rows for key, record in records.items()}
    if options.where is not None:
        chosen = ChosenRows.by_condition(settings, catalog, records, options.where)
        rows = {key: chosen.count(key) for key in records}
        records = {key: record for key, record in records.items() if rows[key]}
    embedded = published_records(settings.embeddings, catalog)
    exported_rows = ExportedRows(
        settings,
        catalog,
        exported_images,
        Guarantee.read(settings),
        chosen=chosen,
        width=_width(settings, embedded),
    )
    task = _Task(folder, format_, exported_rows, options.raw_cells, embedded)
    expected = sum(rows.values())
    with _locked(folder):
        _claim(folder, question)
        notes, kept = _write_shards(task, records)
        _remove_others(task, set(notes))
        _verify(task, notes, expected=expected)

        def total(name: str) -> int:
            return sum(note[name] for note in notes.values())

        exported = Exported(
            str(folder),
            format_,
            rows=expected,
            shards=len(notes),
            kept=kept,
            without_vector=total("without_vector"),
            images=total("images"),
            images_missing=total("images_missing"),
            lacking=lacking_rows(settings, catalog, {key: rows[key] for key in records}),
        )
        promised = as_json(settings)
        _finish(folder, {**question, **promised, "image_roots": exported_images.roots}, notes, exported)
    return exported


def _asked_images(images: Images = Images.link, base_url: str | None = None) -> dict[str, object]:
    """What the question has of images; an export of an earlier version asked for the defaults."""
    return {"images": images, "image_base_url": base_url}


def _write_shards(
    task: _Task, records: Mapping[str, PublishedRecord]
) -> tuple[dict[str, dict[str, Any]], int]:
    """Write the missing shards. Returns the note on each shard by its name, and how many existed already."""
    schemas: dict[str, pa.Schema] = {}
    folder = task.folder
    notes: dict[str, dict[str, Any]] = {}
    kept = 0
    for number, (key, record) in enumerate(records.items()):
        name = _shard_name(task.format, key)
        further = further_records(task.rows.settings, key)
        sources = task.rows.sources(key, record, task.embedded.get(key), further)
        note = _read_note(folder, key)
        if note is not None and note["sources"] == sources and _is_complete(task, name, note):
            kept += 1
        else:
            table, read = task.rows.read(key)
            sources = task.rows.sources(key, read.described, read.embedded, read.further_records)
            _refuse_other_schema(schemas, key, table.schema)
            table, images = task.rows.images.place(table, key)
            _unfinish(folder)
            size, sha256 = _write(task, folder / name, table, images)
            missing = pc.sum(pc.and_(pc.equal(table["status"], "ok"), pc.is_null(table["embedding"]))).as_py()
            note = {
                "sources": sources,
                "rows": table.num_rows,
                "bytes": size,
                "sha256": sha256,
                "without_vector": missing or 0,
                "models": sorted(set(table["model"].to_pylist()) - {None}),
                **images.note(),
            }
            write_sealed(folder / _SHARDS / f"{key}.json", note, format_=_NOTE_FORMAT)
            task.rows.images.remove_others(key, images)
        # The names may be many, and all notes are held.
        notes[name] = {field: value for field, value in note.items() if field != "unread"}
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
    if {**_asked_images(), **recorded} != dict(question):
        raise CommandError(f"{folder} holds another export ({json.dumps(recorded)}): name another folder.")


def _read_note(folder: Path, key: str) -> dict[str, Any] | None:
    try:
        note = read_sealed(folder / _SHARDS / f"{key}.json", format_=_NOTE_FORMAT)
    except (OSError, BrokenSealError):
        return None  # The shard is written anew.
    return note if "unread" in note else None


def _is_complete(task: _Task, name: str, note: Mapping[str, Any]) -> bool:
    """Whether a shard and its copies are what the note says, and no image is to be tried again."""
    return _holds(task, name, note) and not task.rows.images.readable(note["unread"])


def _holds(task: _Task, name: str, note: Mapping[str, Any]) -> bool:
    """Whether a shard has the size and digest of its note, and its copies the names and sizes."""
    path = task.folder / name
    try:
        is_whole = path.stat().st_size == note["bytes"] and sha256_of(path) == note["sha256"]
    except OSError:
        return False
    return is_whole and task.rows.images.holds(_key_of(name), note)


def _shard_name(format_: Format, key: str) -> str:
    if format_ == "huggingface":
        return f"data/train-{key}.parquet"
    return f"{key}.{format_}"


def _key_of(name: str) -> str:
    """The key in a shard's name."""
    return Path(name).stem.removeprefix("train-")


def _width(settings: Settings, embedded: Mapping[str, PublishedRecord]) -> int:
    for key in embedded:
        type_ = PublishedPartitions(settings.embeddings).read(key).schema.field("embedding").type
        return int(type_.list_size)
    return 1


def _refuse_other_schema(schemas: dict[str, pa.Schema], key: str, schema: pa.Schema) -> None:
    first = next(iter(schemas), None)
    if first is not None and not schemas[first].equals(schema):
        raise CommandError(
            f"Partitions {first} and {key} have other columns: the description schema was changed between"
            " them. Materialize the stale one, or choose rows of one of them with --where"
            " \"fingerprint = '…'\"."
        )
    schemas[key] = schema


def _write(task: _Task, path: Path, table: pa.Table, images: ShardImages) -> tuple[int, str]:
    """Write a shard durably, read it back, and give it its name. Returns its size and SHA-256."""
    table = in_order(table)
    parts = iter([table])
    if task.rows.images.mode is Images.embed:
        parts = task.rows.images.embedded(table, images, as_text=task.format is Format.jsonl)
    make_directory(path.parent)
    file = TemporaryFile(path)
    try:
        if task.format is Format.huggingface:
            _write_parquet(file, parts)
        elif task.format is Format.csv:
            pa.csv.write_csv(_flat(table, raw_cells=task.raw_cells), file)
        else:
            for part in parts:
                for batch in part.to_batches(max_chunksize=256):
                    file.write("".join(f"{_json(row)}\n" for row in batch.to_pylist()).encode())
        sha256 = file.seal()
        publish_replacing(file.path, path)
    except BaseException:
        file.discard()
        raise
    return file.size, sha256


def _write_parquet(file: TemporaryFile, parts: Iterator[pa.Table]) -> None:
    first = next(parts)
    schema = first.schema
    dictionary = [name for name in schema.names if name not in ("embedding", "images")]
    if "images" in schema.names:
        schema = huggingface_features(schema)
    with pq.ParquetWriter(
        file, schema, compression="zstd", use_dictionary=dictionary, write_page_checksum=True
    ) as writer:
        for part in chain([first], parts):
            writer.write_table(part.replace_schema_metadata(schema.metadata))


def _flat(table: pa.Table, *, raw_cells: bool) -> pa.Table:
    """Each field of a description as a column, however deep it is nested; lists as JSON."""
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
    return table


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_as_text)


def _as_text(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _remove_others(task: _Task, names: set[str]) -> None:
    """Remove temporary files that a kill left, and shards of earlier rows that are not among these names."""
    folder = task.folder
    for place in (folder, folder / _SHARDS, (folder / _shard_name(task.format, "*")).parent):
        for path in place.glob(f".*{TEMPORARY_SUFFIX}"):
            path.unlink()
    for path in folder.glob(_shard_name(task.format, "*")):
        note = folder / _SHARDS / f"{_key_of(path.name)}.json"
        # A file without a note is a person's own.
        if str(path.relative_to(folder)) not in names and note.exists():
            _unfinish(folder)
            path.unlink()
            note.unlink()
    keys = {_key_of(name) for name in names}
    for key in task.rows.images.copied_keys():
        if key not in keys:
            _unfinish(folder)
            task.rows.images.remove(key)


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
        "format_version": _ABOUT_FORMAT,
        **question,
        "rows": exported.rows,
        "without_vector": exported.without_vector,
        "images_with_uri": exported.images,
        "images_missing": exported.images_missing,
        **({"lacking": exported.lacking} if exported.lacking else {}),
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
---

# Property descriptions

**Licence: fill this in before you publish.** {_about_images(question, exported)}

{counted(exported.rows, "properties")}, each described from its images by {made_by} (column `model`, exact
revision in `model_revision`), with the description as columns (`description`) and as text (`text`), a digest
of the answer and of what decided it (`answer`), and a vector of the text (`embedding`, by
`embedding_model`{vectors}). `status` is `ok`, or `failed` with the reason. {where}
{_about_sets(exported)}
`{_SUMS}` has the digest of each file (`sha256sum -c {_SUMS}`), `{_ABOUT}` the rows of each.

## Columns

{columns}
"""


def _about_sets(exported: Exported) -> str:
    """Which further question sets were asked, and how far, for the card."""
    if not exported.lacking:
        return ""
    names = ", ".join(f"`{name}`" for name in exported.lacking)
    sentences = [
        f"Further fields of `description` come from further question sets ({names}): `{SETS}` has for each"
        " the status, the model and the time of its row, and is null where a property has no row of it. The"
        " status `not_asked` is no failure: the set was not to be asked of this property. `filled` names the"
        " fields that show the set's answer in place of another set's.",
        *lacking_sentences(exported.lacking),
    ]
    return "\n" + " ".join(sentences) + "\n"


def _about_images(question: Mapping[str, Any], exported: Exported) -> str:
    """What the card says about the place of the images."""
    if not question["image_roots"]:
        return "Images are not part of it."
    roots = " and ".join(f"`{root}`" for root in question["image_roots"])
    places = {
        Images.link: "`image_uris` has their places",
        Images.copy: f"`image_uris` has their copies in this folder, each named by its SHA-256 in `{FOLDER}`",
        Images.embed: "`images` has the files themselves, `image_uris` their places",
    }
    sentence = (
        f"`image_names` has the names of each property's images below {roots}; beside each,"
        f" {places[question['images']]}. `images_used` has those that the description was made from."
    )
    if exported.images_missing:
        sentence += f" {counted(exported.images_missing, 'images')} could not be read: null."
    return sentence


def _verify(task: _Task, notes: Mapping[str, Mapping[str, Any]], *, expected: int) -> None:
    """Read every shard again and compare its digest, and count the rows. Raises CommandError."""
    for number, (name, note) in enumerate(notes.items()):
        doing("reading each file once more", number, len(notes))
        if not _holds(task, name, note):
            raise CommandError(
                f"{task.folder / name} is not what was written, or its images' copies are not. Look at the"
                " disk, and export again."
            )
    rows = sum(note["rows"] for note in notes.values())
    if rows != expected:
        raise CommandError(
            f"{counted(rows, 'rows were', 'row was')} written and {expected:,} should be:"
            f" {command('audit')} says what is wrong."
        )


_EXAMPLES = """\b
vlm-assets export /srv/out --format huggingface
vlm-assets export /srv/out --images copy  a folder that can be sent, with the images
vlm-assets export /srv/table --format iceberg   a table with snapshots; each run adds what changed
vlm-assets export cottages --format csv --where "building_type = 'cottage'\""""


@app.command("export", epilog=_EXAMPLES)
def export_command(
    place: Annotated[str, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    format_: Annotated[
        Format,
        typer.Option("--format", help="A Hugging Face dataset, JSON lines, flat CSV, or an Iceberg table."),
    ] = Format.huggingface,
    home: Home = None,
    where: Where = None,
    raw_cells: Annotated[
        bool, typer.Option("--raw-cells", help="CSV: no ' before texts that begin with = + - or @.")
    ] = False,
    images: Annotated[
        Images,
        typer.Option(
            "--images", help="In each row: where its images are, copies in DIR, their bytes, or nothing."
        ),
    ] = Images.link,
    image_base_url: Annotated[
        str | None,
        typer.Option(
            "--image-base-url",
            metavar="URL",
            help="Where the image root is served, or with --images copy DIR: stands before each name.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write published rows, texts and vectors as a folder for others.

    Each row has its id, its images, description, text and vector; each partition is a file.
    Counts and digests are verified at the end. The same command goes on with an export that was interrupted,
    and brings a finished one up to date.
    """
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    folder = place_of(place)
    if format_ is Format.iceberg:
        _bring_table_up_to_date(current, catalog, folder, where, images, image_base_url, as_json=as_json)
        return
    if not isinstance(folder, Path):
        raise CommandError(f"An export is a folder on disk: export into one, and copy it to {folder}.")
    options = ExportOptions(where, raw_cells, images, image_base_url)
    exported = export(current, catalog, folder, format_, options)
    if as_json:
        say_as_json(asdict(exported))
        return
    say(
        f"{counted(exported.rows, 'rows')} in {counted(exported.shards, 'files')} of {folder}, verified.",
        fg="green",
    )
    if exported.kept:
        say(f"{exported.kept} of the files were there already.")
    if exported.images_missing:
        say(
            f"{counted(exported.images_missing, 'images')} cannot be read, and are null in their rows. Put"
            " what is missing back and export again: it is tried once more."
        )
    if exported.without_vector:
        say(f"{counted(exported.without_vector, 'rows have', 'row has')} no vector yet: {command('run')}.")
    say_all(lacking_sentences(exported.lacking))


def _bring_table_up_to_date(
    settings: Settings,
    catalog: Catalog,
    folder: Place,
    where: str | None,
    images: Images,
    base_url: str | None,
    *,
    as_json: bool,
) -> None:
    from vlm_results.described_table import TablePlace, bring_up_to_date

    if where is not None:
        raise CommandError("A table has all rows: leave out --where, and choose rows when you read it.")
    table = bring_up_to_date(settings, catalog, TablePlace.from_settings(settings, folder), images, base_url)
    if as_json:
        say_as_json(asdict(table))
        return
    say(
        f"{counted(table.rows, 'rows')} in {counted(table.partitions, 'partitions')} of {table.table} in"
        f" {folder}; {counted(table.written, 'partitions were', 'partition was')} written.",
        fg="green",
    )
    say_all(table.sentences())
