"""Review: a person says which fields of a sample are right. Their verdicts are never lost.

The file ``HOME/review.jsonl`` is append-only: one line a verdict, durable before the page shows the next
property. The latest line of a property counts, as long as the answer that it judges is the published one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlm_assets.assets.partition import INPUTS
from vlm_assets.assets.truth import REVIEWS, FieldVerdict, verdicts
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.intervals import Share, wilson
from vlm_assets.services.progress import doing_each
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory, sync_directory, write_replacing
from vlm_durable.files.layout import Home
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.wording import counted
from vlm_results.published_table import answer_digest, published_records
from vlm_results.quality import assess_quality

_COLUMNS = ["property_id", "ordinal", "status", "description", INPUTS]

_LOCK_SECONDS = 20.0
"""A verdict and a withdrawal hold the lock for one write each."""


class VerdictError(ValueError):
    """An impossible verdict: it names no property of the sample, or a field that it lacks."""


@dataclass(frozen=True)
class Reviewed:
    """A property of the sample.

    answer: the digest that a verdict on it names. why: why it is suspicious; empty if chance drew it.
    """

    property_id: str
    key: str
    ordinal: int
    answer: str
    description: Mapping[str, Any] = field(repr=False)
    why: str = ""


def draw_sample(
    settings: Settings, catalog: Catalog, *, count: int, seed: int, suspicious: bool
) -> list[Reviewed]:
    """Draw published descriptions by a seed. suspicious: put those first that the quality names.

    Raises CommandError, RecordDamagedError, OSError.
    """
    records = published_records(settings.descriptions, catalog)
    if not records:
        raise CommandError(f"No description is published yet: {command('run')}.")
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    ranges = {bounds.key: bounds for bounds in catalog.ranges if bounds.key in records}
    sizes = [len(bounds) for bounds in ranges.values()]
    counts: Counter[str] = Counter(chance.choices(list(ranges), sizes, k=count))
    suspects: dict[str, str] = {}
    if suspicious:
        for finding in assess_quality(settings, catalog).findings:
            for property_id in finding.examples:
                suspects.setdefault(property_id, finding.sentence)
    keys = dict.fromkeys(counts)
    for property_id in suspects:
        suspect = catalog.find(property_id)
        if suspect is not None and suspect.range.key in records:
            keys.setdefault(suspect.range.key)
    first, others = list[Reviewed](), list[Reviewed]()
    for key in doing_each("drawing the sample from partitions", keys):
        rows = [row for row in _rows(settings, key) if row["status"] == "ok"]
        drawn = chance.sample(rows, min(counts[key], len(rows)))
        others += [_reviewed(key, row) for row in drawn]
        first += [
            _reviewed(key, row, suspects[row["property_id"]])
            for row in rows
            # A suspicious row that chance drew stays among the others: the accuracy is that of all rows.
            if row["property_id"] in suspects and row not in drawn
        ]
    chance.shuffle(others)
    return [*first, *others][:count]


def _rows(settings: Settings, key: str, ordinals: Sequence[int] | None = None) -> list[dict[str, Any]]:
    table = pq.read_table(settings.descriptions.partition(key).published, columns=_COLUMNS)
    if ordinals is not None:
        table = table.filter(pc.is_in(table["ordinal"], value_set=pa.array(ordinals, pa.int64())))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _reviewed(key: str, row: Mapping[str, Any], why: str = "") -> Reviewed:
    return Reviewed(
        row["property_id"], key, row["ordinal"], answer_digest(row), row["description"] or {}, why
    )


def verdict_of(
    reviewed: Reviewed,
    *,
    right: Sequence[str],
    wrong: Sequence[str],
    corrections: Mapping[str, Any],
    now: datetime | None = None,
) -> FieldVerdict:
    """A verdict on a property of the sample. Raises VerdictError."""
    fields = set(reviewed.description)
    unknown = {*right, *wrong, *corrections} - fields
    if unknown or set(right) & set(wrong) or not set(corrections) <= set(wrong):
        raise VerdictError(
            f"{reviewed.property_id}: each field is right or wrong, and what is corrected is wrong"
            + (f"; it has no field {sorted(unknown)[0]!r}" if unknown else "")
        )
    return FieldVerdict(
        property_id=reviewed.property_id,
        at=(now or datetime.now(UTC)).isoformat(timespec="seconds"),
        answer=reviewed.answer,
        right=tuple(sorted(right)),
        wrong=tuple(sorted(wrong)),
        true_fields={name: reviewed.description[name] for name in right} | dict(corrections),
        why=reviewed.why,
    )


def append_verdict(home: Path, verdict: FieldVerdict) -> None:
    """Append a verdict, durable when this returns. Raises OSError, CommandError."""
    path = home / REVIEWS
    with _locked(home):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(PermissionError):
                # An earlier version let every account read it.
                os.fchmod(descriptor, 0o600)
            _cut_torn_line(descriptor, path)
            data = verdict.line()
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    # Each time: the process that made the file may have died before its name was durable.
    sync_directory(home)


@dataclass(frozen=True)
class Accuracy:
    """How often each field is right. replaced: how many verdicts are on answers that are published no more.

    A verdict of format 1 does not name its answer, and counts as replaced.
    """

    fields: Mapping[str, Share]
    replaced: int

    @property
    def note(self) -> str:
        """How many verdicts do not count, for people; empty if all do."""
        if not self.replaced:
            return ""
        return (
            f"Not counted: {counted(self.replaced, 'verdicts')} on answers that are published no more, or"
            " that an earlier version kept."
        )


def published_answers(settings: Settings, catalog: Catalog) -> dict[str, str]:
    """Digests of the published answers of the properties that have a verdict.

    Only their partitions are read. A partition that cannot be read gives no answers: the audit says why.

    Raises TruthError, CatalogError, FormatVersionError.
    """
    ordinals_by_key: dict[str, list[int]] = {}
    for ordinal in catalog.ordinals_of(verdicts(settings.home)):
        ordinals_by_key.setdefault(catalog.range_of(ordinal).key, []).append(ordinal)
    answers: dict[str, str] = {}
    for key, ordinals in ordinals_by_key.items():
        with contextlib.suppress(OSError, pa.ArrowException):
            answers.update({row["property_id"]: answer_digest(row) for row in _rows(settings, key, ordinals)})
    return answers


def accuracy(home: Path, published: Mapping[str, str]) -> Accuracy:
    """How often each field of the published answers was judged right.

    A verdict counts only for the answer that it judged, not for that of another model. Properties that were
    judged because they were suspicious are left out. Raises TruthError, FormatVersionError, OSError.
    """
    right: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    replaced = 0
    for verdict in verdicts(home).values():
        if verdict.answer != published.get(verdict.property_id):
            replaced += 1
        elif not verdict.why:  # Suspicious properties say nothing about the others.
            right.update(verdict.right)
            judged.update((*verdict.right, *verdict.wrong))
    return Accuracy({name: wilson(right[name], judged[name]) for name in sorted(judged)}, replaced)


def forget_verdicts(home: Path, ids: Collection[str]) -> int:
    """Remove every verdict on properties that are withdrawn, durably. Returns how many.

    Raises OSError, CommandError.
    """
    path = home / REVIEWS
    if not path.exists():
        return 0
    with _locked(home):
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _id_of(line) not in ids]
        if len(kept) < len(lines):
            write_replacing(path, b"".join(kept), mode=0o600)
    return len(lines) - len(kept)


def _id_of(line: bytes) -> str | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["property_id"])
    return None


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Let one process at a time write the verdicts. Two pages may be open, or a withdrawal replaces the file.

    The lock is in a folder that other accounts cannot enter: an account that can read a file can lock it.
    Raises CommandError if another process holds it for too long, OSError.
    """
    path = Home(home).state / "review.lock"
    make_directory(path.parent)
    lock = acquire_lock(path, seconds=_LOCK_SECONDS)
    if lock is None:
        raise CommandError(
            f"{home / REVIEWS} is in use by a process that does not go on (`fuser {path}` names it). Nothing"
            " in it was changed: end that process, then do it again."
        )
    try:
        yield
    finally:
        lock.close()


def _cut_torn_line(descriptor: int, path: Path) -> None:
    """Remove a line that a power cut tore. It was not acknowledged, and it would spoil the next line."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    content = path.read_bytes()
    os.ftruncate(descriptor, content.rfind(b"\n") + 1)
