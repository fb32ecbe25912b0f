"""One materialization of one partition: verify or resume, work, stage, check, publish, in that order.

What lives here: the order, which both partitioned assets share. What does not: what a row is and how it is
made (``descriptions.py``, ``embeddings.py``), or how bytes become durable (``resources``). The order of the
check results is the point: failing results first and then the error leaves a failed check with its
partition, a failed partition, and the old file in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

from resources.devices.errors import AllLeftOutError, NoDeviceFreeError
from resources.engine.failure_kinds import TRANSIENT_KINDS
from resources.engine.server.model_server import ServerOutageError
from resources.engine.server.served_model import ServerUnreachableError
from resources.journal.journal import Journal, clear_retired
from resources.journal.recovery import Recovery
from resources.publishing.errors import CannotRestoreError
from resources.publishing.parquet_io import AlreadyPublished
from resources.publishing.published import PublishedPartitions
from resources.publishing.record import PublishedRecord
from resources.publishing.staged_file import StagedFile
from resources.state.row_retries import RowRetries
from resources.state.workers import Phase, WorkerBeat, Workers
from sensors.dagster_internals.runs import NEEDS_PERSON, NO_ATTEMPT
from vlm_assets.assets.check_events import check_result, published_file_result
from vlm_assets.assets.checks import CheckOutcome
from vlm_assets.assets.garbage import GarbageOutputError
from vlm_assets.assets.images_away import ImagesAwayError
from vlm_assets.assets.partition import Partition
from vlm_assets.assets.row_rounds import (
    OK,
    failed_rows,
    generation_of,
    keep_ok_rows,
    keep_rows_of_source,
    root_run_of,
    round_of,
)
from vlm_assets.assets.run_progress import Progress
from vlm_assets.automation.pausing import PausableProgress, wait_while_paused

__all__ = ["OK", "Metadata", "RunOptions", "Steps", "materialize", "one_partition"]

Metadata = dict[str, dg.MetadataValue]
Event = dg.Output[StagedFile | AlreadyPublished] | dg.AssetCheckResult


class RunOptions(dg.Config):
    """What a person may ask of a materialization in the launchpad. Without it, finished work is kept.

    recompute: compute every property of the partition again, beside the old output, which stays until all
    is done. retry_failed: try the properties that ended as failed once more, and keep all others.
    retry_transient: of a partition that a check refused, try the failed properties again whose kind of
    failure may be gone, each three times at most; the scheduled re-materialization asks for it.
    """

    recompute: bool = False
    retry_failed: bool = False
    retry_transient: bool = False


class ManyPartitionsError(ValueError):
    """A run was asked for several partitions at once."""


class ConflictingOptionsError(ValueError):
    """Run options that exclude each other."""


class UnfinishedWorkError(RuntimeError):
    """The work came to its end without a row for every property."""


@dataclass(frozen=True)
class Steps:
    """What an asset does in its materialization.

    schema: of the rows; asked for only where there is work. work: compute the missing rows and submit them
    to the journal; returns metadata about how it went. check: run the checks on a file. describe: metadata
    for people about the finished file. remember: what the published record says of the file's rows.
    """

    schema: Callable[[], pa.Schema]
    work: Callable[[Journal, Progress], Metadata]
    check: Callable[[Path], Sequence[CheckOutcome]]
    describe: Callable[[Path], Metadata]
    remember: Callable[[Path], dict[str, str]] = lambda _: {}


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
    wait_while_paused(context, partition.state)
    workers = Workers(partition.state)
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
    if options.recompute and (options.retry_failed or options.retry_transient):
        note_needs_person(context)
        raise ConflictingOptionsError("recompute computes every row again, failed ones too: set only one.")
    published = PublishedPartitions(partition.paths.asset)
    record = published.record(partition.key)
    generation = generation_of(partition, options, record, root_run_of(context))
    if record is not None and _is_current(record, partition, generation, options):
        yield from _verify(context, published, record, partition, steps, options)
        return
    schema = steps.schema()
    retries = round_of(context, partition, options, generation, schema)
    generation = retries.generation
    with partition.open_journal(generation, schema) as journal:
        how = _tell_restored(context, journal.recovery)
        if options.retry_failed:
            kept = keep_ok_rows(journal, generation, schema, partition, published, record)
            how["kept rows"] = dg.MetadataValue.int(kept)
        elif retries.source is not None:
            kept = keep_rows_of_source(journal, retries, partition, schema)
            how["kept rows"] = dg.MetadataValue.int(kept)
        elif journal.missing_ids and not options.recompute and not _is_published(record, partition):
            # A run with an option may have begun it, in a generation of its own: it is the same work.
            kept = keep_ok_rows(journal, generation, schema, partition, published, record)
            how |= {"kept rows": dg.MetadataValue.int(kept)} if kept else {}
        restored = journal.committed_rows
        beat.resume(restored=restored)
        progress = PausableProgress(
            context,
            expected=len(partition.expected_ids),
            restored=restored,
            journal=journal,
            beat=beat,
            state=partition.state,
        )
        progress.report()
        if journal.missing_ids:
            how |= _work(context, steps, journal, progress)
            journal.flush()
            progress.report()
            if missing := sorted(journal.missing_ids):
                raise UnfinishedWorkError(
                    f"The work on {partition.key} of {partition.asset} ended, and {len(missing)} properties"
                    f" have no row, such as {', '.join(missing[:3])}. What is finished is kept: start it"
                    " again. If that repeats, it is a defect of this program: please open an issue."
                )
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
            staged.metadata = {**staged.metadata, **steps.remember(staged.path)}
            outcomes = steps.check(staged.path)
            results = [check_result(partition.asset, outcome) for outcome in outcomes]
            if any(outcome.stops_publication for outcome in outcomes):
                failed = failed_rows(staged.path)
                partition.row_retries.write(
                    retries.refused(failed, TRANSIENT_KINDS, **_told(context, outcomes))
                )
                yield from results
                damage = _damage(published, partition.key) if record is not None else ""
                yield published_file_result(partition.asset, record, damage=damage)
                raise _refused(partition, outcomes, stays=record is not None)
            yield dg.Output(staged, metadata=steps.describe(staged.path) | how | _internals(partition))
        # The IO manager has published the file and read both copies back: the journal has done its work.
        journal.retire()
    partition.row_retries.clear()
    yield from results
    yield published_file_result(partition.asset, published.record(partition.key))


def _work(context: dg.AssetExecutionContext, steps: Steps, journal: Journal, progress: Progress) -> Metadata:
    try:
        return steps.work(journal, progress)
    except (NoDeviceFreeError, AllLeftOutError, ServerUnreachableError, ServerOutageError, ImagesAwayError):
        # No device to work on, no server to ask and no disk to read from say nothing of the partition.
        note_no_attempt(context)
        raise
    except GarbageOutputError:
        # Its failed rows are new rows all the same: tried again by itself, it would fill up with them.
        note_needs_person(context)
        raise


def note_needs_person(context: dg.AssetExecutionContext) -> None:
    """Say on the run that it stopped for what another start would only repeat."""
    context.instance.add_run_tags(context.run.run_id, {NEEDS_PERSON: context.run.run_id})


def note_no_attempt(context: dg.AssetExecutionContext) -> None:
    """Say on the run that its end was no attempt at its partition."""
    context.instance.add_run_tags(context.run.run_id, {NO_ATTEMPT: context.run.run_id})


def _told(context: dg.AssetExecutionContext, outcomes: Sequence[CheckOutcome]) -> dict[str, Any]:
    checks = tuple(outcome.name for outcome in outcomes if outcome.stops_publication)
    return {"run_id": context.run.run_id, "at": time.time(), "checks": checks}


def _is_current(record: PublishedRecord, partition: Partition, generation: str, options: RunOptions) -> bool:
    if not _is_published(record, partition):
        return False
    # A run retry of a recomputation that was already published must not compute it a third time.
    if options.recompute or options.retry_failed:
        return record.metadata.get("generation") == generation
    return not (options.retry_transient and _is_refused_beside(record, partition))


def _is_published(record: PublishedRecord | None, partition: Partition) -> bool:
    """Whether what is published has these rows' meaning: then only a wish to compute them anew comes here."""
    return record is not None and record.fingerprint == partition.fingerprint.digest


def _is_refused_beside(record: PublishedRecord, partition: Partition) -> bool:
    """Whether a recomputation, refused by a check, stands beside what is published."""
    standing, _ = partition.row_retries.read_or_set_aside()
    if standing is None or standing.fingerprint != record.fingerprint:
        return False
    journals = (partition.paths.journal(one) for one in (standing.generation, standing.source) if one)
    return standing.generation != record.metadata.get("generation") and any(one.is_dir() for one in journals)


def _verify(
    context: dg.AssetExecutionContext,
    published: PublishedPartitions,
    record: PublishedRecord,
    partition: Partition,
    steps: Steps,
    options: RunOptions,
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
    if options.recompute or options.retry_failed:
        said += " What the re-executed run asked for is published: to compute anew, launch it anew."
    _finish_retirement(record, partition, steps)
    context.log.info(f"{said} Complete and unchanged: no device was needed.")
    file = published.path(partition.key)
    outcomes = steps.check(file)
    results = [check_result(partition.asset, outcome) for outcome in outcomes]
    if any(outcome.stops_publication for outcome in outcomes):
        # What is published would come out the same: nothing of it is tried again by itself.
        standing = RowRetries(record.fingerprint, str(record.metadata["generation"]), context.run.run_id)
        partition.row_retries.write(standing.refused((), (), **_told(context, outcomes)))
        yield from results
        yield published_file_result(partition.asset, record)
        raise _refused(partition, outcomes, stays=True)
    metadata: Metadata = {"verified": dg.MetadataValue.text(f"{said} No device was needed.")}
    metadata = steps.describe(file) | metadata | _internals(partition)
    yield dg.Output(AlreadyPublished(record), metadata=metadata)
    yield from results
    yield published_file_result(partition.asset, record)


def _internals(partition: Partition) -> Metadata:
    """What only a search for the cause of something needs: it comes last on the page."""
    return {"fingerprint": dg.MetadataValue.text(partition.fingerprint.digest)}


def _damage(published: PublishedPartitions, key: str) -> str:
    """What is wrong with the file that stays; empty where nothing is."""
    verification = published.verify(key, deep=True)
    return "" if verification.ok else verification.sentence()


def _finish_retirement(record: PublishedRecord, partition: Partition, steps: Steps) -> None:
    """Retire the journal of a published file where a crash came between publication and retirement."""
    generation = str(record.metadata["generation"])
    directory = partition.paths.journal(generation)
    if not directory.is_dir() or clear_retired(directory, partition.paths.high_water_mark(generation)):
        return
    # Not the file's schema: parquet gives the elements of a list another name, and that is other work.
    with partition.open_journal(generation, steps.schema()) as journal:
        journal.retire()


def _tell_restored(context: dg.AssetExecutionContext, recovery: Recovery) -> Metadata:
    """Say what an open restored, in the log and as an event of the partition, before any work.

    Returns what the finished file's page repeats of it.
    """
    said: Metadata = {
        "restored": dg.MetadataValue.text(recovery.sentence()),
        "restored rows": dg.MetadataValue.int(recovery.rows),
    }
    quarantined = [f"{path} ({why})" for path, why in recovery.quarantined]
    details: Metadata = {
        "manifest rows": _number_or(recovery.manifest_rows, "no manifest yet"),
        "high-water mark": _number_or(recovery.high_water_mark, "none yet"),
        "segments adopted": dg.MetadataValue.int(len(recovery.adopted)),
        "files quarantined": dg.MetadataValue.text("; ".join(quarantined) or "none"),
    }
    context.log.info(recovery.sentence())
    context.log_event(
        dg.AssetObservation(
            asset_key=context.asset_key, partition=context.partition_key, metadata=said | details
        )
    )
    return said


def _number_or(number: int | None, otherwise: str) -> dg.MetadataValue:
    return dg.MetadataValue.text(otherwise) if number is None else dg.MetadataValue.int(number)


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
