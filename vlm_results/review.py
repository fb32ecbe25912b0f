"""Review: a person says which fields of a sample are right. Their verdicts are never lost.

The file ``HOME/review.jsonl`` is append-only: one line a verdict, durable before the page shows the next
property. The latest line of a property counts, as long as the answer that it judges is the published one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlm_assets.assets.partition import CONFIDENCE, INPUTS, OK
from vlm_assets.assets.truth import REVIEWS, FieldVerdict, drawn_by_chance, verdicts
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.intervals import Share, weighted_share
from vlm_assets.services.progress import doing_each
from vlm_catalog.catalog import Catalog
from vlm_catalog.withdrawn_ids import read_withdrawn
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory, sync_directory, write_replacing
from vlm_durable.files.layout import Home
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted
from vlm_engine.schema import same
from vlm_results.confidence_statistics import Flags, draw_mixed, label_worth
from vlm_results.guarantee import EVERYTHING, Guarantee
from vlm_results.joined_rows import FurtherRows, ShownAnswers, joined
from vlm_results.published_table import answer_digest, field_confidences, published_records, read_sets
from vlm_results.quality import assess_quality

_COLUMNS = ["property_id", "ordinal", "status", "description", INPUTS, CONFIDENCE]

_LOCK_SECONDS = 20.0
"""A verdict and a withdrawal hold the lock for one write each."""


class VerdictError(ValueError):
    """An impossible verdict: it names no property of the sample, or a field that it lacks."""


@dataclass(frozen=True)
class Reviewed:
    """A property of the sample.

    answer: the digest of its description. why: why it was chosen; empty if chance drew it. weight, by_chance:
    see ``FieldVerdict``. confidence: of its fields, read with the answer. further: of each field that a
    further question set answered, the digest of its answer. fills: those of them that sets above it have too.
    """

    property_id: str
    key: str
    ordinal: int
    answer: str
    description: Mapping[str, Any] = field(repr=False)
    why: str = ""
    weight: float = 1.0
    by_chance: bool = True
    confidence: Mapping[str, Any] = field(repr=False, default_factory=dict)
    further: Mapping[str, str] = field(repr=False, default_factory=dict)
    fills: frozenset[str] = frozenset()

    @property
    def answers(self) -> dict[str, str]:
        """The digest of the answer of each field's set."""
        return {name: self.further.get(name, self.answer) for name in self.description}

    @property
    def digests(self) -> str:
        """The digests of all sets' answers, which a verdict on it names."""
        return " ".join(dict.fromkeys(self.answers.values()))


class _Drawing(NamedTuple):
    """How a property came into the sample: see ``Reviewed``."""

    why: str = ""
    weight: float = 1.0
    by_chance: bool = True


def draw_sample(
    settings: Settings, catalog: Catalog, *, count: int, seed: int, suspicious: bool
) -> list[Reviewed]:
    """Draw published descriptions by a seed, all with the same chance. None that chance drew before.

    suspicious: put those first that the quality names. Raises CommandError, RecordDamagedError, TruthError,
    OSError.
    """
    records = published_records(settings.descriptions, catalog)
    keys = doing_each("drawing the sample from partitions", records)
    published = PublishedPartitions(settings.descriptions)
    tables = (published.read(key).to_table(["ordinal", "status"]) for key in keys)
    rows = _drawable(settings, catalog, tables)
    ordinals: list[int] = rows["ordinal"].to_pylist()
    draw = draw_mixed(np.zeros(len(ordinals)), by_chance=count, by_score=0, seed=seed)
    drawn = {ordinals[position]: _Drawing() for position in draw.positions}
    sample = _read_sample(settings, catalog, drawn, seed)
    if not suspicious:
        return sample
    suspects: dict[str, str] = {}
    for finding in assess_quality(settings, catalog).findings:
        for property_id in finding.examples:
            suspects.setdefault(property_id, finding.sentence)
    named = [row for row in map(catalog.find, suspects) if row is not None]
    # A suspicious row that chance drew stays among the others: the accuracy is that of all rows.
    left = set(ordinals) - drawn.keys()
    first = {
        row.ordinal: _Drawing(suspects[row.property_id], weight=0.0, by_chance=False)
        for row in named
        if row.ordinal in left
    }
    return [*_read_sample(settings, catalog, first, seed), *sample][:count]


def draw_unsure(settings: Settings, catalog: Catalog, *, count: int, seed: int) -> list[Reviewed]:
    """Draw half of the properties by chance, and half with a chance that grows with what they teach.

    They teach more the nearer the confidence of a shown answer is to its field's threshold, or without one
    the lower it is; most where two question sets disagree; and twice as much in a partition that the quality
    names. Each gets the weight with which the accuracy of all stays unbiased. None is drawn that chance drew
    before. Raises CommandError, RecordDamagedError, TruthError, OSError, and what ``assess_quality`` raises.
    """
    records = published_records(settings.descriptions, catalog)
    odd = {finding.key for finding in assess_quality(settings, catalog).findings}
    guarantee = Guarantee.read(settings)
    tables = (
        _unsureness(settings, key, record, guarantee, factor=2.0 if key in odd else 1.0)
        for key, record in doing_each("reading how sure answers are, of partitions", records.items())
    )
    rows = _drawable(settings, catalog, tables)
    scores = rows["score"].to_numpy()
    if not scores.any():
        raise CommandError(
            "No published answer has a confidence: rows of earlier versions have none, and some servers give"
            f" none. {command('review')} draws by chance alone."
        )
    draw = draw_mixed(scores, by_chance=count - count // 2, by_score=count // 2, seed=seed)
    drawn = {
        row["ordinal"]: _Drawing(
            "" if by_chance else _why_unsure(row["field"], row["confidence"]),
            weight,
            by_chance,
        )
        for row, weight, by_chance in zip(
            rows.take(pa.array(draw.positions)).to_pylist(),
            draw.weights.tolist(),
            draw.is_random.tolist(),
            strict=True,
        )
    }
    return _read_sample(settings, catalog, drawn, seed)


def _why_unsure(name: str, confidence: float) -> str:
    """Why a property was drawn. It keeps what the other set says: the person judges by the images."""
    if np.isnan(confidence):
        return f"Two question sets disagree on {name}."
    return f"{name} has the confidence {confidence:.2f}."


def _drawable(settings: Settings, catalog: Catalog, tables: Iterable[pa.Table]) -> pa.Table:
    """Those of the described rows that chance never drew. Raises CommandError, TruthError, OSError.

    What it drew stays out though it was described anew, and judged anew from a file: a model may have learned
    from its first verdict. What was chosen otherwise may be drawn: such properties are wrong more often, and
    the others alone would look too good.
    """
    described = list(tables)
    if not described:
        raise CommandError(f"No description is published yet: {command('run')}.")
    rows = pa.concat_tables(described).filter(pc.field("status") == OK)
    before = pa.array(catalog.ordinals_of(drawn_by_chance(settings.home)), pa.int64())
    left = rows.filter(pc.invert(pc.is_in(rows["ordinal"], value_set=before)))
    if rows.num_rows and not left.num_rows:
        raise CommandError(
            "Chance drew each published description before, and a second verdict certifies nothing: there is"
            " nothing left to draw."
        )
    return left


def _read_sample(
    settings: Settings, catalog: Catalog, drawn: Mapping[int, _Drawing], seed: int
) -> list[Reviewed]:
    """The properties with these ordinals, in an order that chance decides: looks take the first labels."""
    sample = [
        replace(reviewed, **drawn[reviewed.ordinal]._asdict())
        for catalog_range, group in groupby(sorted(drawn), catalog.range_of)
        for reviewed in _read(settings, catalog_range.key, list(group))
    ]
    random.Random(seed).shuffle(sample)  # noqa: S311 - repeatable, not secret
    return sample


def _unsureness(
    settings: Settings, key: str, record: PublishedRecord, guarantee: Guarantee, *, factor: float
) -> pa.Table:
    """The ordinal and status of each row, and how much a label would teach.

    Also the label's field and its confidence: none where two sets disagree. record: of the descriptions.
    """
    first, further = read_sets(settings, EVERYTHING, key, ["ordinal", "status", CONFIDENCE])
    scores, confidences = np.zeros(first.num_rows), np.full(first.num_rows, np.nan)
    fields = np.full(first.num_rows, "", object)
    shown = ShownAnswers.from_rows(first, further)
    for number, of_set in enumerate(further):
        for name in (name for name in of_set.fills if name in shown.fillers):
            is_shown = np.asarray(pc.equal(shown.fillers[name], of_set.name))
            most = _disagree(joined(first, further[:number]), of_set, name, is_shown) & (scores == 0)
            scores, fields = np.where(most, factor, scores), np.where(most, name, fields)
    sets = [("", first, record), *((of_set.name, of_set.rows, of_set.record) for of_set in further)]
    for set_name, rows, of_record in reversed(sets):
        thresholds = guarantee.thresholds_for(of_record)
        own = rows.schema.field(CONFIDENCE).type if CONFIDENCE in rows.column_names else ()
        for name in (own_field.name for own_field in own if not thresholds or own_field.name in thresholds):
            sure = field_confidences(rows[CONFIDENCE], name)
            worth = np.nan_to_num(factor * label_worth(sure, thresholds.get(name)))
            if shown.fillers:
                worth = np.where(np.asarray(shown.is_shown(set_name, name)), worth, 0)
            most = worth > scores
            scores, confidences = np.where(most, worth, scores), np.where(most, sure, confidences)
            fields = np.where(most, name, fields)
    columns = {"score": scores, "confidence": confidences, "field": pa.array(fields, pa.string())}
    return pa.table({"ordinal": first["ordinal"], "status": first["status"], **columns})


def _disagree(above: pa.Table, of_set: FurtherRows, name: str, is_shown: Flags) -> Flags:
    """The rows in which a set that fills a field contradicts the sets above it. above: the rows of these."""
    places = np.flatnonzero(is_shown)
    pairs = (
        pc.struct_field(rows["description"].combine_chunks(), name).take(pa.array(places)).to_pylist()
        for rows in (above, of_set.rows)
    )
    disagree = np.zeros(len(is_shown), np.bool_)
    disagree[places] = [
        before is not None and not same(before, answer) for before, answer in zip(*pairs, strict=True)
    ]
    return disagree


def _read(settings: Settings, key: str, ordinals: Sequence[int]) -> Iterator[Reviewed]:
    """The raw answers of properties of a partition, of all question sets. Raises PublishedError, OSError."""
    chosen = pa.array(ordinals, pa.int64())
    first, further = read_sets(settings, EVERYTHING, key, _COLUMNS, ordinals=chosen)
    rows: list[dict[str, Any]] = joined(first, further).to_pylist()
    shown = ShownAnswers.from_rows(first, further)
    answered = [
        zip(first.to_pylist(), [[]] * len(rows), strict=True),
        *(zip(of_set.rows.to_pylist(), shown.filled(of_set), strict=True) for of_set in further),
    ]
    for row, *of_sets in zip(rows, *answered, strict=True):
        described = row["description"] or {}
        digests: dict[str, str] = {}
        fills = set[str]()
        for of_set, filled in of_sets:
            own = of_set["description"] or {}
            fills |= set(filled)
            digest = answer_digest(of_set) if own else ""
            digests |= {name: digest for name in own if name in filled or name not in digests}
        answer = answer_digest(of_sets[0][0])
        yield Reviewed(
            row["property_id"],
            key,
            row["ordinal"],
            answer,
            {name: described[name] for name in digests},
            confidence=row.get(CONFIDENCE) or {},
            further={name: digest for name, digest in digests.items() if digest != answer},
            fills=frozenset(fills),
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
    fields, answers = set(reviewed.description), reviewed.answers
    unknown = {*right, *wrong, *corrections} - fields
    if unknown or set(right) & set(wrong) or not set(corrections) <= set(wrong):
        raise VerdictError(
            f"{reviewed.property_id}: each field is right or wrong, and what is corrected is wrong"
            + (f"; it has no field {sorted(unknown)[0]!r}" if unknown else "")
        )
    return FieldVerdict(
        property_id=reviewed.property_id,
        at=(now or datetime.now(UTC)).isoformat(timespec="seconds"),
        answer=reviewed.digests,
        right=tuple(sorted(right)),
        wrong=tuple(sorted(wrong)),
        true_fields={name: reviewed.description[name] for name in right} | dict(corrections),
        why=reviewed.why,
        weight=reviewed.weight,
        by_chance=reviewed.by_chance,
        filled={name: answers[name] for name in sorted(reviewed.fills & fields)},
    )


def append_verdict(home: Path, verdict: FieldVerdict) -> None:
    """Append a verdict, durable when this returns.

    Raises CommandError if its property is withdrawn, CatalogError, OSError.
    """
    path = home / REVIEWS
    with _locked(home):
        # Under the lock: a withdrawal writes its list first, and removes verdicts under the lock.
        withdrawn = read_withdrawn(home)
        if withdrawn is not None and verdict.property_id in withdrawn:
            raise CommandError(
                "The property was withdrawn, and no verdict on it is kept. Where a file of verdicts was being"
                " taken over, do it again for the others."
            )
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


def typed_fields(reviewed: Reviewed, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as values of the answer's types: a text is JSON (true, 3, null) unless the field is a text."""
    typed: dict[str, Any] = dict(fields)
    for name, value in fields.items():
        if isinstance(value, str) and not isinstance(reviewed.description.get(name), str):
            with contextlib.suppress(ValueError):
                typed[name] = json.loads(value)
    return typed


@dataclass(frozen=True)
class TakenVerdicts:
    """Verdicts from elsewhere.

    known: kept before, or on a property that chance drew and whose verdict stays, as it is on an answer that
    is published. replaced: on answers that are published no more.
    """

    kept: int
    known: int
    replaced: int


def take_verdicts(settings: Settings, catalog: Catalog, path: Path) -> TakenVerdicts:
    """Keep the verdicts of a file of JSON lines: ``property_id``, ``answer`` and ``description``.

    A field as it is published is right, another value corrects it, and a field that is left out is left open.
    Nothing is kept unless every line can be. Raises CommandError, TruthError, OSError.
    """
    lines = _read_lines(path)
    records = published_records(settings.descriptions, catalog)
    # Nobody knows how it was chosen what to judge elsewhere.
    elsewhere = {
        ordinal: _Drawing(weight=0.0, by_chance=False)
        for ordinal in catalog.ordinals_of({line["property_id"] for line in lines.values()})
        if catalog.range_of(ordinal).key in records
    }
    sample = _read_sample(settings, catalog, elsewhere, seed=0)
    published = {reviewed.property_id: reviewed for reviewed in sample}
    kept_before = verdicts(settings.home)
    judged: list[FieldVerdict] = []
    already_kept = 0
    for number, line in lines.items():
        reviewed = published.get(line["property_id"])
        if reviewed is None:
            continue
        # The line names no answer of the other sets: their fields are left open.
        named = line["answer"].split()
        open_fields = {name for name, digest in reviewed.answers.items() if digest not in named}
        part = {name: value for name, value in reviewed.description.items() if name not in open_fields}
        if not part:
            continue
        judgeable = replace(reviewed, description=part)
        given = {name: value for name, value in line["description"].items() if name not in open_fields}
        fields = typed_fields(judgeable, given)
        corrections = {name: fields[name] for name in fields if part.get(name) != fields[name]}
        try:
            verdict = verdict_of(
                judgeable,
                right=sorted(fields.keys() - corrections),
                wrong=sorted(corrections),
                corrections=corrections,
            )
        except VerdictError as error:
            raise CommandError(f"{path}, line {number}: {error}. Nothing was kept.") from error
        before = kept_before.get(verdict.property_id)
        # The verdict that chance drew may certify with the answer of a set that this line leaves open.
        on_all_sets = replace(verdict, answer=reviewed.digests)
        if before is not None and (before.judgement == verdict.judgement or before.outlasts(on_all_sets)):
            already_kept += 1
        else:
            judged.append(verdict)
    for verdict in judged:
        append_verdict(settings.home, verdict)
    return TakenVerdicts(len(judged), already_kept, replaced=len(lines) - already_kept - len(judged))


def _read_lines(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of a file of verdicts, by their numbers. Raises CommandError."""
    lines: dict[int, dict[str, Any]] = {}
    try:
        for number, text in enumerate(path.read_bytes().splitlines(), start=1):
            if text.strip():
                line = json.loads(text)
                shapes = {"property_id": str, "answer": str, "description": dict}
                if not all(isinstance(line[name], shape) for name, shape in shapes.items()):
                    raise TypeError("property_id and answer are texts, description has the fields")
                lines[number] = line
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CommandError(f"{path}, line {number} is no verdict: {error}. Nothing was kept.") from error
    return lines


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


PublishedAnswers = Mapping[str, Mapping[str, str]]
"""The digest of the published answer of the field's question set, by property and field."""


def published_answers(settings: Settings, catalog: Catalog) -> dict[str, Mapping[str, str]]:
    """Digests of the published answers of the properties that have a verdict.

    Only their partitions are read. A partition that cannot be read gives no answers: the audit says why.

    Raises TruthError, CatalogError, FormatVersionError.
    """
    answers: dict[str, Mapping[str, str]] = {}
    for catalog_range, group in groupby(catalog.ordinals_of(verdicts(settings.home)), catalog.range_of):
        with contextlib.suppress(PublishedError, OSError, pa.ArrowException):
            read = _read(settings, catalog_range.key, list(group))
            answers |= {reviewed.property_id: reviewed.answers for reviewed in read}
    return answers


def judged_fields(verdict: FieldVerdict, published: PublishedAnswers) -> frozenset[str]:
    """The fields whose published answers it judged; empty: none of these answers is published any more."""
    answers = published.get(verdict.property_id, {})
    return frozenset(name for name, digest in answers.items() if verdict.judges(name, digest))


def accuracy(home: Path, published: PublishedAnswers) -> Accuracy:
    """How often each field of the published answers was judged right.

    A verdict counts only for the answer that it judged, not for that of another model, and for as much as the
    drawing of its property says. Raises TruthError, FormatVersionError, OSError.
    """
    judged = defaultdict[str, list[tuple[bool, float]]](list)
    replaced = 0
    for verdict in verdicts(home).values():
        fields_judged = judged_fields(verdict, published)
        if not fields_judged:
            replaced += 1
        elif verdict.weight > 0:
            for is_right, fields in ((True, verdict.right), (False, verdict.wrong)):
                for name in fields_judged.intersection(fields):
                    judged[name].append((is_right, verdict.weight))
    return Accuracy(
        {name: weighted_share(*zip(*judged[name], strict=True)) for name in sorted(judged)}, replaced
    )


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
    with contextlib.closing(lock):
        yield


def _cut_torn_line(descriptor: int, path: Path) -> None:
    """Remove a line that a power cut tore. It was not acknowledged, and it would spoil the next line."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    content = path.read_bytes()
    os.ftruncate(descriptor, content.rfind(b"\n") + 1)
