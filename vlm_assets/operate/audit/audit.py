"""The audit: what is on disk against the catalogue, for every partition of descriptions and embeddings.

What lives here: putting the looks at files and rows together into a verdict. What does not: the looking
(``files.py``, ``rows.py``), Dagster (``asset.py``), putting right (``repair.py``).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from resources.publishing.record import PublishedRecord
from vlm_assets.assets.fingerprint import CATALOGUE_SLICE, TEXTS
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.operate.audit.files import LookedAt, foreign_files, look_at
from vlm_assets.operate.audit.findings import Kind, Problem
from vlm_assets.operate.audit.rows import Counted, RowCounts, count_rows
from vlm_assets.settings import Settings

_OF_THE_PARTITION = frozenset({CATALOGUE_SLICE, TEXTS})
"""Parts of a fingerprint that differ from partition to partition by nature."""


class State(StrEnum):
    """The verdict on a partition."""

    SOUND = "sound"
    WRONG = "wrong"
    INCOMPLETE = "incomplete"
    """Not published yet: nothing is wrong with it."""


@dataclass(frozen=True)
class PartitionAudit:
    """One partition of one asset. version, fingerprint: of what is published; None where nothing is."""

    asset: str
    key: str
    state: State
    counts: RowCounts
    version: int | None
    fingerprint: str | None


@dataclass(frozen=True)
class Audit:
    """The verdict on a home. Problems that are no warnings make it wrong."""

    home: str
    deep: bool
    assets: tuple[str, ...]
    partitions: tuple[PartitionAudit, ...]
    problems: tuple[Problem, ...]

    @property
    def wrong(self) -> tuple[Problem, ...]:
        """What is wrong."""
        return tuple(one for one in self.problems if not one.kind.is_warning)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is worth knowing, with all published rows sound."""
        return tuple(one for one in self.problems if one.kind.is_warning)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; partitions may still be missing."""
        return not self.wrong

    def total(self, asset: str) -> RowCounts:
        """The counts of all partitions of an asset."""
        return sum((one.counts for one in self.partitions if one.asset == asset), RowCounts())

    def partitions_in(self, asset: str, state: State) -> int:
        """How many partitions of an asset are in a state."""
        return sum(one.asset == asset and one.state is state for one in self.partitions)

    def verdict(self) -> str:
        """The whole audit in one or two sentences."""
        read = "every byte read" if self.deep else "sizes, footers and ids read; --deep reads every byte"
        incomplete = sum(one.state is State.INCOMPLETE for one in self.partitions)
        left = (
            f" {incomplete} of {len(self.partitions)} partitions are not published yet." if incomplete else ""
        )
        if not self.ok:
            bad = sum(one.state is State.WRONG for one in self.partitions)
            return (
                f"WRONG: {len(self.wrong)} found, {bad} of {len(self.partitions)} partitions wrong ({read})."
                f"{left} `vlm-assets repair` says what it would do."
            )
        if incomplete == len(self.partitions):
            return f"Nothing is published yet, and nothing is wrong ({read})."
        return f"Conserved: every published id is there once, ok or failed, and no other ({read}).{left}"

    def to_json(self) -> str:
        """Everything, for machines."""
        content = {
            "home": self.home,
            "deep": self.deep,
            "ok": self.ok,
            "totals": {
                asset: {
                    **_numbers(self.total(asset)),
                    "partitions": {state.value: self.partitions_in(asset, state) for state in State},
                }
                for asset in self.assets
            },
            "wrong": [asdict(one) for one in self.wrong],
            "warnings": [asdict(one) for one in self.warnings],
            "partitions": [asdict(one) for one in self.partitions],
        }
        return json.dumps(content, indent=2)


def audit(settings: Settings, catalog: Catalog, *, deep: bool = False) -> Audit:
    """Audit a home, changing nothing; ``deep`` reads every byte of files and copies. Raises CatalogError."""
    assets = settings.descriptions, settings.embeddings
    descriptions, embeddings = (asset.name for asset in assets)
    keys = frozenset(one.key for one in catalog.ranges)
    looked = [
        look_at(asset.partition(wanted.key), deep=deep) for asset in assets for wanted in catalog.ranges
    ]
    counted = count_rows(catalog, looked, descriptions=descriptions, embeddings=embeddings, deep=deep)
    records = {(one.asset, one.key): one.record for one in looked}
    problems: list[Problem] = []
    partitions: list[PartitionAudit] = []
    for one, wanted in zip(looked, [*catalog.ranges, *catalog.ranges], strict=True):
        found = [*one.problems, *_row_problems(one, counted)]
        if one.record is not None:
            found += _provenance_problems(one.asset, catalog, wanted, one.record)
            if one.asset == embeddings:
                found += _descent_problems(one, one.record, records[descriptions, one.key])
        problems += found
        partitions.append(_partition(one, wanted, found, counted))
    for asset in assets:
        problems += foreign_files(asset, keys)
        problems += _settings_differ(asset.name, looked)
    return Audit(str(settings.home), deep, (descriptions, embeddings), tuple(partitions), tuple(problems))


def _partition(
    one: LookedAt, wanted: PropertyRange, found: Sequence[Problem], counted: Counted
) -> PartitionAudit:
    wrong = any(not problem.kind.is_warning for problem in found)
    counts = counted.counts.get((one.asset, one.key))
    if wrong:
        state = State.WRONG
        counts = counts or RowCounts(expected=len(wanted), missing=len(wanted))
    elif one.record is None:
        state, counts = State.INCOMPLETE, RowCounts(expected=len(wanted), not_yet=len(wanted))
    else:
        state, counts = State.SOUND, counts or RowCounts(expected=len(wanted))
    record = one.record
    return PartitionAudit(
        asset=one.asset,
        key=one.key,
        state=state,
        counts=counts,
        version=record.sequence if record else None,
        fingerprint=record.fingerprint if record else None,
    )


def _row_problems(one: LookedAt, counted: Counted) -> Iterator[Problem]:
    reason = counted.uncounted.get((one.asset, one.key))
    if reason is not None:
        yield Problem(
            Kind.COLUMNS,
            one.asset,
            one.key,
            f"The rows of {one.path} cannot be counted: {reason}.",
            str(one.path),
        )
    counts = counted.counts.get((one.asset, one.key))
    if counts is None:
        return
    first = f" First: {', '.join(map(repr, counts.first_ids))}." if counts.first_ids else ""
    if not counts.conserved:
        said = ", ".join(
            f"{number} {name}"
            for number, name in (
                (counts.missing, "missing"),
                (counts.duplicate, "duplicate"),
                (counts.foreign, "foreign"),
                (counts.unsettled, "neither ok nor failed"),
                (counts.misnumbered, "with another ordinal"),
            )
            if number
        )
        sentence = f"{counts.expected} ids expected, {counts.rows} rows found: {said}.{first}"
        yield Problem(Kind.IDS, one.asset, one.key, sentence, str(one.path))
    if counts.mixed:
        sentence = f"{counts.mixed} rows carry another fingerprint than the file's record.{first}"
        yield Problem(Kind.MIXED, one.asset, one.key, sentence, str(one.path))
    if counts.unlike:
        sentence = f"{counts.unlike} ids differ from the published descriptions.{first}"
        yield Problem(Kind.DESCRIPTIONS_DIFFER, one.asset, one.key, sentence, str(one.path))


def _provenance_problems(
    asset: str, catalog: Catalog, wanted: PropertyRange, record: PublishedRecord
) -> Iterator[Problem]:
    part = _parts(record).get(CATALOGUE_SLICE)
    if part is not None and part != catalog.slice_digest(wanted):
        sentence = (
            "The catalogue's rows of this range were updated after it was published. Materialize it to"
            " describe its properties anew."
        )
        yield Problem(Kind.STALE, asset, wanted.key, sentence)


def _descent_problems(
    one: LookedAt, record: PublishedRecord, described: PublishedRecord | None
) -> Iterator[Problem]:
    made_from = _parts(record).get(TEXTS)
    if described is None:
        sentence = "Embeddings are published where no descriptions are."
        yield Problem(Kind.DESCRIPTIONS_DIFFER, one.asset, one.key, sentence, str(one.path))
    elif made_from is not None and made_from != described.metadata.get(TEXTS):
        sentence = (
            "The embeddings were made from other texts than the descriptions published now have"
            f" (version {described.sequence})."
        )
        yield Problem(Kind.DESCRIPTIONS_DIFFER, one.asset, one.key, sentence, str(one.path))


def _settings_differ(asset: str, looked: Sequence[LookedAt]) -> Iterator[Problem]:
    """A warning where partitions of one asset were made with different settings."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for one in looked:
        if one.asset == asset and one.record is not None:
            parts = _parts(one.record)
            groups[tuple(sorted(p for p in parts.items() if p[0] not in _OF_THE_PARTITION))].append(one.key)
    if len(groups) < 2:
        return
    differing = sorted(
        name
        for name in {name for parts in groups for name, _ in parts}
        if len({dict(parts).get(name) for parts in groups}) > 1
    )
    shares = "; ".join(
        f"{len(keys)} like {keys[0]}" for keys in sorted(groups.values(), key=len, reverse=True)
    )
    sentence = (
        f"Partitions were made with {len(groups)} different settings ({', '.join(differing)} differ):"
        f" {shares}. Materialize the ones that should change."
    )
    yield Problem(Kind.SETTINGS_DIFFER, asset, None, sentence)


def _parts(record: PublishedRecord) -> Mapping[str, str]:
    parts: Mapping[str, str] = record.metadata.get("parts", {})
    return parts


def _numbers(counts: RowCounts) -> dict[str, object]:
    return {name: value for name, value in asdict(counts).items() if name != "first_ids"}
