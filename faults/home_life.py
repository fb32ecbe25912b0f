"""A home with a catalogue, two assets and three partitions, and what people and sensors do with it next.

What lives here: its history, step by step from the first ingest to a withdrawal, and ``go_on``, which brings
whatever stands in a home to its end in the order of the product: catalogue, then each partition as a
materialization treats it (vlm_assets/assets/materialize.py), without Dagster, a device or a model. Every
value of a row follows from its property and its inputs, so that two homes can be compared. What does not:
what is done to a home (old_data.py, care_killed.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa

from faults.partition_life import Say
from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.assets.materialize import BeingWithdrawnError
from vlm_assets.assets.partition import INPUTS, Partition, adopt_rows, generation_of
from vlm_assets.assets.property_embeddings import EmbeddingWork, embedding_rows
from vlm_assets.commands.main import main as run_vlm_assets
from vlm_assets.config.resource_settings import build_text_embedding_model, build_vision_language_model
from vlm_assets.config.settings import EXAMPLE_EMBEDDER, Settings, load_settings
from vlm_assets.services.home_audit import audit
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_copies import check_copies, has_catalog, last_put_back
from vlm_catalog.catalog_file import WITHDRAWN, is_tombstone
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import PropertyRange
from vlm_catalog.withdrawn_ids import read_withdrawn
from vlm_durable.versions.partition_files import CannotRestoreError
from vlm_durable.versions.published import PublishedPartitions

for _imported_late in (
    "dateutil.relativedelta",
    "duckdb",
    "numpy.ma",
    "pyarrow.csv",
    "vlm_catalog.chosen_catalog",
    "vlm_assets.config.property_description",
    "vlm_results.export",
    "vlm_assets.commands.prune",
    "vlm_assets.commands.repair",
):
    # The product imports these when it needs them: here once, and not in each child.
    import_module(_imported_late)

RANGE_SIZE = 3
_MADE_AT = datetime(2026, 1, 1, tzinfo=UTC)
_DESCRIPTION = {
    "building_type": "detached",
    "facade_material": "brick",
    "roof": "flat",
    "garage": "none",
    "has_solar_panels": False,
    "garden": "lawn",
    "has_pool": False,
    "kitchen": "white",
    "living_floor": "tile",
    "has_fireplace": False,
    "bathroom": "bath",
}
_EARLIER_SETTINGS = {"max_new_tokens": 100}
"""Under which the first versions were made."""
_WIDTH = int(json.loads((EXAMPLE_EMBEDDER / "config.json").read_text())["hidden_size"])
"""Of the vectors. Asked of the model, it costs an import of three seconds in each child."""


def settings_of(home: Path, **changes: Any) -> Settings:
    """The settings under which a home is worked on."""
    return _settings().model_copy(update={"home": home, **changes})


@cache
def _settings() -> Settings:
    """Read once: it costs a child as much as opening a home."""
    return load_settings(model="example", embedding_model="example", devices="cpu:1")


class History:
    """How a home came to be. ``prefix``: of its ids, so that two homes can be told apart."""

    def __init__(self, prefix: str = "p") -> None:
        self.prefix = prefix
        settings_of(Path())  # In this process, before it forks children.
        self.steps: tuple[Callable[[Path], None], ...] = (
            lambda home: self.take_in(home, 6),
            lambda home: _materialize(home, 0, earlier=True, limit=1),
            lambda home: _materialize(home, 0, earlier=True),
            lambda home: _materialize(home, 1, earlier=True),
            lambda home: self.take_in(home, 9),
            lambda home: _materialize(home, 0),
            lambda home: _materialize(home, 1, limit=1),
            lambda home: _materialize(home, 1, limit=1),
            lambda home: self.take_in(home, 11),
            lambda home: _materialize(home, 1),
            lambda home: self.withdraw(home, 1),
            lambda home: _materialize(home, 2, limit=1),
            lambda home: _materialize(home, 2, limit=1),
        )

    def ids(self, count: int) -> list[str]:
        """The ids of the first so many properties of its listing."""
        return [f"{self.prefix}{number}" for number in range(count)]

    def take_in(self, home: Path, count: int, order: random.Random | None = None) -> None:
        """Ingest the listing's first ``count`` properties; in a random order, if one is handed in."""
        home.mkdir(parents=True, exist_ok=True)
        listing = self.write_listing(home, count, order)
        ingest(listing, home, range_size=RANGE_SIZE, image_root=Path(os.sep))

    def write_listing(self, home: Path, count: int, order: random.Random | None = None) -> Path:
        """Write the listing's first ``count`` properties beside the home."""
        ids = self.ids(count)
        if order is not None:
            order.shuffle(ids)
        listing = home.parent / f"{home.name}.listing.jsonl"
        lines = [{"property_id": property_id, "images": [f"{property_id}.jpg"]} for property_id in ids]
        listing.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return listing

    def listed_after(self, steps: int) -> int:
        """How many properties its listing has after so many steps."""
        return 6 if steps < 5 else 9 if steps < 9 else 11

    def withdraw(self, home: Path, number: int) -> None:
        """Withdraw one property."""
        settings = settings_of(home)
        list(withdraw(settings, prepare_withdrawal(settings, [f"{self.prefix}{number}"])))


def _materialize(home: Path, number: int, *, earlier: bool = False, limit: int | None = None) -> None:
    settings = settings_of(home, **(_EARLIER_SETTINGS if earlier else {}))
    materialize(settings, Catalog.open(home).ranges[number], lambda **report: None, limit=limit)


def go_on(
    home: Path,
    say: Say,
    history: History,
    count: int,
    *,
    order: random.Random | None = None,
    recompute: Sequence[Sequence[str]] = (),
) -> None:
    """Do what the sensors and a person do next, until every partition is published under the settings.

    First the catalogue is compared with its copies, and the listing is ingested once more. recompute: pairs
    of asset and key that a person asks to have computed anew.
    """
    compare_catalog(home)
    history.take_in(home, count, order)
    settings = settings_of(home)
    catalog = Catalog.open(home)
    for property_range in catalog.ranges:
        materialize(settings, property_range, say, recompute=[tuple(pair) for pair in recompute])


def compare_catalog(home: Path) -> None:
    """Compare the catalogue with its copies and read what was put right last, as a sensor does."""
    if has_catalog(home):
        check_copies(home)
        last_put_back(home)


def open_catalog(home: Path) -> None:
    """Open the catalogue and read all of it, as a run does."""
    Catalog.open(home).verify()


def materialize(
    settings: Settings,
    property_range: PropertyRange,
    say: Say,
    *,
    limit: int | None = None,
    recompute: Sequence[tuple[str, ...]] = (),
) -> None:
    """Bring both assets of one partition to their end. limit: stop after so many rows of descriptions."""
    catalog = Catalog.open(settings.home)
    described = DescriptionWork.for_range(
        settings, catalog, property_range, build_vision_language_model(settings)
    )
    withdrawn = read_withdrawn(settings.home)
    if withdrawn is not None and any(property_id in withdrawn for property_id in described.ids):
        raise BeingWithdrawnError("An older catalogue was put back: `vlm-assets withdraw` withdraws again.")
    asset = settings.descriptions.name
    partition = Partition(settings, asset, property_range.key, described.ids, described.fingerprint)
    anew = (asset, property_range.key) in recompute
    schema = described.rows_schema()
    if not _make(partition, described, schema, _description_rows, say, limit=limit, anew=anew):
        return
    rows = PublishedPartitions(settings.descriptions, lock_seconds=0).read(property_range.key)
    embedded = EmbeddingWork.for_range(catalog, property_range, rows, build_text_embedding_model(settings))
    asset = settings.embeddings.name
    partition = Partition(settings, asset, property_range.key, embedded.ids, embedded.fingerprint)
    anew = (asset, property_range.key) in recompute
    _make(partition, embedded, embedding_rows(_WIDTH), _embedding_rows, say, anew=anew)


def _make(
    partition: Partition,
    work: Any,
    schema: pa.Schema,
    rows: Callable[[Any, str, int], dict[str, Any]],
    say: Say,
    *,
    limit: int | None = None,
    anew: bool = False,
) -> bool:
    """As ``Materialization``: verify what is complete, else resume, compute, publish, retire."""
    key = partition.key
    published = PublishedPartitions(partition.paths.asset, lock_seconds=0)
    record = published.settled(key)
    generation = generation_of(partition, record, "campaign" if anew else None)
    complete = record is not None and record.fingerprint == partition.fingerprint.digest
    if record is not None and complete and (not anew or record.metadata["generation"] == generation):
        verification = published.verify(key)
        if not verification.ok or verification.repairs:
            say(note=f"{partition.asset} {key}: {verification.sentence()}")
        if not verification.ok:
            try:
                published.restore(key)
            except CannotRestoreError as error:
                raise CannotRestoreError(f"{error} [recompute {partition.asset} {key}]") from error
        generation = str(record.metadata["generation"])
        if leftover := partition.finish_retirement(generation, lambda: schema):
            say(note=f"{partition.asset} {key}: {leftover}")
        return True
    first = PropertyRange.from_key(key).start
    with partition.open_journal(generation, schema) as journal:
        if not anew:
            _, notes = adopt_rows(journal, partition, work.inputs, published, failed_too=True)
            for note in notes:
                say(note=f"{partition.asset} {key}: {note}")
        todo = [property_id for property_id in work.ids if property_id in journal.missing_ids]
        for property_id in todo[:limit]:
            row = rows(work, property_id, first + work.ids.index(property_id))
            row |= {INPUTS: work.inputs[property_id], "fingerprint": partition.fingerprint.digest}
            journal.submit(pa.Table.from_pylist([row], schema=schema))
            journal.flush()
            say(computed=[partition.asset, key, property_id])
        if journal.missing_ids:
            return False
        staged = published.stage(
            key,
            journal.read_ordered(),
            schema,
            expected_ids=partition.expected_ids,
            fingerprint=partition.fingerprint.digest,
            metadata={"generation": generation, "parts": dict(partition.fingerprint.parts), "began": 0.0},
        )
        with staged:
            staged.remember(work.record_metadata(staged.path))
            for note in published.publish(staged).notes:
                say(note=f"{partition.asset} {key}: {note}")
        journal.retire()
    return True


def _description_rows(work: DescriptionWork, property_id: str, ordinal: int) -> dict[str, Any]:
    made = {
        "property_id": property_id,
        "ordinal": ordinal,
        "tries": 1,
        "model": "example",
        "model_revision": work.fingerprint.parts["model"],
        "device": "cpu:0",
        "described_at": _MADE_AT,
    }
    if is_tombstone(property_id):
        return {**made, "status": "failed", "error_kind": WITHDRAWN, "error": "it has no images"}
    summary = f"{property_id} with {work.inputs[property_id]}"
    description = {**_DESCRIPTION, "floors": 1 + ordinal % 5, "summary": summary}
    return {
        **made,
        "status": "ok",
        "description": description,
        "raw_text": json.dumps(description),
        "attempts": 1,
        "images_seen": 1,
        "images_used": [f"{property_id}.jpg"],
        "images_not_used": [],
        "images_failed": [],
        "prompt_tokens": 1,
        "output_tokens": 1,
        "finish_reason": "stop",
        "seconds": 1.0,
    }


def _embedding_rows(work: EmbeddingWork, property_id: str, ordinal: int) -> dict[str, Any]:
    (status,) = [
        row["status"]
        for batch in work.descriptions.iter_batches(["property_id", "status"])
        for row in batch.to_pylist()
        if row["property_id"] == property_id
    ]
    digest = hashlib.sha256(work.inputs[property_id].encode()).digest()
    return {
        "property_id": property_id,
        "ordinal": ordinal,
        "status": status,
        "embedding": [1.0 + digest[n % len(digest)] for n in range(_WIDTH)] if status == "ok" else None,
        "model": "example",
        "model_revision": work.fingerprint.parts["embedding_model"],
        "device": "cpu:0",
        "embedded_at": _MADE_AT,
    }


def _without_cause(row: dict[str, Any]) -> dict[str, Any]:
    """A row; of a withdrawn property only what it is: a withdrawal and a run say why in other words."""
    if not is_tombstone(row["property_id"]):
        return row
    return {name: row.get(name) for name in ("property_id", "ordinal", "status", "error_kind")}


def tell_audit(home: Path, say: Say) -> None:
    """Say what an audit finds that reads every byte."""
    report = audit(settings_of(home), Catalog.open(home), deep=True)
    say(wrong=[f"{finding.asset} {finding.key}: {finding.sentence}" for finding in report.wrong])
    say(warnings=[f"{finding.asset} {finding.key}: {finding.sentence}" for finding in report.warnings])


def tell_contents(home: Path, say: Say) -> None:
    """Say what a reader finds: the ids of the catalogue in their order, and the rows of each file."""
    settings, catalog = settings_of(home), Catalog.open(home)
    tables = [table["property_id"].to_pylist() for _, table in catalog.slices(with_tail=True)]
    contents: dict[str, Any] = {"catalogue": [_without_key(id_) for ids in tables for id_ in ids]}
    for folders in settings.partitioned_assets:
        published = PublishedPartitions(folders, lock_seconds=0)
        for key in folders.published_keys():
            rows = _comparable(published.read(key).to_table().to_pylist())
            contents[f"{folders.name}/{key}"] = hashlib.sha256(str(rows).encode()).hexdigest()
    say(contents=contents)


def _comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file without what comes from the key of a home: withdrawn ids, and the fingerprint."""
    kept = [{**_without_cause(row), "property_id": _without_key(row["property_id"])} for row in rows]
    if any(is_tombstone(row["property_id"]) for row in rows):
        for row in kept:
            row.pop("fingerprint", None)
    return kept


def _without_key(property_id: str) -> str:
    return WITHDRAWN if is_tombstone(property_id) else property_id


def run_command(home: Path, say: Say, words: Sequence[str]) -> None:
    """Run a command of the product, as from a terminal: says its exit code and all that it wrote."""
    models = dict.fromkeys(("VLM_ASSETS_MODEL", "VLM_ASSETS_EMBEDDING_MODEL"), "example")
    os.environ |= models | {"VLM_ASSETS_HOME": str(home), "VLM_ASSETS_DEVICES": "cpu:1"}
    sys.argv = ["vlm-assets", *words]
    written, code = StringIO(), 0
    with redirect_stdout(written), redirect_stderr(written):
        try:
            run_vlm_assets()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    say(code=code, output=written.getvalue())
