"""The quality of the published descriptions: what they say, where they are odd, how far they are right.

A summary of each published partition is kept, so that a look reads only what is new. Dagster's side and the
picture are in ``vlm_results/dataset_quality.py``.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sqlalchemy as sa
from pydantic import TypeAdapter

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.truth import Descriptions, read_truth
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_durable.state.tables import quality_summaries
from vlm_durable.versions.partition_files import RecordDamagedError
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted
from vlm_engine.schema import DescriptionSchema, load_schema, same
from vlm_results.intervals import Share, wilson

CONTRADICTIONS = "CONTRADICTIONS"
"""Name of a class variable of the user's schema: what contradicts itself, in words, to a condition in SQL."""

FAILURE = "(failure)"
"""Name under which the kinds of failure are compared like a field."""

LOOKED_LIKE = 0.15
"""Share of a partition's answers that would have to be others for it to be like the rest; below, it is."""

_ERROR_RATE = 0.001
"""Of all that is named, at most this share differs so by chance (Benjamini and Hochberg 1995)."""

_CONSTANT = 0.995
_REPEATED, _REPEATED_AT_LEAST = 0.01, 10
_ENOUGH_ROWS = 100
_LONGEST = 160
_SHOWN_IDS = 3
_WITH_EXAMPLES = 20
_TOGETHER = 1000
"""Partitions in memory at a time."""

Kind = Literal["values", "numbers", "texts"]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FieldSummary:
    """What the ok rows say in one field. counts: of a text only those that come twice or more in a partition.

    right, judged: of the properties in the truth file.
    """

    kind: Kind
    nulls: int
    counts: Mapping[str, int]
    right: int
    judged: int


@dataclass(frozen=True)
class PartitionSummary:
    """One published partition. published_at: as its record has it. failed: rows by kind.

    contradictions: how many descriptions contradict themselves, by the name of the contradiction.
    """

    key: str
    published_at: str
    ok: int
    failed: Mapping[str, int]
    fields: Mapping[str, FieldSummary]
    contradictions: Mapping[str, int]


class FieldAnswers:
    """What the ok rows of all partitions say in one field. right, judged: as in ``FieldSummary``."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.right = self.judged = 0
        self._values: dict[str | None, int] = {}
        # Of each partition its number, how many values it has, and of each value its number and how often it
        # comes: dictionaries took 1.1 GiB at 20,000 partitions.
        self._partitions, self._sizes = array("i"), array("i")
        self._numbers, self._counts = array("i"), array("i")

    def add(self, partition: int, counts: Mapping[str, int], nulls: int = 0) -> None:
        """Count the answers of one partition more. partition: its number; they ascend."""
        values = self._values
        said: dict[str | None, int] = dict(counts.items())
        if nulls:
            said[None] = nulls
        try:
            numbers = list(map(values.__getitem__, said))
        except KeyError:
            numbers = [values.setdefault(value, len(values)) for value in said]
        self._partitions.append(partition)
        self._sizes.append(len(said))
        self._numbers.fromlist(numbers)
        self._counts.fromlist(list(said.values()))

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
        """The counts in each step. step_of: of each partition, the number of its step."""
        width = len(self._values)
        at = np.repeat(step_of[self._partitions], self._sizes) * width + np.asarray(self._numbers)
        counted = np.bincount(at, self._counts, steps * width).astype(int).reshape(steps, width)
        return [
            {value: count for value, count in zip(self._values, row, strict=True) if value is not None}
            for row in counted.tolist()
        ]

    def compared(self) -> list[_Compared]:
        """Each partition against all others; empty where there is too little to compare.

        The chance is that of a chi-squared test, the distance half the sum of the differences of the shares.
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
        values, found = list(self._values), list[_Compared]()
        for start in range(0, len(enough), _TOGETHER):
            names = enough[start : start + _TOGETHER]
            first, stop = np.searchsorted(rows, (start, start + len(names)))
            table = np.zeros((len(names), len(values)))
            table[rows[first:stop] - start, numbers[first:stop]] = counts[first:stop]
            size = table.sum(axis=1, keepdims=True)
            expected = whole * (size / whole.sum())
            beside = whole - expected
            # Too few to tell by: they add nothing to the sum.
            telling = expected >= 5
            squares = (table - expected) ** 2
            squares = squares / np.maximum(expected, 1e-9) + squares / np.maximum(beside, 1e-9)
            degrees = np.maximum(telling.sum(axis=1) - 1, 1)
            chances = chi2.sf(np.where(telling, squares, 0.0).sum(axis=1), degrees)
            here, elsewhere = table / size, (whole - table) / (whole.sum() - size)
            distances = np.abs(here - elsewhere).sum(axis=1) / 2
            most = (here - elsewhere).argmax(axis=1)
            at = np.arange(len(names)), most
            found += map(
                _Compared,
                chances.tolist(),
                distances.tolist(),
                names.tolist(),
                [values[number] for number in most.tolist()],
                here[at].tolist(),
                elsewhere[at].tolist(),
            )
        return found


class _Compared(NamedTuple):
    """A partition against all others in one field.

    most: the value that it gives too often. here, elsewhere: the share of that value.
    """

    chance: float
    distance: float
    partition: int
    most: str | None
    here: float
    elsewhere: float


@dataclass(frozen=True)
class Suspicion:
    """Something odd. check: which check it belongs to. key: the partition. examples: property ids."""

    check: Literal["alike", "answers", "consistent"]
    field: str
    sentence: str
    key: str | None = None
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quality:
    """The whole. published: when each partition was. unread: partitions whose record or file does not read.

    The audit says more of the unread ones.
    """

    published: Mapping[str, str]
    fields: Mapping[str, FieldAnswers]
    ok: int
    failed: Mapping[str, int]
    findings: tuple[Suspicion, ...]
    unread: tuple[str, ...]

    def of_check(self, check: str) -> list[Suspicion]:
        """What one check found."""
        return [one for one in self.findings if one.check == check]

    @property
    def agreement(self) -> Mapping[str, Share]:
        """How often each field is right, where the truth file knows it."""
        return {name: wilson(one.right, one.judged) for name, one in self.fields.items() if one.judged}


def look_at_quality(settings: Settings, catalog: Catalog) -> Quality:
    """Summarize what is published; only partitions that are new since the last look are read.

    Raises CatalogError, SchemaError, TruthError.
    """
    schema = load_schema(settings.description_schema)
    truth = read_truth(settings.truth) if settings.truth is not None else {}
    conditions: Mapping[str, str] = getattr(schema.model, CONTRADICTIONS, {})
    summaries = _summaries(settings, catalog, schema, conditions=conditions, truth=truth)
    path_of = PublishedPartitions(settings.descriptions).path
    return judge(summaries, path_of=path_of, conditions=conditions)


def _summaries(
    settings: Settings,
    catalog: Catalog,
    schema: DescriptionSchema,
    *,
    conditions: Mapping[str, str],
    truth: Descriptions,
) -> Iterator[PartitionSummary | str]:
    """The summary of each published partition, or why one does not read; kept ones first."""
    asked = digest_of([schema.digest, dict(conditions), str(sorted(truth.items()))])
    published = PublishedPartitions(settings.descriptions)
    there = frozenset(settings.descriptions.published_keys())
    made_of = dict[str, str]()
    for key in (one.key for one in catalog.ranges if one.key in there):
        try:
            # Each publication is a new file, so that its record is read no more often than its rows.
            file = published.path(key).stat()
        except OSError as error:
            yield f"{key}: {error}"
        else:
            made_of[key] = f"{file.st_ino} {file.st_size} {file.st_mtime_ns} {asked}"
    for known_of, summary in _kept(settings):
        if made_of.get(summary.key) == known_of:
            del made_of[summary.key]
            yield summary
    for number, (key, one) in enumerate(made_of.items()):
        doing("reading what the descriptions say, of partitions", number, len(made_of))
        try:
            record = published.record(key)
            if record is not None:
                summary = summarize(
                    published.path(key), schema, key, record.published_at, conditions=conditions, truth=truth
                )
                _keep(settings, summary, one)
                yield summary
        except (RecordDamagedError, OSError, pa.ArrowException) as error:
            yield f"{key}: {error}"


def judge(
    summaries: Iterable[PartitionSummary | str],
    *,
    path_of: Callable[[str], Path] | None = None,
    conditions: Mapping[str, str] = MappingProxyType({}),
) -> Quality:
    """What follows from the summaries. path_of: the file of a partition, from which examples are taken."""
    published, unread = dict[str, str](), list[str]()
    fields, rows = dict[str, FieldAnswers](), FieldAnswers("values")
    contradicting: dict[str, Counter[str]] = {}
    for one in summaries:
        if isinstance(one, str):
            unread.append(one)
            continue
        number = len(published)
        published[one.key] = one.published_at
        rows.add(number, {**one.failed, "ok": one.ok})
        for name, said in one.fields.items():
            answers = fields.get(name) or fields.setdefault(name, FieldAnswers(said.kind))
            answers.add(number, said.counts, said.nulls)
            answers.right += said.right
            answers.judged += said.judged
        for name, count in one.contradictions.items():
            if count:
                contradicting.setdefault(name, Counter())[one.key] = count
    failed = rows.counts
    ok = failed.pop("ok", 0)
    findings = [
        *_odd_answers(fields, ok),
        *_odd_partitions({**fields, FAILURE: rows}, list(published), path_of),
        *_contradictions(contradicting, path_of, conditions),
    ]
    return Quality(published, fields, ok, failed, tuple(findings), tuple(unread))


def summarize(
    file: Path,
    schema: DescriptionSchema,
    key: str,
    published_at: str,
    *,
    conditions: Mapping[str, str],
    truth: Descriptions,
) -> PartitionSummary:
    """Read one published file. Raises OSError, ArrowException."""
    table = pq.read_table(file, columns=["property_id", "status", "error_kind", "description"])
    ok = table.filter(pc.equal(table["status"], "ok"))
    failed = Counter(table.filter(pc.not_equal(table["status"], "ok"))["error_kind"].to_pylist())
    ids = ok["property_id"].to_pylist()
    described = ok["description"].combine_chunks()
    fields = {}
    for name, kind, column in _columns(schema.json_schema, described):
        values = column.to_pylist()
        right = [
            same(value, known[name])
            for one, value in zip(ids, values, strict=True)
            if (known := truth.get(one)) is not None and name in known
        ]
        fields[name] = FieldSummary(
            kind, sum(value is None for value in values), _counts(kind, values), sum(right), len(right)
        )
    return PartitionSummary(
        key,
        published_at,
        len(ids),
        {str(kind): count for kind, count in failed.items()},
        fields,
        {name: len(found) for name, found in _contradicting(ok, conditions).items()},
    )


def _columns(node: Mapping[str, Any], described: Any, above: str = "") -> Iterator[tuple[str, Kind, Any]]:
    """Each leaf of the schema: its dotted name, its kind and its column. A list is judged by its text."""
    for name, one in node.get("properties", {}).items():
        others = [other for other in one.get("anyOf", ()) if other.get("type") != "null"]
        plain = others[0] if len(others) == 1 else one
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
    given = [value for value in values if value is not None]
    if kind == "numbers":
        # Two digits: a distribution, whatever the unit.
        return dict(Counter(f"{value:.2g}" for value in given if math.isfinite(value)))
    counts = Counter(str(value)[:_LONGEST] for value in given)
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
        found = {}
        for name, condition in conditions.items():
            query = f"SELECT property_id FROM answers WHERE {condition} ORDER BY 1"  # noqa: S608 - the schema is the user's own code
            try:
                found[name] = [str(one) for (one,) in connection.execute(query).fetchall()]
            except duckdb.Error as error:
                raise CommandError(
                    f"The contradiction {name!r} of the schema is no condition over its fields: {error}"
                ) from error
        return found


def _odd_answers(fields: Mapping[str, FieldAnswers], ok: int) -> Iterator[Suspicion]:
    """Answers that are nearly always the same, and texts that come again and again."""
    if ok < _ENOUGH_ROWS:
        return
    for name, one in fields.items():
        value, count = next(iter(one.counts.items()), ("", 0))
        if one.nulls >= _CONSTANT * ok:
            yield Suspicion("answers", name, f"{name} is null in {one.nulls / ok:.1%} of the descriptions.")
        elif one.kind != "texts" and count >= _CONSTANT * ok:
            yield Suspicion("answers", name, f"{name} is {value!r} in {count / ok:.1%} of the descriptions.")
        elif one.kind == "texts" and count >= max(_REPEATED * ok, _REPEATED_AT_LEAST):
            yield Suspicion(
                "answers",
                name,
                f"{counted(count, 'descriptions have', 'description has')} the same {name}: {value!r}.",
            )


def _odd_partitions(
    fields: Mapping[str, FieldAnswers], keys: Sequence[str], path_of: Callable[[str], Path] | None
) -> Iterator[Suspicion]:
    """Partitions whose answers in a field are others than everywhere else, beyond chance and by far."""
    tested = sorted(
        ((one, name) for name, of in fields.items() if of.kind != "texts" for one in of.compared()),
        key=lambda tested: tested[0].chance,
    )
    last = max(
        (rank for rank, (one, _) in enumerate(tested, 1) if one.chance <= _ERROR_RATE * rank / len(tested)),
        default=0,
    )
    odd = [(one, name) for one, name in tested[:last] if one.distance >= LOOKED_LIKE]
    for number, (one, name) in enumerate(sorted(odd, key=lambda odd: -odd[0].distance)):
        key, most = keys[one.partition], "null" if one.most is None else one.most
        yield Suspicion(
            "alike",
            name,
            f"In {key}, {name} is {most!r} in {one.here:.0%} of the properties, elsewhere in"
            f" {one.elsewhere:.0%}.",
            key,
            _examples(path_of, key, name, most) if number < _WITH_EXAMPLES else (),
        )


def _examples(path_of: Callable[[str], Path] | None, key: str, name: str, value: str) -> tuple[str, ...]:
    """Some properties of a partition with this value."""
    if path_of is None:
        return ()
    table = pq.read_table(path_of(key), columns=["property_id", "status", "error_kind", "description"])
    if name == FAILURE:
        wanted = pc.equal(pc.coalesce(table["error_kind"], "ok"), value)
        return tuple(table.filter(wanted)["property_id"].to_pylist()[:_SHOWN_IDS])
    found = []
    for one, description in zip(
        table["property_id"].to_pylist(), table["description"].to_pylist(), strict=True
    ):
        for part in name.split("."):
            description = (description or {}).get(part)
        said = "null" if description is None else str(description)
        if value in (said, f"{description:.2g}" if isinstance(description, int | float) else said):
            found.append(one)
    return tuple(found[:_SHOWN_IDS])


def _contradictions(
    contradicting: Mapping[str, Counter[str]],
    path_of: Callable[[str], Path] | None,
    conditions: Mapping[str, str],
) -> Iterator[Suspicion]:
    """What contradicts itself, with examples. contradicting: by condition, how many in which partition."""
    for name, counts in contradicting.items():
        examples: list[str] = []
        for key in counts:
            if path_of is None or len(examples) >= _SHOWN_IDS:
                break
            table = pq.read_table(path_of(key), columns=["property_id", "status", "description"])
            ok = table.filter(pc.equal(table["status"], "ok"))
            examples += _contradicting(ok, {name: conditions[name]})[name]
        said = f"{counted(counts.total(), 'descriptions hold', 'description holds')} a contradiction: {name}."
        yield Suspicion("consistent", name, said, None, tuple(examples[:_SHOWN_IDS]))


def forget_summaries(settings: Settings, keys: Collection[str]) -> None:
    """Forget what was kept of partitions: it may name properties that are withdrawn."""
    table = quality_summaries
    control_state(settings).beat(
        lambda connection: connection.execute(table.delete().where(table.c.key.in_(list(keys))))
    )


_SUMMARY = TypeAdapter(PartitionSummary)


def _kept(settings: Settings) -> Iterator[tuple[str, PartitionSummary]]:
    """What each summary of earlier looks was made of, and itself; one that does not read is made again.

    They are in the control state's part that may be lost.
    """
    state, table = control_state(settings), quality_summaries
    query = sa.select(table.c.key, table.c.made_of, sa.cast(table.c.summary, sa.Text).label("summary"))
    query = query.order_by(table.c.key).limit(_TOGETHER)

    def after(key: str) -> Sequence[sa.Row[Any]]:
        return state.read_beats(lambda connection: connection.execute(query.where(table.c.key > key)).all())

    # Another version's, or torn by a power cut.
    with contextlib.suppress(sa.exc.DBAPIError):
        rows = after("")
        while rows:
            for row in rows:
                with contextlib.suppress(ValueError):
                    yield row.made_of, _SUMMARY.validate_json(row.summary)
            rows = after(rows[-1].key)


def _keep(settings: Settings, summary: PartitionSummary, made_of: str) -> None:
    table = quality_summaries

    def write(connection: sa.Connection) -> None:
        connection.execute(table.delete().where(table.c.key == summary.key))
        connection.execute(table.insert().values(key=summary.key, made_of=made_of, summary=asdict(summary)))

    control_state(settings).beat(write)
