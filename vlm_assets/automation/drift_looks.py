"""The verdict on one partition's published file: against its record, the catalogue and the settings.

What lives here: what the drift sensor is handed. What does not: when it looks and whom it tells
(``sensors/row_count_drift.py``), and comparing files with records (``audit/files.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from resources.engine.protocol import EngineError
from resources.publishing.errors import RecordDamagedError
from resources.publishing.published import PublishedPartitions
from resources.publishing.record import PublishedRecord
from resources.publishing.verification import FindingKind, judge
from resources.storage.layout import AssetFolders
from sensors.row_count_drift import SOUND, STALE, Verdict
from vlm_assets.assets import property_descriptions, property_embeddings
from vlm_assets.assets.fingerprint import CATALOGUE_SLICE, TEXTS, digest_of
from vlm_assets.catalog.catalog import Catalog, catalog_path
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.operate.audit.files import look_at
from vlm_assets.operate.audit.findings import Kind
from vlm_assets.operate.expected_cost import ExpectedCost
from vlm_assets.resource_settings import build_text_embedding_model, build_vision_language_model
from vlm_assets.settings import Settings

_AGAIN_SECONDS = 60.0

_FILE_KINDS = {
    FindingKind.MISSING: "deleted",
    FindingKind.TRUNCATED: "truncated",
    FindingKind.ROWS_DIFFER: "replaced",
    FindingKind.DIGEST_DIFFERS: "replaced",
    FindingKind.UNREADABLE: "unreadable",
}
_KINDS = {
    Kind.VANISHED: "deleted",
    Kind.UNRECORDED: "foreign",
    Kind.RECORD: "record damaged",
    Kind.RECORD_COPY: "record copy damaged",
    Kind.SECOND_COPY: "second copy damaged",
}
_RESTORE = (
    "Materialize the partition, or wait for the scheduled re-materialization: it puts the verified second"
    " copy back, without a device. What stood there is kept in .quarantine."
)
_NEXT_STEP = {
    "foreign": "Move the file away, or materialize the partition, which keeps it in .quarantine.",
    "record damaged": "Run `vlm-assets repair`: it says what it would do.",
}


class Meaning:
    """What the settings say now of an asset's rows, by part of the fingerprint, asked for once a process.

    What cannot be told is asked for again after ``_AGAIN_SECONDS``: a server at an address may be down, and
    each partition's look would wait for it.
    """

    def __init__(
        self, parts: Callable[[], Mapping[str, str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._parts = parts
        self._clock = clock
        self._known: Mapping[str, str] | None = None
        self._not_before = clock()

    @property
    def now(self) -> Mapping[str, str]:
        """The parts; none where the model or the schema cannot be found, and then nothing is called stale."""
        if self._known is None and self._clock() >= self._not_before:
            try:
                self._known = self._parts()
            except (EngineError, ValueError, OSError):
                self._not_before = self._clock() + _AGAIN_SECONDS
        return self._known or {}


@dataclass(frozen=True)
class DriftLooks:
    """The looks at one asset's partitions."""

    settings: Settings
    asset: AssetFolders
    meaning: Meaning
    made_from: AssetFolders | None = None
    _opened: dict[tuple[int, int], Catalog] = field(default_factory=dict)

    def expectation(self) -> str:
        """Digest of the catalogue's version and the settings."""
        catalog = self._catalog()
        return digest_of([catalog.catalog_id, catalog.header.sequence, dict(self.meaning.now)])

    def look(self, key: str) -> Verdict | None:
        """The verdict, every byte of the published file read; None while a publication is under way."""
        looked = look_at(self.asset.partition(key), deep=False)
        problems = {problem.kind: problem for problem in looked.problems}
        if Kind.PENDING in problems:
            return None
        record = looked.record
        expected = _expected(record)
        if record is not None and (judged := judge(looked.path, record, deep=True)) is not None:
            return Verdict(_FILE_KINDS[judged[0]], "ERROR", expected, judged[1], _RESTORE)
        for kind, name in _KINDS.items():
            if kind in problems:
                step = _NEXT_STEP.get(name, _RESTORE)
                return Verdict(name, _severity(kind), expected, problems[kind].sentence, step)
        return self._compare(key, record)

    def look_again(self, key: str) -> Verdict | None:
        """The verdict where the file is known to be what its record says."""
        try:
            return self._compare(key, PublishedPartitions(self.asset).record(key))
        except RecordDamagedError:
            return None

    def _compare(self, key: str, record: PublishedRecord | None) -> Verdict:
        """Against the catalogue and the settings."""
        if record is None:
            return Verdict(SOUND, None, "nothing published yet", "nothing.")
        wanted = PropertyRange.from_key(key)
        if record.rows != len(wanted):
            found = f"{record.rows} rows were published."
            step = "Materialize the partition with `recompute: true`."
            return Verdict("row count", "ERROR", f"{len(wanted)} rows, says the catalogue", found, step)
        changed = self._changed(wanted, record)
        if not changed:
            return Verdict(SOUND, None, _expected(record), f"{record.rows} rows, to the byte.")
        images = ExpectedCost.of(self.settings, self._catalog()).whole.get(key, 0)
        cost = f"{len(wanted)} properties with {images} images to describe"
        if self.made_from is not None:
            cost = f"{len(wanted)} descriptions to embed"
        return Verdict(
            STALE,
            "WARN",
            "a file of today's catalogue and settings",
            f"it was made with another {', '.join(changed)}; making it anew costs {cost}.",
            "It stays readable as it is. Materialize it by hand where it should change; nothing does so by"
            " itself.",
        )

    def _changed(self, wanted: PropertyRange, record: PublishedRecord) -> list[str]:
        made_with: Mapping[str, str] = record.metadata.get("parts", {})
        now = dict(self.meaning.now)
        catalog = self._catalog()
        if wanted in catalog.ranges:
            now[CATALOGUE_SLICE] = catalog.slice_digest(wanted)
        if self.made_from is not None:
            described = _record(self.made_from, wanted.key)
            now |= {} if described is None else {TEXTS: described.metadata.get(TEXTS, "")}
        return sorted(
            name.replace("_", " ") for name, part in made_with.items() if now.get(name, part) != part
        )

    def _catalog(self) -> Catalog:
        """The catalogue as it stands, opened anew where its file has changed."""
        stat = catalog_path(self.settings.home).stat()
        at = (stat.st_ino, stat.st_mtime_ns)
        if at not in self._opened:
            self._opened.clear()
            self._opened[at] = Catalog.open(self.settings.home)
        return self._opened[at]


def description_looks(settings: Settings) -> DriftLooks:
    """The looks at the descriptions."""
    model = build_vision_language_model(settings)
    meaning = Meaning(lambda: property_descriptions.meaning_parts(settings, model))
    return DriftLooks(settings, settings.descriptions, meaning)


def embedding_looks(settings: Settings) -> DriftLooks:
    """The looks at the embeddings, which follow from the descriptions published now."""
    model = build_text_embedding_model(settings)
    meaning = Meaning(lambda: property_embeddings.meaning_parts(model))
    return DriftLooks(settings, settings.embeddings, meaning, made_from=settings.descriptions)


def _record(asset: AssetFolders, key: str) -> PublishedRecord | None:
    try:
        return PublishedPartitions(asset).record(key)
    except RecordDamagedError:
        return None


def _severity(kind: Kind) -> Literal["ERROR", "WARN"]:
    return "WARN" if kind in (Kind.RECORD_COPY, Kind.SECOND_COPY) else "ERROR"


def _expected(record: PublishedRecord | None) -> str:
    if record is None:
        return "a file with its record"
    return f"{record.rows} rows, digest {record.sha256[:12]}, as published"
