"""Which generation a materialization works at, and which finished rows it takes from others.

What lives here: the generation's name, the round in which failed rows are computed again, and the rows that
are kept. What does not: the order of a materialization (``materialization.py``), how often a row is tried
(``resources/state/row_retries.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from resources.engine.failure_kinds import TRANSIENT_KINDS
from resources.journal.high_water_mark import read_mark
from resources.journal.journal import Journal, clear_retired
from resources.publishing.published import PublishedPartitions
from resources.publishing.record import PublishedRecord
from resources.state.row_retries import RowRetries

if TYPE_CHECKING:
    from vlm_assets.assets.materialize import RunOptions
    from vlm_assets.assets.partition import Partition

OK = "ok"
_AFTER = "-after-"


def root_run_of(context: dg.AssetExecutionContext) -> str:
    """The run of which this one is a retry, or itself: what a crashed run had begun is gone on with."""
    run: dg.DagsterRun = context.run
    return run.get_root_run_id() or run.run_id


def generation_of(
    partition: Partition, options: RunOptions, record: PublishedRecord | None, root_run: str
) -> str:
    """The name of the generation under these settings; one of its own for what a person asks anew."""
    asked = options.recompute or options.retry_failed
    generation = partition.fingerprint.generation(root_run if asked else None)
    if record is not None and (asked or record.fingerprint != partition.fingerprint.digest):
        published = str(record.metadata.get("generation"))
        if published == generation or published.startswith(f"{generation}{_AFTER}"):
            return published
        # Back to settings whose output was published once and replaced since, or an old run with an option
        # is re-executed: that generation is closed, so this is another one, named by what it replaces so
        # that a crash resumes it.
        mark = read_mark(
            partition.paths.high_water_mark(generation), key=partition.key, generation=generation
        ).mark
        if mark is not None and mark.retired:
            return f"{generation}{_AFTER}{record.sequence}"
    return generation


def round_of(
    context: dg.AssetExecutionContext,
    partition: Partition,
    options: RunOptions,
    generation: str,
    schema: pa.Schema,
) -> RowRetries:
    """The round that this run works at: the one under way, a new one where that is asked for, or the first.

    A new round is written down before it begins; the run retries of the run that began it resume it.
    """
    root_run = root_run_of(context)
    fingerprint = partition.fingerprint
    first = RowRetries(fingerprint.digest, generation, root_run)
    if options.recompute or options.retry_failed:
        return first
    standing, damage = partition.row_retries.read_or_set_aside()
    if damage is not None:
        context.log.warning(damage)
    if standing is None or standing.fingerprint != fingerprint.digest:
        return first
    journals = (partition.paths.journal(one) for one in (standing.generation, standing.source) if one)
    if not any(journal.is_dir() for journal in journals):
        return first
    refusal = standing.refusal
    if not options.retry_transient or refusal is None or not refusal.curable:
        return standing
    if standing.root_run == root_run:
        return standing
    with partition.open_journal(standing.generation, schema) as journal:
        failed = _failed_of(journal.read_ordered())
    begun = standing.next_round(
        fingerprint.generation(root_run), root_run, standing.curable(failed, TRANSIENT_KINDS)
    )
    partition.row_retries.write(begun)
    return begun


def keep_rows_of_source(
    journal: Journal, retries: RowRetries, partition: Partition, schema: pa.Schema
) -> int:
    """Take the rows that the round does not compute anew; interrupted, it is simply done again."""
    if retries.source is None or not journal.missing_ids - set(retries.again):
        return 0
    kept = 0
    again = pa.array(retries.again, pa.string())
    with partition.open_journal(retries.source, schema) as source:
        for batch in source.read_ordered():
            missing = pa.array(sorted(journal.missing_ids), pa.string())
            taken = pc.and_not(
                pc.is_in(batch["property_id"], value_set=missing),
                pc.is_in(batch["property_id"], value_set=again),
            )
            rows = pa.Table.from_batches([batch]).filter(taken)
            journal.submit(rows)
            kept += rows.num_rows
    journal.flush()
    return kept


def keep_ok_rows(
    journal: Journal,
    generation: str,
    schema: pa.Schema,
    partition: Partition,
    published: PublishedPartitions,
    record: PublishedRecord | None,
) -> int:
    """Take the ok rows that finished work of the same fingerprint has, published or refused by a check.

    Interrupted, it is simply done again: only rows that are missing are taken.
    """
    kept = 0
    donors = partition.paths.journals
    for donor in sorted(donors.glob(f"{partition.fingerprint.digest}*")):
        if donor.name != generation and not clear_retired(donor, partition.paths.high_water_mark(donor.name)):
            with partition.open_journal(donor.name, schema) as finished:
                kept += _submit_ok_rows(journal, finished.read_ordered())
    if record is not None and record.fingerprint == partition.fingerprint.digest:
        kept += _submit_ok_rows(journal, published.read(partition.key).iter_batches())
    journal.flush()
    return kept


def _submit_ok_rows(journal: Journal, batches: Iterable[pa.RecordBatch]) -> int:
    submitted = 0
    for batch in batches:
        missing = pa.array(sorted(journal.missing_ids), pa.string())
        rows = pa.Table.from_batches([batch]).filter(
            pc.and_(pc.equal(batch["status"], OK), pc.is_in(batch["property_id"], value_set=missing))
        )
        journal.submit(rows)
        submitted += rows.num_rows
    journal.flush()
    return submitted


def failed_rows(file: Path) -> list[tuple[str, str | None]]:
    """The failed rows of a staged file: id and kind."""
    wanted = [name for name in ("property_id", "status", "error_kind") if name in pq.read_schema(file).names]
    return _failed_of(pq.read_table(file, columns=wanted).to_batches())


def _failed_of(batches: Iterable[pa.RecordBatch]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for batch in batches:
        failed = batch.filter(pc.not_equal(batch["status"], OK))
        ids = failed["property_id"].to_pylist()
        kinds = failed["error_kind"].to_pylist() if "error_kind" in failed.schema.names else [None] * len(ids)
        found += zip(ids, kinds, strict=True)
    return found
