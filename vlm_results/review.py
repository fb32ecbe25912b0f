"""Review: a person says which fields of a sample are right. What they said is kept and is never lost.

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

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.partition import INPUTS
from vlm_assets.assets.truth import REVIEWS, FieldVerdict, verdicts
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing_each
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory, sync_directory, write_replacing
from vlm_durable.files.layout import Home
from vlm_durable.files.lock_files import taken
from vlm_durable.wording import counted
from vlm_results.intervals import Share, wilson
from vlm_results.published_table import published_records
from vlm_results.quality import assess_quality

_COLUMNS = ["property_id", "ordinal", "status", "description", INPUTS]

_LOCK_SECONDS = 20.0
"""A verdict and a withdrawal hold the lock for one write each."""


class VerdictError(ValueError):
    """A verdict that cannot be: it names no property of the sample, or a field that it has not."""


@dataclass(frozen=True)
class Reviewed:
    """A property of the sample.

    answer: the digest that a verdict on it names. why: it is suspicious; empty where it was drawn.
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
    """Published descriptions, drawn by a seed; suspicious: those first that the quality names.

    Raises CommandError, RecordDamagedError, OSError.
    """
    records = published_records(settings.descriptions, catalog)
    if not records:
        raise CommandError(f"No description is published yet: {command('run')}.")
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    ranges = {one.key: one for one in catalog.ranges if one.key in records}
    sizes = [len(one) for one in ranges.values()]
    wanted: Counter[str] = Counter(chance.choices(list(ranges), sizes, k=count))
    suspects: dict[str, str] = {}
    if suspicious:
        for finding in assess_quality(settings, catalog).findings:
            for one in finding.examples:
                suspects.setdefault(one, finding.sentence)
    keys = dict.fromkeys(wanted)
    for one in suspects:
        found = catalog.find(one)
        if found is not None and found.range.key in records:
            keys.setdefault(found.range.key)
    first, others = list[Reviewed](), list[Reviewed]()
    for key in doing_each("drawing the sample from partitions", keys):
        rows = [row for row in _rows(settings, key) if row["status"] == "ok"]
        drawn = chance.sample(rows, min(wanted[key], len(rows)))
        others += [_reviewed(key, row) for row in drawn]
        first += [
            _reviewed(key, row, suspects[row["property_id"]])
            for row in rows
            # What chance drew stays in its order and counts, odd or not: the accuracy is that of all.
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
    return Reviewed(row["property_id"], key, row["ordinal"], _answer(row), row["description"] or {}, why)


def _answer(row: Mapping[str, Any]) -> str:
    # The inputs too: if verdicts on a new model's like answers counted, those on its others would be missing.
    return digest_of([row[INPUTS], row["description"]])


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
    known = {name: reviewed.description[name] for name in right} | dict(corrections)
    at = (now or datetime.now(UTC)).isoformat(timespec="seconds")
    return FieldVerdict(
        reviewed.property_id,
        at,
        reviewed.answer,
        tuple(sorted(right)),
        tuple(sorted(wrong)),
        known,
        reviewed.why,
    )


def keep(home: Path, verdict: FieldVerdict) -> None:
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
    # Each time: whoever made the file may have died before its name was durable.
    sync_directory(home)


@dataclass(frozen=True)
class Accuracy:
    """Of each field, how often it is right. replaced: verdicts on answers that are published no more.

    A verdict of format 1 does not name its answer, and is one of these.
    """

    fields: Mapping[str, Share]
    replaced: int

    @property
    def note(self) -> str:
        """What does not count, for people; empty where everything does."""
        if not self.replaced:
            return ""
        return (
            f"Not counted: {counted(self.replaced, 'verdicts')} on answers that are published no more, or"
            " that an"
            " earlier version kept."
        )


def published_answers(settings: Settings, catalog: Catalog) -> dict[str, str]:
    """Digests of the published answers of the properties that have a verdict.

    Only the partitions of these are read. One that does not read has no answers: the audit says why.

    Raises TruthError, CatalogError, FormatVersionError.
    """
    of_range: dict[str, list[int]] = {}
    for ordinal in catalog.ordinals_of(verdicts(settings.home)):
        of_range.setdefault(catalog.range_of(ordinal).key, []).append(ordinal)
    found: dict[str, str] = {}
    for key, ordinals in of_range.items():
        with contextlib.suppress(OSError, pa.ArrowException):
            found.update({row["property_id"]: _answer(row) for row in _rows(settings, key, ordinals)})
    return found


def accuracy(home: Path, published: Mapping[str, str]) -> Accuracy:
    """How often each field was judged right, of what is published.

    A verdict counts for the answer that it was given for and for no other: not for an earlier model's. What
    was judged because it was suspicious is left out too. Raises TruthError, FormatVersionError, OSError.
    """
    right: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    replaced = 0
    for one in verdicts(home).values():
        if one.answer != published.get(one.property_id):
            replaced += 1
        elif not one.why:  # What is suspicious says nothing of the rest.
            right.update(one.right)
            judged.update((*one.right, *one.wrong))
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
    """Let one at a time write the verdicts: two pages may be open, and a withdrawal replaces the file.

    The lock is in a folder that other accounts cannot enter: whoever can read a file can hold its lock.
    Raises CommandError where another process has it for too long, OSError.
    """
    path = Home(home).state / "review.lock"
    make_directory(path.parent)
    lock = taken(path, seconds=_LOCK_SECONDS)
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
    """Take away what a power cut left of a line. It was not acknowledged, and it would spoil the next one."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    whole = path.read_bytes()
    os.ftruncate(descriptor, whole.rfind(b"\n") + 1)
