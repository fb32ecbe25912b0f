"""Asset checks: what must hold for a partition before it is published, and how Dagster shows the outcome.

The checks are plain functions over the staged file, counted by DuckDB. Their partitioned specs are made here
alone, because that API of Dagster's is a preview. When the checks run and what a failure stops is in
``materialize.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from resources.dagster_names import EXPECTED, FINDING, FOUND, WHAT_TO_DO
from vlm_assets.assets.row_counts import FIRST, Counted, RowsFile, count_rows
from vlm_catalog.ranges import DESCRIPTIONS, EMBEDDINGS
from vlm_durable.commands import command
from vlm_durable.journal.segments import is_later
from vlm_durable.markdown_text import sentence
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.partition_files import PUBLISHED_FILE
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import Verification
from vlm_durable.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    import duckdb

Severity = dg.AssetCheckSeverity
"""WARN is shown and never stops a partition; ERROR keeps it from being published."""

DESCRIPTION_CHECKS = {
    "ids_conserved": "Every property of the range comes out exactly once: ids in = ok and failed ids.",
    "row_count": "The file has as many rows as the catalogue has properties in this range.",
    "unique_ids": "No property has two rows.",
    "row_schema": "Columns and types are those of the description schema in the settings.",
    "images_used": "Every image that can be read was shown to the model; VLM_ASSETS_MAX_IMAGES is the limit.",
    "failed_share": "The share of properties that could not be described stays under the limits.",
}

WHERE_CHECKS = {
    "where_holds": "Every property for which the set's `where` holds was asked, and no other.",
}
"""The check of a question set that has a condition."""

EMBEDDING_CHECKS = {
    "ids_conserved": DESCRIPTION_CHECKS["ids_conserved"],
    "row_count": DESCRIPTION_CHECKS["row_count"],
    "unique_ids": DESCRIPTION_CHECKS["unique_ids"],
    "row_schema": "Columns and types are those of the embeddings, with one width for all.",
    "vectors_sound": "Every vector is finite, not zero, and they are not all alike.",
    "matches_descriptions": "Row for row the same property and status as the published descriptions.",
}

_OF_EVERY_ASSET = {
    PUBLISHED_FILE: (
        "The file on disk is what was published last, of today's catalogue and settings. Looked at when a"
        " materialization ends, and by the sensor published_file_drift whenever the file changes."
    )
}


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one check: expected and actual, with the first offending ids or the finding on disk."""

    name: str
    passed: bool
    expected: str
    actual: str
    severity: Severity = Severity.ERROR
    first_ids: tuple[str, ...] = ()
    next_step: str = ""
    finding: FindingKind | None = None

    @property
    def stops_publication(self) -> bool:
        """Whether the partition must not be published."""
        return not self.passed and self.severity is Severity.ERROR

    def sentence(self) -> str:
        """The outcome as a person reads it."""
        ids = f" First: {', '.join(repr(i) for i in self.first_ids)}." if self.first_ids else ""
        step = f" {self.next_step}" if self.next_step and not self.passed else ""
        return f"Expected {self.expected}; found {self.actual.rstrip('.')}.{ids}{step}"


@dataclass(frozen=True)
class Acceptance:
    """A person accepted this number of failed rows: as many, or fewer, only warn. at: ISO 8601."""

    rows: int = 0
    by: str = ""
    at: str = ""


NOT_ACCEPTED = Acceptance()

_WARN_SHARE = 0.01
"""A partition warns from this share of failed rows: it is more than the odd broken listing."""
_JUDGED_ROWS = 2
"""Failed rows below which the share is not judged: one broken listing is no alarm in a small partition."""


@dataclass(frozen=True)
class FailedShareLimits:
    """The share of failed rows from which a partition is not published, and what a person accepted."""

    error: float
    accepted: Acceptance = NOT_ACCEPTED

    @property
    def warn(self) -> float:
        """The share from which it warns."""
        return min(_WARN_SHARE, self.error)

    def refuse(self, failed: int, rows: int) -> bool:
        """Whether ``failed`` of ``rows`` rows keep a partition from being published."""
        return failed > self.accepted.rows and failed >= _JUDGED_ROWS and failed >= self.error * rows


def check_descriptions(
    staged: Path,
    expected_ids: Sequence[str],
    schema: pa.Schema,
    limits: FailedShareLimits,
    *,
    key: str,
    left_out: frozenset[str] | None = None,
) -> list[CheckOutcome]:
    """Run every check of DESCRIPTION_CHECKS on a staged file of the partition ``key``.

    left_out: the properties that the set's condition leaves out; None: it has none. Else those of
    WHERE_CHECKS too.
    """
    import duckdb  # Checked in a run, not where definitions load.

    row_counts = _count(key, expected_ids, {DESCRIPTIONS: staged})
    with duckdb.connect() as connection:
        connection.from_parquet(str(staged)).create_view("staged")
        shape = _row_schema(staged, schema)
        return [
            *_conservation(
                row_counts, (DESCRIPTIONS, key), len(expected_ids), may_leave_out=left_out is not None
            ),
            *([] if left_out is None else [_where_holds(connection, left_out)]),
            shape,
            _images_used(connection) if shape.passed else _not_run("images_used", "row_schema"),
            _failed_share(connection, limits, key),
        ]


def check_embeddings(
    staged: Path, expected_ids: Sequence[str], schema: pa.Schema, descriptions: Path, *, key: str
) -> list[CheckOutcome]:
    """Run every check of EMBEDDING_CHECKS on a staged file and the descriptions it was made from.

    key: of the partition.
    """
    import duckdb  # Checked in a run, not where definitions load.

    row_counts = _count(key, expected_ids, {DESCRIPTIONS: descriptions, EMBEDDINGS: staged})
    with duckdb.connect() as connection:
        connection.from_parquet(str(descriptions)).create_view("described")
        shape = _row_schema(staged, schema)
        return [
            *_conservation(row_counts, (EMBEDDINGS, key), len(expected_ids)),
            shape,
            _vectors_sound(connection, staged) if shape.passed else _not_run("vectors_sound", "row_schema"),
            _matches_descriptions(row_counts, (EMBEDDINGS, key)),
        ]


def _count(key: str, expected_ids: Sequence[str], files: Mapping[str, Path]) -> Counted:
    ids = pa.array(expected_ids, pa.string())
    expected = pa.table(
        {"key": pa.repeat(key, len(ids)), "ordinal": pa.nulls(len(ids), pa.int64()), "property_id": ids}
    )
    rows_files = [RowsFile(asset, key, path) for asset, path in files.items()]
    return count_rows([expected], rows_files)


def _ids(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[int, tuple[str, ...]]:
    """How many ids a query yields, and the first few of them."""
    count = connection.sql(f"SELECT count(*) FROM ({query})").fetchall()[0][0]  # noqa: S608 (own constants)
    first = connection.sql(f"{query} ORDER BY 1 LIMIT {FIRST}").fetchall() if count else []
    return count, tuple(row[0] for row in first)


def _conservation(
    counts_of: Counted, file: tuple[str, str], expected: int, *, may_leave_out: bool = False
) -> Iterator[CheckOutcome]:
    again = f"Materialize the partition again; if it repeats, run {command('status')} and keep the journal."
    counts = counts_of.counts.get(file)
    if counts is None:
        for name in ("ids_conserved", "row_count", "unique_ids"):
            why = counts_of.uncounted.get(file, "no rows")
            yield CheckOutcome(name, passed=False, expected="rows that can be counted", actual=why)
        return
    unsettled = counts.unsettled + (0 if may_leave_out else counts.not_asked)
    allowed, other = "ok or failed", "neither ok nor failed"
    if may_leave_out:
        allowed, other = "ok, failed or not asked", "none of these"
    yield CheckOutcome(
        "ids_conserved",
        passed=not (counts.missing or counts.foreign or unsettled),
        expected=f"the {counted(expected, 'ids')} of the catalogue, each {allowed}",
        actual=f"{counts.missing} missing, {counts.foreign} foreign, {unsettled} {other}",
        first_ids=counts.first_ids,
        next_step=again,
    )
    yield CheckOutcome(
        "row_count",
        passed=counts.rows == expected,
        expected=counted(expected, "rows"),
        actual=str(counts.rows),
        next_step=again,
    )
    yield CheckOutcome(
        "unique_ids",
        passed=not counts.duplicate,
        expected="no id twice",
        actual=f"{counts.duplicate} repeated",
        first_ids=counts.first_ids,
        next_step=again,
    )


def _row_schema(staged: Path, schema: pa.Schema) -> CheckOutcome:
    columns = pq.read_schema(staged)
    differences = [
        f"{field.name}: {columns.field(field.name).type if field.name in columns.names else 'not there'}"
        f" where {field.type} belongs"
        for field in schema
        if (
            columns.field(field.name).type != field.type
            if field.name in columns.names
            else not is_later(field)
        )
    ]
    differences += [f"{name}: unknown column" for name in columns.names if name not in schema.names]
    return CheckOutcome(
        "row_schema",
        passed=not differences,
        expected=f"{counted(len(schema), 'columns')} of the known types",
        actual="; ".join(differences[:FIRST]) or "these",
        next_step="Another description schema needs its own generation: materialize with recompute: true.",
    )


def _failed_share(connection: duckdb.DuckDBPyConnection, limits: FailedShareLimits, key: str) -> CheckOutcome:
    # A withdrawn property is no failure. One that is not asked counts: a condition may ask few, or only those
    # that failed before.
    connection.sql("CREATE VIEW tried AS SELECT * FROM staged WHERE error_kind IS DISTINCT FROM 'withdrawn'")
    rows = connection.sql("SELECT count(*) FROM tried").fetchall()[0][0]
    failed, first = _ids(connection, "SELECT property_id FROM tried WHERE status = 'failed'")
    kinds = connection.sql(
        "SELECT error_kind, count(*) FROM tried WHERE status = 'failed' GROUP BY 1 ORDER BY 2 DESC, 1"
    ).fetchall()
    share = failed / rows if rows else 0.0
    judged = failed >= _JUDGED_ROWS
    by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds)
    accepted, refused = limits.accepted, limits.refuse(failed, rows)
    next_step = (
        f"{command('show', 'ID')} shows one of them. To try them again: put missing or damaged images back,"
        f" then {command('run', key) if refused else command('repair', '--failed')}."
    )
    if refused:
        next_step += f" To publish it as it is, this once: {command('run', key, '--accept-failed')}."
    return CheckOutcome(
        "failed_share",
        passed=not (judged and share >= limits.warn),
        severity=Severity.ERROR if refused else Severity.WARN,
        expected=(
            f"under {limits.warn:.1%} failed (not published from {limits.error:.0%}, VLM_ASSETS_FAILED_SHARE)"
        ),
        actual=f"{failed} of {rows} failed, {share:.1%}"
        + (f" ({by_kind})" if by_kind else "")
        + (f"; {accepted.by} accepted {accepted.rows} at {accepted.at}" if accepted.rows else ""),
        first_ids=first,
        next_step=next_step,
    )


def _where_holds(connection: duckdb.DuckDBPyConnection, left_out: frozenset[str]) -> CheckOutcome:
    connection.register("left_out", pa.table({"property_id": pa.array(left_out, pa.string())}))
    differing, first = _ids(
        connection,
        "SELECT staged.property_id FROM staged"
        " LEFT JOIN left_out ON staged.property_id = left_out.property_id"
        " WHERE (status = 'not_asked') IS DISTINCT FROM (left_out.property_id IS NOT NULL)",
    )
    return CheckOutcome(
        "where_holds",
        passed=not differing,
        expected=f"{counted(len(left_out), 'properties')} left out by `where`, and all others asked",
        actual=f"{counted(differing, 'properties')} otherwise",
        first_ids=first,
        next_step="Materialize the partition again: it looks at the answers that are published then.",
    )


def _images_used(connection: duckdb.DuckDBPyConnection) -> CheckOutcome:
    cut, first = _ids(
        connection, "SELECT property_id FROM staged WHERE status = 'ok' AND len(images_not_used) > 0"
    )
    images = connection.sql(
        "SELECT coalesce(sum(len(images_not_used)), 0) FROM staged WHERE status = 'ok'"
    ).fetchall()[0][0]
    return CheckOutcome(
        "images_used",
        passed=not cut,
        severity=Severity.WARN,
        expected="all readable images of every described property to be shown to the model",
        actual=f"{counted(images, 'images')} of {counted(cut, 'properties')} not",
        first_ids=first,
        next_step=(
            "The column `images_not_used` lists them, and `images_not_used_reason` says why. If the"
            " model should see them, raise VLM_ASSETS_MAX_IMAGES, or lower VLM_ASSETS_MAX_PIXELS where they"
            " did not fit: that makes the partition stale, and `recompute: true` computes it again."
        ),
    )


def _vectors_sound(connection: duckdb.DuckDBPyConnection, staged: Path) -> CheckOutcome:
    unsound: list[str] = []
    vectors = 0
    alike = True
    first_vector: np.ndarray | None = None
    rows = PartitionRows(staged)
    width = rows.schema.field("embedding").type.list_size
    for batch in rows.iter_batches(["property_id", "embedding", "status"]):
        described = batch.filter(pc.equal(batch["status"], "ok"))
        present = described.filter(described["embedding"].is_valid())
        absent = described.filter(described["embedding"].is_null())
        unsound += absent["property_id"].to_pylist()
        matrix = present["embedding"].flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
        good = np.isfinite(matrix).all(axis=1) & (np.abs(matrix).sum(axis=1) > 0)
        unsound += present["property_id"].filter(pa.array(~good)).to_pylist()
        vectors += len(matrix)
        if len(matrix):
            first_vector = matrix[0] if first_vector is None else first_vector
            alike = alike and bool((matrix == first_vector).all())
    # Descriptions that are alike have vectors that are alike, and that is right.
    differing = connection.sql(
        "SELECT min(hash(description)) <> max(hash(description)) FROM described WHERE status = 'ok'"
    ).fetchall()[0][0]
    all_alike = alike and vectors > 1 and bool(differing)
    return CheckOutcome(
        "vectors_sound",
        passed=not unsound and not all_alike,
        expected=f"{vectors} finite vectors of width {width}, not zero, not all alike",
        actual="all alike, for descriptions that differ"
        if all_alike
        else f"{len(unsound)} missing, zero or not finite",
        first_ids=tuple(unsound[:FIRST]),
        next_step=(
            "The embedding model or its number format is at fault: name another model in"
            " VLM_ASSETS_EMBEDDING_MODEL, then materialize this partition."
        ),
    )


def _matches_descriptions(counts_of: Counted, file: tuple[str, str]) -> CheckOutcome:
    counts = counts_of.counts.get(file)
    if counts is None:
        return _not_run("matches_descriptions", "row_schema")
    return CheckOutcome(
        "matches_descriptions",
        passed=not counts.unlike,
        expected="the rows of the published descriptions, a vector for each that is ok",
        actual=f"{counted(counts.unlike, 'rows')} that differ",
        first_ids=counts.first_ids,
        next_step="Materialize property_descriptions and then property_embeddings of this partition.",
    )


def _not_run(name: str, because: str) -> CheckOutcome:
    return CheckOutcome(name, passed=False, expected="a readable file", actual=f"{because} failed first")


def check_specs(
    asset: dg.AssetKey, descriptions: dict[str, str], partitions: dg.PartitionsDefinition[str]
) -> list[dg.AssetCheckSpec]:
    """Blocking, inline checks of an asset, each with the asset's partitions and a sentence for people.

    With them ``published_file``, which every asset has that is published as files.
    """
    with warnings.catch_warnings():
        # Partitioned checks are a preview in Dagster 1.13; a change of that API touches this file only.
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                name, asset=asset, description=description, blocking=True, partitions_def=partitions
            )
            for name, description in (descriptions | _OF_EVERY_ASSET).items()
        ]


def check_result(asset: dg.AssetKey, outcome: CheckOutcome) -> dg.AssetCheckResult:
    """An outcome as Dagster shows it, with expected, found and the first offending ids.

    Dagster's pages read the description as markdown, and it names ids; metadata are plain text.
    """
    metadata: dict[str, str | dg.MetadataValue] = {EXPECTED: outcome.expected, FOUND: outcome.actual}
    if outcome.first_ids:
        metadata["first ids"] = dg.MetadataValue.json(list(outcome.first_ids))
    if outcome.next_step and not outcome.passed:
        metadata[WHAT_TO_DO] = outcome.next_step
    if outcome.finding is not None:
        metadata[FINDING] = outcome.finding.value
    return dg.AssetCheckResult(
        passed=outcome.passed,
        asset_key=asset,
        check_name=outcome.name,
        severity=outcome.severity,
        description=sentence(outcome.sentence()),
        metadata=metadata,
    )


def published_file_result(asset: dg.AssetKey, verification: Verification) -> dg.AssetCheckResult:
    """The result of the check of the file that is published when a materialization ends."""
    finding = verification.worst
    outcome = CheckOutcome(
        PUBLISHED_FILE,
        passed=finding is None,
        expected=verification.expected,
        actual=verification.actual,
        severity=Severity.WARN if finding is not None and finding.kind.leaves_rows_sound else Severity.ERROR,
        next_step=finding.next_step if finding is not None else "",
        finding=finding.kind if finding is not None else None,
    )
    return check_result(asset, outcome)
