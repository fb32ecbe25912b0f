"""The quality of the published descriptions: what they say, where they are odd, how far they are right.

What lives here: a summary of each published partition, which is kept so that a look reads only what is new,
and what follows from all of them. What does not: Dagster's side (``automation/dataset_quality.py``), the
picture (``automation/dataset_quality.py``), whether the rows are whole (``audit.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sqlalchemy as sa

from resources.engine.schema import DescriptionSchema, load_schema, same
from resources.publishing.published import PublishedPartitions
from resources.publishing.publishing_errors import RecordDamagedError
from resources.state.tables import quality_summaries
from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.operate.terminal import CommandError
from vlm_assets.resource_settings import control_state
from vlm_assets.settings import Settings
from vlm_assets.truth import Descriptions, Share, read_truth, wilson

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

Kind = Literal["values", "numbers", "texts"]


@dataclass(frozen=True)
class FieldSummary:
    """What the ok rows say in one field. counts: of a text only those that come twice or more in a partition.

    right, judged: of the properties in the truth file.
    """

    kind: Kind
    nulls: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    right: int = 0
    judged: int = 0


@dataclass(frozen=True)
class PartitionSummary:
    """One published partition. published_at: as its record has it. failed: rows by kind."""

    key: str
    published_at: str
    ok: int
    failed: Mapping[str, int]
    fields: Mapping[str, FieldSummary]
    contradictions: Mapping[str, int] = field(default_factory=dict)
    """How many descriptions contradict themselves, by the name of the contradiction."""


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
    """The whole. unread: partitions whose record or file does not read; the audit says more of them."""

    partitions: tuple[PartitionSummary, ...]
    fields: Mapping[str, FieldSummary]
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
    asked = digest_of([schema.digest, dict(conditions), str(sorted(truth.items()))])
    kept = _Kept(settings)
    before = kept.read()
    summaries, unread = list[PartitionSummary](), list[str]()
    published = PublishedPartitions(settings.descriptions)
    there = frozenset(settings.descriptions.published_keys())
    for key in (one.key for one in catalog.ranges if one.key in there):
        try:
            # Each publication is a new file, so that its record is read no more often than its rows.
            file = published.path(key).stat()
            made_of = f"{file.st_ino} {file.st_size} {file.st_mtime_ns} {asked}"
            known = before.get(key)
            if known is not None and known[0] == made_of:
                summaries.append(known[1])
                continue
            record = published.record(key)
            if record is None:
                continue
            summary = summarize(
                published.path(key), schema, key, record.published_at, conditions=conditions, truth=truth
            )
            kept.write(summary, made_of)
            summaries.append(summary)
        except (RecordDamagedError, OSError, pa.ArrowException) as error:
            unread.append(f"{key}: {error}")
    return judge(summaries, unread, path_of=published.path, conditions=conditions)


def judge(
    summaries: Sequence[PartitionSummary],
    unread: Sequence[str] = (),
    *,
    path_of: Callable[[str], Path] | None = None,
    conditions: Mapping[str, str] = MappingProxyType({}),
) -> Quality:
    """What follows from the summaries. path_of: the file of a partition, from which examples are taken."""
    fields = _merged(summaries)
    failed: Counter[str] = Counter()
    for one in summaries:
        failed.update(one.failed)
    ok = sum(one.ok for one in summaries)
    findings = [
        *_odd_answers(fields, ok),
        *_odd_partitions(summaries, path_of),
        *_contradictions(summaries, path_of, conditions),
    ]
    return Quality(tuple(summaries), fields, ok, dict(failed), tuple(findings), tuple(unread))


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
        plain = _without_null(one)
        if described.type.get_field_index(name) < 0:
            continue  # Made with an earlier schema.
        column = described.field(name)
        if "properties" in plain and pa.types.is_struct(column.type):
            yield from _columns(plain, column, f"{above}{name}.")
        else:
            yield f"{above}{name}", _kind(plain), column


def _without_null(node: Mapping[str, Any]) -> Mapping[str, Any]:
    others = [one for one in node.get("anyOf", ()) if one.get("type") != "null"]
    return others[0] if len(others) == 1 else node


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


def _merged(summaries: Sequence[PartitionSummary]) -> dict[str, FieldSummary]:
    merged: dict[str, FieldSummary] = {}
    counts: dict[str, Counter[str]] = {}
    for summary in summaries:
        for name, one in summary.fields.items():
            counts.setdefault(name, Counter()).update(one.counts)
            known = merged.get(name, FieldSummary(one.kind))
            merged[name] = FieldSummary(
                one.kind,
                known.nulls + one.nulls,
                {},
                known.right + one.right,
                known.judged + one.judged,
            )
    return {
        name: FieldSummary(one.kind, one.nulls, dict(counts[name].most_common()), one.right, one.judged)
        for name, one in merged.items()
    }


def _odd_answers(fields: Mapping[str, FieldSummary], ok: int) -> Iterator[Suspicion]:
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
            yield Suspicion("answers", name, f"{count:,} descriptions have the same {name}: {value!r}.")


def _odd_partitions(
    summaries: Sequence[PartitionSummary], path_of: Callable[[str], Path] | None
) -> Iterator[Suspicion]:
    """Partitions whose answers in a field are others than everywhere else, beyond chance and by far."""
    from scipy.stats import chi2

    tested: list[tuple[float, float, PartitionSummary, str, str]] = []
    names = list(dict.fromkeys(name for one in summaries for name in one.fields))
    for name in [*names, FAILURE]:
        of = [(one, _distribution(one, name)) for one in summaries]
        of = [(one, counts) for one, counts in of if sum(counts.values()) >= _ENOUGH_ROWS // 2]
        values = sorted({value for _, counts in of for value in counts})
        if len(of) < 3 or len(values) < 2:
            continue
        table = np.array([[counts.get(value, 0) for value in values] for _, counts in of], float)
        rest = table.sum(axis=0) - table
        rows, others = table.sum(axis=1, keepdims=True), rest.sum(axis=1, keepdims=True)
        expected = (table + rest) * rows / (rows + others)
        beside = (table + rest) * others / (rows + others)
        # Too few to tell by: they add nothing to the sum.
        enough = expected >= 5
        squares = np.where(enough, (table - expected) ** 2 / np.maximum(expected, 1e-9), 0.0)
        squares += np.where(enough, (rest - beside) ** 2 / np.maximum(beside, 1e-9), 0.0)
        chances = chi2.sf(squares.sum(axis=1), np.maximum(enough.sum(axis=1) - 1, 1))
        differences = table / rows - rest / others
        distances = np.abs(differences).sum(axis=1) / 2
        for number, (one, _) in enumerate(of):
            most = values[int(differences[number].argmax())]
            tested.append((float(chances[number]), float(distances[number]), one, name, most))
    tested.sort(key=lambda one: one[0])
    last = max(
        (rank for rank, one in enumerate(tested, 1) if one[0] <= _ERROR_RATE * rank / len(tested)), default=0
    )
    whole: dict[str, Counter[str]] = {}
    for number, (_, distance, summary, name, most) in enumerate(
        sorted(tested[:last], key=lambda one: -one[1])
    ):
        if distance < LOOKED_LIKE:
            break
        if name not in whole:
            whole[name] = Counter()
            for one in summaries:
                whole[name].update(_distribution(one, name))
        counts = _distribution(summary, name)
        here, all_here, everywhere = counts[most], sum(counts.values()), whole[name].total()
        elsewhere = (whole[name][most] - here) / max(1, everywhere - all_here)
        yield Suspicion(
            "alike",
            name,
            f"In {summary.key}, {name} is {most!r} in {here / all_here:.0%} of the properties, elsewhere in"
            f" {elsewhere:.0%}.",
            summary.key,
            _examples(path_of, summary.key, name, most) if number < _WITH_EXAMPLES else (),
        )


def _distribution(summary: PartitionSummary, name: str) -> Mapping[str, int]:
    if name == FAILURE:
        return {**summary.failed, "ok": summary.ok}
    one = summary.fields.get(name)
    if one is None or one.kind == "texts":
        return {}
    return {**one.counts, "null": one.nulls} if one.nulls else one.counts


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
    summaries: Sequence[PartitionSummary],
    path_of: Callable[[str], Path] | None,
    conditions: Mapping[str, str],
) -> Iterator[Suspicion]:
    counts: Counter[str] = Counter()
    for one in summaries:
        counts.update(one.contradictions)
    for name, count in counts.items():
        if count:
            examples: list[str] = []
            for one in summaries:
                if path_of is None or len(examples) >= _SHOWN_IDS:
                    break
                if one.contradictions.get(name):
                    table = pq.read_table(path_of(one.key), columns=["property_id", "status", "description"])
                    ok = table.filter(pc.equal(table["status"], "ok"))
                    examples += _contradicting(ok, {name: conditions[name]})[name]
            said = f"{count:,} descriptions contradict themselves: {name}."
            yield Suspicion("consistent", name, said, None, tuple(examples[:_SHOWN_IDS]))


def forget_summaries(settings: Settings, keys: Collection[str]) -> None:
    """Forget what was kept of partitions: it may name properties that are withdrawn."""
    table = quality_summaries
    control_state(settings).beat(
        lambda connection: connection.execute(table.delete().where(table.c.key.in_(list(keys))))
    )


class _Kept:
    """The summaries of earlier looks, in the control state's part that may be lost: they are made again."""

    def __init__(self, settings: Settings) -> None:
        self._state = control_state(settings)

    def read(self) -> dict[str, tuple[str, PartitionSummary]]:
        table = quality_summaries
        try:
            rows = self._state.read_beats(
                lambda connection: connection.execute(
                    sa.select(table.c.key, table.c.made_of, table.c.summary)
                ).all()
            )
            return {key: (made_of, _summary(said)) for key, made_of, said in rows}
        except (ValueError, KeyError, TypeError, AttributeError, sa.exc.DBAPIError):
            return {}  # Another version's, or torn by a power cut.

    def write(self, summary: PartitionSummary, made_of: str) -> None:
        table = quality_summaries

        def write(connection: sa.Connection) -> None:
            connection.execute(table.delete().where(table.c.key == summary.key))
            connection.execute(
                table.insert().values(key=summary.key, made_of=made_of, summary=asdict(summary))
            )

        self._state.beat(write)


def _summary(said: Mapping[str, Any]) -> PartitionSummary:
    fields = {name: FieldSummary(**one) for name, one in said["fields"].items()}
    return PartitionSummary(**{**said, "fields": fields})
