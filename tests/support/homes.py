"""A dataset of made rows: catalogue, published descriptions and embeddings of nine properties, no model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import BaseModel, Field

from tests.support.journals import open_journal
from tests.support.listings import write_listing
from vlm_assets.assets.description_work import description_rows
from vlm_assets.assets.partition import NOT_ASKED, Refusal
from vlm_assets.assets.published_rows import COUNTED, row_counts
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import IngestReport, ingest
from vlm_catalog.ranges import PropertyRange
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine.schema import load_schema

COMMON = [
    ("property_id", pa.string()),
    ("ordinal", pa.int64()),
    ("status", pa.string()),
    ("fingerprint", pa.string()),
]
DESCRIPTIONS = pa.schema(
    [
        *COMMON,
        ("error_kind", pa.string()),
        ("error", pa.string()),
        ("raw_text", pa.string()),
        ("images_seen", pa.int32()),
        ("inputs_digest", pa.string()),
        ("model", pa.string()),
        ("model_revision", pa.string()),
        ("device", pa.string()),
        ("described_at", pa.timestamp("us", tz="UTC")),
        ("description", pa.struct([("floors", pa.int64()), ("has_pool", pa.bool_())])),
    ]
)
BEGAN = datetime(2026, 11, 1, tzinfo=UTC)
EMBEDDINGS = pa.schema([*COMMON, ("embedding", pa.list_(pa.float32(), 2)), ("model", pa.string())])

Rows = list[dict[str, Any]]

NO_ANSWER: Mapping[str, Any] = {
    "status": NOT_ASKED,
    "attempts": 0,
    "images_seen": 0,
    "seconds": 0.0,
    "model": None,
    "model_revision": None,
    "device": None,
}
"""What the row of a property has that is not asked."""


class Condition(BaseModel):
    """The schema of a further question set."""

    wear: str = Field(description="How worn the walls are")
    needs_paint: bool = Field(description="Whether the walls need paint")


class Again(BaseModel):
    """The schema of a set that asks again how many floors there are, and one thing more."""

    floors: int | None = Field(description="How many floors")
    material: str | None = Field(description="What the walls are made of")


@dataclass
class Dataset:
    """A home with three ranges of three properties, p0 to p8; p4 could not be described."""

    settings: Settings

    @property
    def catalog(self) -> Catalog:
        return Catalog.open(self.settings.home)

    @property
    def keys(self) -> list[str]:
        return [one.key for one in self.catalog.ranges]

    @property
    def descriptions(self) -> PublishedPartitions:
        return PublishedPartitions(self.settings.descriptions, lock_seconds=0)

    @property
    def embeddings(self) -> PublishedPartitions:
        return PublishedPartitions(self.settings.embeddings, lock_seconds=0)

    def rows(self, key: str) -> Rows:
        """The rows of a range as they should be."""
        wanted = next(one for one in self.catalog.ranges if one.key == key)
        return [
            {
                "property_id": row["property_id"],
                "ordinal": row["ordinal"],
                "status": "failed" if row["property_id"] == "p4" else "ok",
            }
            for row in self.catalog.slice(wanted).to_pylist()
        ]

    def describe(
        self,
        key: str,
        change: Callable[[Rows], Rows] = lambda rows: rows,
        *,
        text: str = "a house",
        settings: str = "s",
        parts: Mapping[str, str] | None = None,
    ) -> PublishedRecord:
        """Publish descriptions of a range, after ``change`` has had its way with the rows.

        parts: of the fingerprint, where real settings are to be compared with others.
        """
        wanted = next(one for one in self.catalog.ranges if one.key == key)
        rows = [
            {
                "description": {"floors": 2, "has_pool": False} if row["status"] == "ok" else None,
                "error_kind": "missing" if row["status"] == "failed" else None,
                "error": "its image is gone" if row["status"] == "failed" else None,
                "raw_text": text,
                "images_seen": 2,
                "inputs_digest": f"in-{settings}",
                "model": f"model-{settings}",
                "device": "cpu-0",
                # A batch of one property each two seconds.
                "described_at": BEGAN + timedelta(seconds=2 * (row["ordinal"] or 0)),
                "fingerprint": f"fp-{settings}",
                **row,
            }
            for row in change(self.rows(key))
        ]
        parts = {
            "catalogue_slice": self.catalog.slice_digest(wanted),
            **({"maker": settings} if parts is None else parts),
        }
        return publish(self.descriptions, key, rows, DESCRIPTIONS, f"fp-{settings}", parts, texts=text)

    def answer_further(
        self, key: str, change: Callable[[Rows], Rows] = lambda rows: rows, *, settings: str = "t"
    ) -> PublishedRecord:
        """Publish a range of the further question set; the walls of even ordinals need paint."""
        return self.answer_set(
            "condition",
            key,
            lambda rows: [
                {
                    "description": {"wear": f"worn {row['ordinal']}", "needs_paint": row["ordinal"] % 2 == 0},
                    "confidence": {"wear": 0.5, "needs_paint": 0.75},
                    **row,
                }
                for row in change(rows)
            ],
            settings=settings,
        )

    def answer_set(
        self, name: str, key: str, change: Callable[[Rows], Rows], *, settings: str = "t"
    ) -> PublishedRecord:
        """Publish a range of a further question set. change: gives the answers of ok rows."""
        asked = next(asked for asked in question_sets(self.settings) if asked.name == name)
        rows = [
            {
                "status": "ok",
                "attempts": 1,
                "images_seen": 1,
                "images_failed": [],
                "seconds": 1.0,
                "inputs_digest": f"in-{settings}",
                "model": f"model-{settings}",
                "model_revision": "1",
                "device": "cpu-0",
                "described_at": BEGAN + timedelta(days=1),
                "fingerprint": f"fp-{settings}",
                **row,
            }
            for row in change([{**row, "status": "ok"} for row in self.rows(key)])
        ]
        schema = description_rows(load_schema(asked.settings.description_schema).arrow_type)
        published = PublishedPartitions(asked.asset, lock_seconds=0)
        return publish(published, key, rows, schema, f"fp-{settings}", {"maker": f"{settings} of {name}"})

    def ask_again(
        self,
        key: str,
        floors: Mapping[int, int | None],
        *,
        settings: str = "u",
        sure: float = 0.9375,
        name: str = "again",
    ) -> PublishedRecord:
        """Publish a range of a set that asks again: the floors by ordinal, others are not asked."""
        return self.answer_set(
            name,
            key,
            lambda rows: [
                {
                    **row,
                    "description": {"floors": floors[row["ordinal"]], "material": "brick"},
                    "confidence": {"floors": sure, "material": sure},
                }
                if row["ordinal"] in floors
                else {**row, **NO_ANSWER}
                for row in rows
            ],
            settings=settings,
        )

    def embed(self, key: str, change: Callable[[Rows], Rows] = lambda rows: rows) -> PublishedRecord:
        """Publish embeddings of the descriptions published now."""
        described = self.descriptions.record(key)
        texts = described.metadata["texts"] if described else "none"
        rows = [
            {
                "embedding": [1.0, float(row["ordinal"])] if row["status"] == "ok" else None,
                "fingerprint": f"fp-{texts[:8]}",
                **row,
            }
            for row in change(self.rows(key))
        ]
        parts = {"texts": texts, "embedder": "m"}
        return publish(self.embeddings, key, rows, EMBEDDINGS, f"fp-{texts[:8]}", parts)

    def withdraw(self, *ids: str) -> list[str]:
        """Withdraw properties; gives what is said."""
        return list(withdraw(self.settings, prepare_withdrawal(self.settings, ids)))

    def replace_images(self, property_id: str) -> IngestReport:
        """Take another image of a property in: its range is stale."""
        folder = self.settings.home.parent
        (folder / "new.jpg").write_bytes(b"not a picture, but there")
        update = write_listing(folder / "update.jsonl", {property_id: ["new.jpg"]})
        return ingest(update, self.settings.home, update=True)

    def put_back(self, key: str, *, wholly: bool = True) -> PublishedRecord:
        """Publish other descriptions, then put the version before, or its record alone, back.

        Gives the record of the newest.
        """
        paths = self.settings.descriptions.partition(key)
        names = (paths.record, paths.record_copy, *((paths.published, paths.version(0)) if wholly else ()))
        before = {path: path.read_bytes() for path in names}
        newest = self.describe(key, text="a villa")
        self.embed(key)
        for path, content in before.items():
            path.write_bytes(content)
        if wholly:
            paths.version(1).unlink()
        return newest

    def copy_of(self, key: str, number: int = 0) -> Path:
        """A backup of a range's descriptions."""
        return self.settings.descriptions.partition(key).version(number)


def publish(
    published: PublishedPartitions,
    key: str,
    rows: Rows,
    schema: pa.Schema,
    fingerprint: str,
    parts: dict[str, str],
    **remembered: str,
) -> PublishedRecord:
    ids: Sequence[str] = [row["property_id"] for row in rows]
    staged = published.stage(
        key,
        pa.Table.from_pylist(rows, schema=schema).to_batches(),
        schema,
        expected_ids=set(ids),
        fingerprint=fingerprint,
        metadata={"generation": fingerprint, "parts": parts, **remembered},
    )
    if schema == DESCRIPTIONS:
        staged.remember({COUNTED: row_counts(staged.path)})
    if len(set(ids)) < len(ids):
        # Publishing refuses a repeated id: what an audit must find is made behind its back.
        staged.wrong_ids = None
    return published.publish(staged).record


JOURNALED = pa.schema([*COMMON, ("error_kind", pa.string()), ("raw_text", pa.string())])


def commit_rows(
    settings: Settings, key: str, rows: int, asset: str = "property_descriptions", generation: str = "g"
) -> None:
    """Bring a partition's journal to so many committed rows, in a real journal."""
    wanted = PropertyRange.from_key(key)
    table = Catalog.open(settings.home).slice(wanted)
    ids = table["property_id"].to_pylist()
    paths = settings.layout.asset(asset).partition(key)
    with open_journal(paths, generation, ids, schema=JOURNALED) as journal:
        for number in range(journal.committed_rows, rows):
            row = {"property_id": ids[number], "ordinal": wanted.start + number, "status": "ok"}
            journal.submit(pa.Table.from_pylist([row], schema=JOURNALED))
            journal.flush()


@pytest.fixture
def refuse() -> Callable[..., None]:
    """Writes down that a check refused the finished rows of a partition."""

    def write(
        settings: Settings, key: str, asset: str = "property_descriptions", generation: str = "g"
    ) -> None:
        found = {"failed_share": "2 of 2 properties failed"}
        Refusal(generation, found).write(settings.layout.asset(asset).partition(key))

    return write


@pytest.fixture
def commit() -> Callable[..., None]:
    """Commits rows of a partition that is not published."""
    return commit_rows


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two homes over nine properties whose images do not exist, in ranges of three: empty and published."""
    folder = tmp_path_factory.mktemp("made")
    listing = write_listing(folder / "listing.jsonl", {f"p{n}": [f"{n}.jpg"] for n in range(9)})
    ingest(listing, folder / "empty", range_size=3)
    shutil.copytree(folder / "empty", folder / "published")
    dataset = Dataset(load_settings(model="example", home=folder / "published"))
    for key in dataset.keys:
        dataset.describe(key)
        dataset.embed(key)
    return folder


def _copied(made: Path, name: str, target: Path) -> Dataset:
    shutil.copytree(made / name, target / "home")
    return Dataset(load_settings(model="example", home=target / "home"))


@pytest.fixture
def empty(made: Path, tmp_path: Path) -> Dataset:
    """Nothing published yet."""
    return _copied(made, "empty", tmp_path)


@pytest.fixture
def dataset(made: Path, tmp_path: Path) -> Dataset:
    """Everything published."""
    return _copied(made, "published", tmp_path)


@pytest.fixture
def two_sets(made: Path, tmp_path: Path) -> Dataset:
    """Everything published, and of a further question set, ``condition``, the first two of three ranges."""
    dataset = _copied(made, "published", tmp_path)
    file = tmp_path / "questions.yaml"
    file.write_text(f"condition:\n  schema: {Condition.__module__}:{Condition.__name__}\n")
    dataset = Dataset(load_settings(model="example", home=dataset.settings.home, questions=file))
    for key in dataset.keys[:2]:
        dataset.answer_further(key)
    return dataset


@pytest.fixture
def asked_again(two_sets: Dataset, tmp_path: Path) -> Dataset:
    """As ``two_sets``, and a third set, ``again``, that fills ``floors``: p0, p1 and p4 were asked."""
    file = tmp_path / "questions.yaml"
    schema = f"{Again.__module__}:{Again.__name__}"
    file.write_text(f"{file.read_text()}again:\n  schema: {schema}\n  fills: [floors]\n")
    dataset = Dataset(load_settings(model="example", home=two_sets.settings.home, questions=file))
    dataset.ask_again(dataset.keys[0], {0: 3, 1: None})
    dataset.ask_again(dataset.keys[1], {4: 5})
    return dataset


@pytest.fixture
def uneven(tmp_path: Path) -> Settings:
    """Four ranges of two properties, with 2, 23, 4 and 5 images, none described."""
    counts = enumerate((1, 1, 3, 20, 2, 2, 1, 4))
    images = {f"p{number}": [f"{number}/{image}.jpg" for image in range(count)] for number, count in counts}
    ingest(write_listing(tmp_path / "listing.jsonl", images), tmp_path / "home", range_size=2)
    return load_settings(model="example", home=tmp_path / "home")


@pytest.fixture
def published(uneven: Settings) -> None:
    """The four uneven ranges are described."""
    described = Dataset(uneven)
    for key in described.keys:
        described.describe(key)
