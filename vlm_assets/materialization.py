"""One materialization of one partition: verify or resume, work, stage, check, publish, in that order.

What lives here: the order, which both partitioned assets share. What does not: what a row is and how it is
made (``descriptions.py``, ``embeddings.py``), or how bytes become durable (``resources``). The order of the
check results is the point: failing results first and then the error leaves a failed check with its
partition, a failed partition, and the old file in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from resources.journal.high_water_mark import read_mark
from resources.journal.journal import Journal, clear_retired
from resources.parquet_io import AlreadyPublished
from resources.published import PublishedPartitions
from resources.published_errors import CannotRestoreError
from resources.published_record import PublishedRecord
from resources.staged_file import StagedFile
from resources.workers import Phase, WorkerBeat, Workers
from vlm_assets.check_events import check_result
from vlm_assets.checks import CheckOutcome
from vlm_assets.fingerprint import Fingerprint
from vlm_assets.progress import Progress

Metadata = dict[str, dg.MetadataValue]
Event = dg.Output[StagedFile | AlreadyPublished] | dg.AssetCheckResult

OK = "ok"


class RunOptions(dg.Config):
    """What a person may ask of a materialization in the launchpad. Without it, finished work is kept.

    recompute: compute every property of the partition again, beside the old output, which stays until all
    is done. retry_failed: try the properties that ended as failed once more, and keep all others.
    """

    recompute: bool = False
    retry_failed: bool = False


class ManyPartitionsError(ValueError):
    """A run was asked for several partitions at once."""


class ConflictingOptionsError(ValueError):
    """Run options that exclude each other."""


@dataclass(frozen=True)
class Partition:
    """What is to come out: one row for each expected id, in the order of the catalogue.

    directory: the asset's folder. state_directory: where high-water marks are kept, apart from it.
    """

    asset: str
    key: str
    expected_ids: tuple[str, ...]
    fingerprint: Fingerprint
    directory: Path
    state_directory: Path
    commit_seconds: float
    commit_rows: int

    def journal_directory(self, generation: str) -> Path:
        """Where the work under way of a generation lies."""
        return self.directory / ".journal" / self.key / generation

    def high_water_mark(self, generation: str) -> Path:
        """The file of a generation's high-water mark."""
        return self.state_directory / "high_water_marks" / self.asset / self.key / f"{generation}.json"

    def open_journal(self, generation: str, schema: pa.Schema, *, accept_loss: str | None = None) -> Journal:
        """Open a generation's journal: recover and verify it. Raises JournalError.

        accept_loss: what a person said who gives up rows that cannot be restored.
        """
        return Journal.open(
            self.journal_directory(generation),
            key=self.key,
            generation=generation,
            fingerprints=dict(self.fingerprint.parts),
            schema=schema,
            expected_ids=self.expected_ids,
            high_water_mark=self.high_water_mark(generation),
            quarantine=self.directory / ".quarantine",
            accept_loss=accept_loss,
            commit_seconds=self.commit_seconds,
            commit_rows=self.commit_rows,
        )


@dataclass(frozen=True)
class Steps:
    """What an asset does in its materialization.

    schema: of the rows; asked for only where there is work. work: compute the missing rows and submit them
    to the journal; returns metadata about how it went. check: run the checks on a file. describe: metadata
    for people about the finished file.
    """

    schema: Callable[[], pa.Schema]
    work: Callable[[Journal, Progress], Metadata]
    check: Callable[[Path], Sequence[CheckOutcome]]
    describe: Callable[[Path], Metadata]


def one_partition(context: dg.AssetExecutionContext) -> str:
    """The key of this run's one partition. Raises ManyPartitionsError for a run over a range of them."""
    keys: Sequence[str] = context.partition_keys
    if len(keys) != 1:
        raise ManyPartitionsError(
            f"This run was launched for {len(keys)} partitions at once. A partition is a run of its own here,"
            " so that one can fail, wait or be resumed without the others: launch a backfill without the"
            " option 'single run'."
        )
    return keys[0]


def materialize(
    context: dg.AssetExecutionContext, partition: Partition, options: RunOptions, steps: Steps
) -> Iterator[Event]:
    """Bring one partition to its published state, or end with an error that says what to do.

    Yields the Output and the check results in the order that Dagster's pages need.
    """
    workers = Workers(partition.state_directory / "workers")
    with workers.begin(
        run_id=context.run.run_id,
        asset=partition.asset,
        partition=partition.key,
        expected=len(partition.expected_ids),
    ) as beat:
        yield from _materialize(context, partition, options, steps, beat)


def _materialize(
    context: dg.AssetExecutionContext,
    partition: Partition,
    options: RunOptions,
    steps: Steps,
    beat: WorkerBeat,
) -> Iterator[Event]:
    if options.recompute and options.retry_failed:
        raise ConflictingOptionsError("recompute computes every row again, failed ones too: set only one.")
    published = PublishedPartitions(partition.directory)
    record = published.record(partition.key)
    generation = _generation(context, partition, options, record)
    if record is not None and _is_current(record, partition, generation, options):
        yield from _verify(context, published, record, partition, steps)
        return
    schema = steps.schema()
    with partition.open_journal(generation, schema) as journal:
        context.log.info(journal.recovery.sentence())
        how = _restored(journal)
        if options.retry_failed:
            kept = _keep_ok_rows(journal, generation, schema, partition, published, record)
            how["kept rows"] = dg.MetadataValue.int(kept)
        restored = journal.committed_rows
        beat.resume(restored=restored)
        progress = Progress(
            context, expected=len(partition.expected_ids), restored=restored, journal=journal, beat=beat
        )
        progress.report()
        if journal.missing_ids:
            how |= steps.work(journal, progress)
            journal.flush()
            progress.report()
        beat.enter(Phase.PUBLISHING)
        staged = published.stage(
            partition.key,
            journal.read_ordered(),
            schema,
            expected_ids=partition.expected_ids,
            fingerprint=partition.fingerprint.digest,
            metadata={"generation": generation, "parts": dict(partition.fingerprint.parts)},
        )
        with staged:
            outcomes = steps.check(staged.path)
            results = [check_result(partition.asset, outcome) for outcome in outcomes]
            if any(outcome.stops_publication for outcome in outcomes):
                yield from results
                raise _refused(partition, outcomes, stays=record is not None)
            yield dg.Output(staged, metadata=steps.describe(staged.path) | how)
        # The IO manager has published the file and read both copies back: the journal has done its work.
        journal.retire()
    yield from results


def _generation(
    context: dg.AssetExecutionContext,
    partition: Partition,
    options: RunOptions,
    record: PublishedRecord | None,
) -> str:
    if options.recompute or options.retry_failed:
        run: dg.DagsterRun = context.run
        return partition.fingerprint.generation(run.get_root_run_id() or run.run_id)
    generation = partition.fingerprint.generation()
    if record is not None and record.fingerprint != partition.fingerprint.digest:
        # Back to settings whose output was published once and replaced since: that generation is closed, so
        # this is another one, named by what it replaces so that a crash resumes it.
        mark = read_mark(partition.high_water_mark(generation), key=partition.key, generation=generation).mark
        if mark is not None and mark.retired:
            return f"{generation}-after-{record.sequence}"
    return generation


def _is_current(record: PublishedRecord, partition: Partition, generation: str, options: RunOptions) -> bool:
    if record.fingerprint != partition.fingerprint.digest:
        return False
    # A run retry of a recomputation that was already published must not compute it a third time.
    asked_again = options.recompute or options.retry_failed
    return not asked_again or record.metadata.get("generation") == generation


def _verify(
    context: dg.AssetExecutionContext,
    published: PublishedPartitions,
    record: PublishedRecord,
    partition: Partition,
    steps: Steps,
) -> Iterator[Event]:
    """A complete partition: read every byte, put back what is damaged, run the checks, change nothing."""
    verification = published.verify(partition.key, deep=True)
    said = verification.sentence()
    if not verification.ok:
        context.log.warning(said)
        try:
            restored = published.restore(partition.key)
        except CannotRestoreError as error:
            raise dg.Failure(
                f"{error} To compute it again, materialize this partition with `recompute: true`.",
                allow_retries=False,
            ) from error
        said = " ".join((said, *restored.notes))
    _finish_retirement(published, record, partition)
    context.log.info(f"{said} Complete and unchanged: no device was needed.")
    file = published.path(partition.key)
    outcomes = steps.check(file)
    results = [check_result(partition.asset, outcome) for outcome in outcomes]
    if any(outcome.stops_publication for outcome in outcomes):
        yield from results
        raise _refused(partition, outcomes, stays=True)
    metadata: Metadata = {"verified": dg.MetadataValue.text(f"{said} No device was needed.")}
    yield dg.Output(AlreadyPublished(record), metadata=steps.describe(file) | metadata)
    yield from results


def _finish_retirement(published: PublishedPartitions, record: PublishedRecord, partition: Partition) -> None:
    """Retire the journal of a published file where a crash came between publication and retirement."""
    generation = str(record.metadata["generation"])
    directory = partition.journal_directory(generation)
    if not directory.is_dir() or clear_retired(directory, partition.high_water_mark(generation)):
        return
    with partition.open_journal(generation, published.read(partition.key).schema) as journal:
        journal.retire()


def _keep_ok_rows(
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
    donors = partition.directory / ".journal" / partition.key
    for donor in sorted(donors.glob(f"{partition.fingerprint.digest}*")):
        if donor.name != generation and not clear_retired(donor, partition.high_water_mark(donor.name)):
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


def _restored(journal: Journal) -> Metadata:
    recovery = journal.recovery
    return {
        "restored": dg.MetadataValue.text(recovery.sentence()),
        "restored rows": dg.MetadataValue.int(recovery.rows),
    }


def _refused(partition: Partition, outcomes: Sequence[CheckOutcome], *, stays: bool) -> dg.Failure:
    stopping = [outcome for outcome in outcomes if outcome.stops_publication]
    old = "The file published before stays in place." if stays else "No file was there before."
    findings = " ".join(f"{outcome.name}: {outcome.sentence()}" for outcome in stopping)
    return dg.Failure(
        f"Partition {partition.key} of {partition.asset} is not published. {findings} {old}"
        " The finished rows are kept and will not be computed again.",
        metadata={outcome.name: outcome.sentence() for outcome in stopping},
        allow_retries=False,
    )
