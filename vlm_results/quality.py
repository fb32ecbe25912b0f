"""The quality of the published descriptions: their answers, where they are odd, how far they are right.

A summary of each published partition is kept, so that only new partitions are read. Dagster's side and the
picture are in ``vlm_results/dataset_quality.py``.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sqlalchemy as sa
from pydantic import TypeAdapter

from vlm_assets.assets.fingerprint import digest_of, settings_digest
from vlm_assets.assets.partition import CONFIDENCE, FAILED, NOT_ASKED, OK
from vlm_assets.assets.truth import Descriptions, read_truth
from vlm_assets.config.filled_fields import FieldSources
from vlm_assets.config.question_sets import QuestionSet, question_sets
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.intervals import Share, wilson
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import Catalog
from vlm_durable.files.seen_files import signature_of
from vlm_durable.state.tables import put_row, quality_summaries
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted
from vlm_engine.schema import DescriptionSchema, load_schema, same
from vlm_results.confidence_statistics import GRID, cell_counts
from vlm_results.guarantee import EVERYTHING
from vlm_results.joined_rows import ShownAnswers
from vlm_results.published_table import field_confidences, read_sets
from vlm_results.results_settings import ResultsSettings

CONTRADICTIONS = "CONTRADICTIONS"
"""Name of a class variable of the user's schema: the name of each contradiction, and its condition in SQL."""

FAILURE = "(failure)"
"""Name under which the kinds of failure are compared like a field."""

LEAST_DISTANCE = 0.15
"""The share of a partition's answers that must differ from those of all others before it is named."""

_ERROR_RATE = 0.001
"""At most this share of the named partitions differs by chance (Benjamini and Hochberg 1995)."""

_CONSTANT = 0.995
_REPEATED, _REPEATED_AT_LEAST = 0.01, 10
_ENOUGH_ROWS = 100
_LONGEST = 160
_SHOWN_IDS = 3
_WITH_EXAMPLES = 20
_TOGETHER = 1000
"""Partitions in memory at a time."""

_CONTENT = 3
"""Raised when summaries have more than before: kept ones of fewer are made anew."""

Kind = Literal["values", "numbers", "texts"]
PathOf = Callable[[str, str], Path]
"""The file of a partition, by its key and the name of the further question set; empty: the descriptions."""
Numbers = npt.NDArray[np.int64]
Filled = Mapping[str, pa.Array]
"""The ids of the properties whose answer another question set gives, by field."""


@dataclass(frozen=True)
class FieldSummary:
    """The answers of a partition's ok rows in one field, as far as they are shown.

    counts: how often each value comes; a text only if it comes at least twice. judged: properties in the
    truth file. right: how many of these are right. filled: rows that show the answer of another question set.
    """

    kind: Kind
    nulls: int
    counts: Mapping[str, int]
    right: int
    judged: int
    filled: int = 0


@dataclass(frozen=True)
class PartitionSummary:
    """One published partition. published_at: the time in its record. failed: rows by kind of error.

    contradictions: how many descriptions contradict themselves, by the name of the contradiction. made_with:
    a digest of the model and of the other settings that decided the answers. confidences: of each field that
    has some, how many lie in each cell of the grid. further: the same of each further question set that has
    published it, by its name. not_asked: rows of properties that the set's ``where`` leaves out.
    """

    key: str
    published_at: str
    ok: int
    failed: Mapping[str, int]
    fields: Mapping[str, FieldSummary]
    contradictions: Mapping[str, int]
    made_with: str = ""
    confidences: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    further: Mapping[str, PartitionSummary] = field(default_factory=dict)
    not_asked: int = 0

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.ok + sum(self.failed.values()) + self.not_asked


class FieldAnswers:
    """The answers of all partitions' ok rows in one field. right, judged: as in ``FieldSummary``.

    rows: how many rows that is. question_sets: those that ask for it, in their order; the further ones by
    their names, and the descriptions as an empty one.
    """

    def __init__(self, kind: Kind, *question_sets: str) -> None:
        self.kind = kind
        self.question_sets = list(question_sets)
        self.right = self.judged = self.rows = 0
        self._values: dict[str | None, int] = {}
        # For each partition its number and how many values it has; for each of these values its number and
        # its count. Dictionaries took 1.1 GiB at 20,000 partitions.
        self._partitions, self._sizes = array("i"), array("i")
        self._numbers, self._counts = array("i"), array("i")

    def add(self, partition: int, counts: Mapping[str, int], nulls: int = 0) -> None:
        """Add all answers of a partition. partition: its number; numbers must ascend."""
        values = self._values
        answers: dict[str | None, int] = dict(counts.items())
        if nulls:
            answers[None] = nulls
        try:
            numbers = list(map(values.__getitem__, answers))
        except KeyError:
            numbers = [values.setdefault(value, len(values)) for value in answers]
        self._partitions.append(partition)
        self._sizes.append(len(answers))
        self._numbers.fromlist(numbers)
        self._counts.fromlist(list(answers.values()))

    @property
    def counts(self) -> dict[str, int]:
        """How often each value was given, most frequent first."""
        totals = Counter(dict(zip(self._values, self._totals(), strict=True)))
        return {value: count for value, count in totals.most_common() if value is not None}

    @property
    def nulls(self) -> int:
        """How many rows have no value."""
        return self._totals()[self._values[None]] if None in self._values else 0

    def _totals(self) -> list[int]:
        totals: list[int] = np.bincount(self._numbers, self._counts, len(self._values)).astype(int).tolist()
        return totals

    def over_time(self, step_of: Numbers, steps: int) -> list[dict[str, int]]:
        """The counts in each step. step_of: for each partition, the number of its step."""
        width = len(self._values)
        cells = np.repeat(step_of[self._partitions], self._sizes) * width + np.asarray(self._numbers)
        table = np.bincount(cells, self._counts, steps * width).astype(int).reshape(steps, width)
        return [
            {value: count for value, count in zip(self._values, row, strict=True) if value is not None}
            for row in table.tolist()
        ]

    def compare_partitions(self) -> list[_PartitionComparison]:
        """Each partition against all others; empty if there is too little to compare.

        The chance is that of a chi-squared test. The distance is half the sum of the shares' differences.
        """
        from scipy.stats import chi2

        partitions = np.repeat(self._partitions, self._sizes)
        numbers, counts = np.asarray(self._numbers), np.asarray(self._counts)
        enough = np.flatnonzero(np.bincount(partitions, counts) >= _ENOUGH_ROWS // 2)
        row_of = np.full(partitions.max(initial=0) + 1, -1)
        row_of[enough] = np.arange(len(enough))
        used = row_of[partitions] >= 0
        rows, numbers, counts = row_of[partitions[used]], numbers[used], counts[used]
        whole = np.bincount(numbers, counts, len(self._values))
        if len(enough) < 3 or np.count_nonzero(whole) < 2:
            return []
        values = list(self._values)
        comparisons: list[_PartitionComparison] = []
        for start in range(0, len(enough), _TOGETHER):
            names = enough[start : start + _TOGETHER]
            first, stop = np.searchsorted(rows, (start, start + len(names)))
            table = np.zeros((len(names), len(values)))
            table[rows[first:stop] - start, numbers[first:stop]] = counts[first:stop]
            size = table.sum(axis=1, keepdims=True)
            expected = whole * (size / whole.sum())
            beside = whole - expected
            # The test needs five expected rows: rarer values add nothing to the sum.
            telling = expected >= 5
            squares = (table - expected) ** 2
            squares = squares / np.maximum(expected, 1e-9) + squares / np.maximum(beside, 1e-9)
            degrees = np.maximum(telling.sum(axis=1) - 1, 1)
            chances = chi2.sf(np.where(telling, squares, 0.0).sum(axis=1), degrees)
            own_shares, other_shares = table / size, (whole - table) / (whole.sum() - size)
            distances = np.abs(own_shares - other_shares).sum(axis=1) / 2
            most = (own_shares - other_shares).argmax(axis=1)
            cells = np.arange(len(names)), most
            comparisons += map(
                _PartitionComparison,
                chances.tolist(),
                distances.tolist(),
                names.tolist(),
                [values[number] for number in most.tolist()],
                own_shares[cells].tolist(),
                other_shares[cells].tolist(),
            )
        return comparisons


class _PartitionComparison(NamedTuple):
    """A partition against all others in one field.

    value: the value that it gives too often. own_share, other_share: the share of this value in the partition
    and in all others.
    """

    chance: float
    distance: float
    partition: int
    value: str | None
    own_share: float
    other_share: float


@dataclass(frozen=True)
class Suspicion:
    """An odd field. check: the check that it belongs to. key: the partition. examples: property ids."""

    check: Literal["alike", "answers", "consistent", "sure"]
    field: str
    sentence: str
    key: str | None = None
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quality:
    """The quality of all published descriptions. published: when each partition was published.

    ok, failed: rows of the descriptions. unread: why a partition's record or file cannot be read. The audit
    says more about these. confidences: by what the answers were made with and by field, how many confidences
    lie in each cell of the grid. lacking: described properties without a row of a further question set, by
    its name. asked_by: by what answers were made with, the further set that asked; empty: the descriptions.
    not_asked: described properties that a further set's ``where`` leaves out, by its name.
    """

    published: Mapping[str, str]
    fields: Mapping[str, FieldAnswers]
    ok: int
    failed: Mapping[str, int]
    findings: tuple[Suspicion, ...]
    unread: tuple[str, ...]
    confidences: Mapping[str, Mapping[str, Numbers]] = field(default_factory=dict)
    lacking: Mapping[str, int] = field(default_factory=dict)
    asked_by: Mapping[str, str] = field(default_factory=dict)
    not_asked: Mapping[str, int] = field(default_factory=dict)

    def asks_for(self, made_with: str, name: str) -> bool:
        """Whether answers that were made with this have a field; of a field that no answer has, True."""
        answers = self.fields.get(name)
        return answers is None or self.asked_by.get(made_with, "") in answers.question_sets

    def findings_of(self, check: str) -> list[Suspicion]:
        """The findings of one check."""
        return [finding for finding in self.findings if finding.check == check]

    @property
    def agreement(self) -> Mapping[str, Share]:
        """How often each field is right, for the fields that the truth file knows."""
        return {
            name: wilson(answers.right, answers.judged)
            for name, answers in self.fields.items()
            if answers.judged
        }


@dataclass(frozen=True)
class _AskedSet:
    """A question set as it is judged. name: empty for the descriptions. fills: see ``QuestionSet``."""

    name: str
    published: PublishedPartitions
    schema: DescriptionSchema
    fills: tuple[str, ...]

    @classmethod
    def from_question_set(cls, asked: QuestionSet, name: str) -> Self:
        """Raises SchemaError."""
        schema = load_schema(asked.settings.description_schema)
        return cls(name, PublishedPartitions(asked.asset), schema, asked.fills)

    @property
    def conditions(self) -> dict[str, str]:
        """The contradictions of its schema, by their names among those of all sets."""
        conditions: Mapping[str, str] = getattr(self.schema.model, CONTRADICTIONS, {})
        above = f"{self.name}: " if self.name else ""
        return {f"{above}{name}": condition for name, condition in conditions.items()}


def assess_quality(settings: Settings, catalog: Catalog) -> Quality:
    """Judge all published partitions. Only those published since the last time are read.

    Raises CatalogError, SchemaError, TruthError.
    """
    first, *further = question_sets(settings)
    sets = {"": _AskedSet.from_question_set(first, "")} | {
        asked.name: _AskedSet.from_question_set(asked, asked.name) for asked in further
    }
    file = ResultsSettings.part_of(settings).truth
    truth = read_truth(file) if file is not None else {}
    return judge(
        _summaries(settings, catalog, list(sets.values()), truth=truth),
        path_of=lambda key, name: sets[name].published.path(key),
        conditions={
            name: condition for asked_set in sets.values() for name, condition in asked_set.conditions.items()
        },
        further=[asked.name for asked in further],
    )


def _summaries(
    settings: Settings, catalog: Catalog, sets: Sequence[_AskedSet], *, truth: Descriptions
) -> Iterator[PartitionSummary | str]:
    """The summary of each described partition, or why it cannot be read. Kept summaries come first."""
    questions = [
        digest_of(
            [
                asked_set.schema.digest,
                asked_set.conditions,
                str(sorted(truth.items())),
                _CONTENT,
                *asked_set.fills,
            ]
        )
        for asked_set in sets
    ]
    published_keys = [frozenset(asked_set.published.asset.published_keys()) for asked_set in sets]
    made_of = dict[str, str]()
    for key in (catalog_range.key for catalog_range in catalog.ranges):
        if key not in published_keys[0]:
            continue
        try:
            # Each publication is a new file, so a change of its record is a change of the file.
            states = [
                f"{asked_set.name}{signature_of(asked_set.published.path(key).stat())} {asked}"
                for asked_set, asked, keys in zip(sets, questions, published_keys, strict=True)
                if key in keys
            ]
        except OSError as error:
            yield f"{key}: {error}"
        else:
            made_of[key] = " ".join(states)
    for kept_made_of, summary in _kept_summaries(settings):
        if made_of.get(summary.key) == kept_made_of:
            del made_of[summary.key]
            yield summary
    for number, (key, state) in enumerate(made_of.items()):
        doing("reading what the descriptions say, of partitions", number, len(made_of))
        try:
            summaries: dict[str, PartitionSummary] = {}
            filled = _filled(settings, key) if any(asked_set.fills for asked_set in sets) else {}
            for asked_set in sets:
                if (record := asked_set.published.record(key)) is not None:
                    summaries[asked_set.name] = summarize(
                        asked_set.published.path(key),
                        asked_set.schema,
                        record,
                        conditions=asked_set.conditions,
                        truth=truth,
                        filled=filled.get(asked_set.name, {}),
                    )
            if "" in summaries:
                described = summaries.pop("")
                summary = replace(described, further=summaries)
                _keep(settings, summary, state)
                yield summary
        except (PublishedError, OSError, pa.ArrowException) as error:
            yield f"{key}: {error}"


def _filled(settings: Settings, key: str) -> dict[str, Filled]:
    """What ``summarize`` takes, by question set. Raises PublishedError, OSError, ArrowException."""
    rows, further = read_sets(settings, EVERYTHING, key, ["property_id", "description"])
    answers = ShownAnswers.from_rows(rows, further)
    return {
        name: {
            field: rows["property_id"].filter(pc.invert(answers.is_shown(name, field)))
            for field in answers.fillers
        }
        for name in ("", *(of_set.name for of_set in further))
    }


def judge(
    summaries: Iterable[PartitionSummary | str],
    *,
    path_of: PathOf | None = None,
    conditions: Mapping[str, str] = MappingProxyType({}),
    further: Sequence[str] = (),
) -> Quality:
    """Judge the summaries. path_of: the file of a partition, from which examples are taken.

    further: the names of the further question sets.
    """
    published, unread = dict[str, str](), list[str]()
    fields = dict[str, FieldAnswers]()
    rows = {name: FieldAnswers("values", name) for name in ("", *further)}
    not_asked = dict.fromkeys(further, 0)
    sureness = dict[str, FieldAnswers]()
    confidences: dict[str, dict[str, Numbers]] = {}
    contradicting: dict[tuple[str, str], Counter[str]] = {}
    lacking = dict.fromkeys(further, 0)
    asked_by: dict[str, str] = {}
    for summary in summaries:
        if isinstance(summary, str):
            unread.append(summary)
            continue
        number = len(published)
        published[summary.key] = summary.published_at
        of_sets = {name: summary.further[name] for name in further if name in summary.further}
        for name in lacking.keys() - of_sets.keys():
            lacking[name] += summary.rows
        counts, cells = dict[str, Counter[str]](), dict[str, Counter[int]]()
        nulls = Counter[str]()
        for question_set, of_set in {"": summary, **of_sets}.items():
            rows[question_set].add(number, {**of_set.failed, "ok": of_set.ok})
            if question_set:
                not_asked[question_set] += of_set.not_asked
            for name, of_field in of_set.fields.items():
                answers = fields.setdefault(name, FieldAnswers(of_field.kind))
                if question_set not in answers.question_sets:
                    answers.question_sets.append(question_set)
                # Several sets may answer a field that one of them fills.
                counts.setdefault(name, Counter()).update(of_field.counts)
                nulls[name] += of_field.nulls
                answers.rows += of_set.ok - of_field.filled
                answers.right += of_field.right
                answers.judged += of_field.judged
            asked_by[of_set.made_with] = question_set
            of_settings = confidences.setdefault(of_set.made_with, {})
            for name, in_cells in of_set.confidences.items():
                of_settings[name] = of_settings.get(name, 0) + np.asarray(in_cells, np.int64)
                cells.setdefault(name, Counter()).update(dict(enumerate(in_cells)))
            for name, count in of_set.contradictions.items():
                if count:
                    contradicting.setdefault((name, question_set), Counter())[summary.key] = count
        for name, of_values in counts.items():
            fields[name].add(number, of_values, nulls[name])
        for name, of_cells in cells.items():
            sure = {_cell_text(cell): count for cell, count in of_cells.items() if count}
            sureness.setdefault(name, FieldAnswers("values")).add(number, sure)
    failed = rows[""].counts
    ok = failed.pop("ok", 0)
    failures = {f"{FAILURE} of {name}" if name else FAILURE: answers for name, answers in rows.items()}
    findings = [
        *_odd_answers(fields),
        *_odd_partitions({**fields, **failures}, list(published), path_of),
        *_odd_confidences(sureness, list(published)),
        *_contradictions(contradicting, path_of, conditions),
    ]
    return Quality(
        published,
        fields,
        ok,
        failed,
        tuple(findings),
        tuple(unread),
        confidences,
        lacking,
        asked_by,
        not_asked,
    )


def summarize(
    file: Path,
    schema: DescriptionSchema,
    record: PublishedRecord,
    *,
    conditions: Mapping[str, str],
    truth: Descriptions,
    filled: Filled = MappingProxyType({}),
) -> PartitionSummary:
    """Read one published file. filled: whose answers another set gives. Raises OSError, ArrowException."""
    columns = ["property_id", "status", "error_kind", "description"]
    has_confidence = CONFIDENCE in pq.read_schema(file).names
    table = pq.read_table(file, columns=[*columns, *([CONFIDENCE] if has_confidence else [])])
    ok = table.filter(pc.equal(table["status"], OK))
    failed = Counter(table.filter(pc.equal(table["status"], FAILED))["error_kind"].to_pylist())
    described = ok["description"].combine_chunks()
    fields = {}
    confidences = {}
    for name, kind, column in _columns(schema.json_schema, described):
        elsewhere = filled.get(name.split(".")[0], pa.array([], pa.string()))
        shown = pc.invert(pc.is_in(ok["property_id"], value_set=elsewhere))
        sure = field_confidences(ok[CONFIDENCE].filter(shown), name) if has_confidence else np.zeros(0)
        sure = sure[np.isfinite(sure)]
        if len(sure):
            confidences[name] = tuple(cell_counts(sure).tolist())
        values = column.filter(shown).to_pylist()
        right = [
            same(value, true_fields[name])
            for property_id, value in zip(ok["property_id"].filter(shown).to_pylist(), values, strict=True)
            if name in (true_fields := truth.get(property_id) or {})
        ]
        fields[name] = FieldSummary(
            kind,
            sum(value is None for value in values),
            _counts(kind, values),
            sum(right),
            len(right),
            ok.num_rows - len(values),
        )
    return PartitionSummary(
        record.key,
        record.published_at,
        ok.num_rows,
        {str(kind): count for kind, count in failed.items()},
        fields,
        {name: len(contradicting) for name, contradicting in _contradicting(ok, conditions).items()},
        settings_digest(record.metadata.get("parts", {})),
        confidences,
        not_asked=pc.sum(pc.equal(table["status"], NOT_ASKED)).as_py() or 0,
    )


def _columns(node: Mapping[str, Any], described: Any, above: str = "") -> Iterator[tuple[str, Kind, Any]]:
    """Each leaf of the schema: its dotted name, its kind and its column. A list is judged by its text."""
    for name, field_schema in node.get("properties", {}).items():
        choices = [choice for choice in field_schema.get("anyOf", ()) if choice.get("type") != "null"]
        plain = choices[0] if len(choices) == 1 else field_schema
        if described.type.get_field_index(name) < 0:
            continue  # Made with an earlier schema.
        column = described.field(name)
        if "properties" in plain and pa.types.is_struct(column.type):
            yield from _columns(plain, column, f"{above}{name}.")
        else:
            yield f"{above}{name}", _kind(plain), column


def _kind(node: Mapping[str, Any]) -> Kind:
    if "enum" in node or "const" in node or node.get("type") == "boolean":
        return "values"
    return "numbers" if node.get("type") in ("integer", "number") else "texts"


def _counts(kind: Kind, values: Sequence[Any]) -> dict[str, int]:
    answers = [value for value in values if value is not None]
    if kind == "numbers":
        # Two digits: a distribution, whatever the unit.
        return dict(Counter(f"{value:.2g}" for value in answers if math.isfinite(value)))
    counts = Counter(str(value)[:_LONGEST] for value in answers)
    return {value: count for value, count in counts.items() if kind == "values" or count > 1}


def _contradicting(ok: pa.Table, conditions: Mapping[str, str]) -> dict[str, list[str]]:
    """Ids of the rows that meet each condition; the conditions see the fields and nothing else."""
    if not conditions or not ok.num_rows:
        return {}
    import duckdb

    with duckdb.connect(config={"enable_external_access": "false"}) as connection:
        connection.register("described", ok.select(["property_id", "description"]))
        connection.execute(
            "CREATE TEMP TABLE answers AS SELECT property_id, unnest(description) FROM described"
        )
        connection.execute("SET lock_configuration = true")
        contradicting = {}
        for name, condition in conditions.items():
            query = f"SELECT property_id FROM answers WHERE {condition} ORDER BY 1"  # noqa: S608 - the schema is the user's own code
            try:
                rows = connection.execute(query).fetchall()
            except duckdb.Error as error:
                raise CommandError(
                    f"The contradiction {name!r} of the schema is no condition over its fields: {error}"
                ) from error
            contradicting[name] = [str(property_id) for (property_id,) in rows]
        return contradicting


def _odd_answers(fields: Mapping[str, FieldAnswers]) -> Iterator[Suspicion]:
    """Fields with nearly always the same answer, and fields with a text that comes again and again."""
    for name, answers in fields.items():
        ok = answers.rows
        if ok < _ENOUGH_ROWS:
            continue
        value, count = next(iter(answers.counts.items()), ("", 0))
        if answers.nulls >= _CONSTANT * ok:
            share = answers.nulls / ok
            yield Suspicion("answers", name, f"{name} is null in {share:.1%} of the descriptions.")
        elif answers.kind != "texts" and count >= _CONSTANT * ok:
            yield Suspicion("answers", name, f"{name} is {value!r} in {count / ok:.1%} of the descriptions.")
        elif answers.kind == "texts" and count >= max(_REPEATED * ok, _REPEATED_AT_LEAST):
            yield Suspicion(
                "answers",
                name,
                f"{counted(count, 'descriptions have', 'description has')} the same {name}: {value!r}.",
            )


def _cell_text(cell: int) -> str:
    """A cell of the grid, for people."""
    return f"{GRID[cell]:g} to {GRID[cell + 1] if cell + 1 < len(GRID) else 1:g}"


def _odd_partitions(
    fields: Mapping[str, FieldAnswers], keys: Sequence[str], path_of: PathOf | None
) -> Iterator[Suspicion]:
    """Partitions whose answers in a field differ from all others, beyond chance and by far."""
    for number, (comparison, name) in enumerate(_far_off(fields)):
        key = keys[comparison.partition]
        value = "null" if comparison.value is None else comparison.value
        yield Suspicion(
            "alike",
            name,
            f"In {key}, {name} is {value!r} in {comparison.own_share:.0%} of the properties, elsewhere in"
            f" {comparison.other_share:.0%}.",
            key,
            _examples(path_of, key, name, fields[name].question_sets, value)
            if number < _WITH_EXAMPLES
            else (),
        )


def _odd_confidences(fields: Mapping[str, FieldAnswers], keys: Sequence[str]) -> Iterator[Suspicion]:
    """Partitions whose confidences in a field differ from all others, beyond chance and by far."""
    for comparison, name in _far_off(fields):
        key = keys[comparison.partition]
        yield Suspicion(
            "sure",
            name,
            f"In {key}, the confidence of {name} is {comparison.value} in {comparison.own_share:.0%} of the"
            f" properties, elsewhere in {comparison.other_share:.0%}: what labels of other partitions show"
            " may not hold there.",
            key,
        )


def _far_off(fields: Mapping[str, FieldAnswers]) -> list[tuple[_PartitionComparison, str]]:
    """Comparisons that differ beyond chance and by far, farthest first, each with its field."""
    from scipy.stats import false_discovery_control

    tested = [
        (comparison, name)
        for name, answers in fields.items()
        if answers.kind != "texts"
        for comparison in answers.compare_partitions()
    ]
    rates = false_discovery_control([comparison.chance for comparison, _ in tested]) if tested else ()
    beyond_chance = (test for test, rate in zip(tested, rates, strict=True) if rate <= _ERROR_RATE)
    odd = [test for test in beyond_chance if test[0].distance >= LEAST_DISTANCE]
    return sorted(odd, key=lambda test: (-test[0].distance, test[0].chance))


def _examples(
    path_of: PathOf | None, key: str, name: str, question_sets: Sequence[str], value: str
) -> tuple[str, ...]:
    """Some properties of a partition with this value."""
    if path_of is None:
        return ()
    columns = ["property_id", "status", "error_kind", "description"]
    files = {of_set: path for of_set in question_sets if (path := path_of(key, of_set)).exists()}
    tables = {of_set: pq.read_table(path, columns=columns) for of_set, path in files.items()}
    if name.startswith(FAILURE):
        (table,) = tables.values()
        matches = pc.equal(pc.coalesce(table["error_kind"], table["status"]), value)
        return tuple(table.filter(matches)["property_id"].to_pylist()[:_SHOWN_IDS])
    answers: dict[str, dict[str, Any]] = {}
    for of_set, table in tables.items():
        for row in table.filter(pc.equal(table["status"], OK)).to_pylist():
            answers.setdefault(row["property_id"], {})[of_set] = row["description"]
    field_name, *parts = name.split(".")
    source = FieldSources(field_name, question_sets[0], tuple(question_sets[1:]))
    examples = []
    for property_id, of_property in answers.items():
        answer = of_property.get(source.filler(of_property) or source.first)
        for part in (field_name, *parts):
            answer = (answer or {}).get(part)
        texts = ["null" if answer is None else str(answer)]
        if isinstance(answer, int | float):
            texts.append(f"{answer:.2g}")  # as ``_counts`` writes a number
        if value in texts:
            examples.append(property_id)
    return tuple(examples[:_SHOWN_IDS])


def _contradictions(
    contradicting: Mapping[tuple[str, str], Counter[str]],
    path_of: PathOf | None,
    conditions: Mapping[str, str],
) -> Iterator[Suspicion]:
    """Each contradiction, with examples.

    contradicting: by its name and the further question set, the count in each partition.
    """
    for (name, question_set), counts in contradicting.items():
        examples: list[str] = []
        for key in counts:
            if path_of is None or len(examples) >= _SHOWN_IDS:
                break
            table = pq.read_table(
                path_of(key, question_set), columns=["property_id", "status", "description"]
            )
            ok = table.filter(pc.equal(table["status"], OK))
            examples += _contradicting(ok, {name: conditions[name]})[name]
        descriptions = counted(counts.total(), "descriptions hold", "description holds")
        sentence = f"{descriptions} a contradiction: {name}."
        yield Suspicion("consistent", name, sentence, None, tuple(examples[:_SHOWN_IDS]))


_SUMMARY = TypeAdapter(PartitionSummary)


def _kept_summaries(settings: Settings) -> Iterator[tuple[str, PartitionSummary]]:
    """Each kept summary, after the state of the file that it was made of. Unreadable summaries are skipped.

    They are in the part of the control state that may be lost.
    """
    state, table = control_state(settings), quality_summaries
    query = sa.select(table.c.key, table.c.made_of, sa.cast(table.c.summary, sa.Text).label("summary"))
    query = query.order_by(table.c.key).limit(_TOGETHER)

    def rows_after(key: str) -> Sequence[sa.Row[Any]]:
        return state.read_beats(lambda connection: connection.execute(query.where(table.c.key > key)).all())

    # The table may be of another version, or torn by a power cut.
    with contextlib.suppress(sa.exc.DBAPIError):
        rows = rows_after("")
        while rows:
            for row in rows:
                with contextlib.suppress(ValueError):
                    yield row.made_of, _SUMMARY.validate_json(row.summary)
            rows = rows_after(rows[-1].key)


def _keep(settings: Settings, summary: PartitionSummary, made_of: str) -> None:
    row = {"key": summary.key, "made_of": made_of, "summary": asdict(summary)}
    control_state(settings).beat(lambda connection: put_row(connection, quality_summaries, **row))
