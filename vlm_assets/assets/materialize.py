"""One materialization of one partition: the steps that both assets take.

They are: begin; where the partition is complete, verify; else resume, compute the rows on a device, publish.
How a row is made is in ``description_work.py`` and ``property_embeddings.py``. A refused file yields its
failing check results before the error: that leaves a failed check with its partition, a failed partition, and
the old file in place.
"""

from __future__ import annotations

import contextlib
import getpass
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

import dagster as dg
import pyarrow as pa
from pydantic import Field

from resources.dagster_names import NEEDS_PERSON, NO_ATTEMPT
from resources.gpu import GpuResource
from resources.interrupts import emit, interrupt_once
from sensors.dagster_internals.instance_needs import UnfitInstanceError, outlive_outages, refuse_unfit
from vlm_assets.assets.checks import (
    NOT_ACCEPTED,
    Acceptance,
    CheckOutcome,
    check_result,
    published_file_result,
)
from vlm_assets.assets.dagster_versions import version_tags
from vlm_assets.assets.fingerprint import ANEW, SETTINGS, Fingerprint, changed_parts, follows_upstream
from vlm_assets.assets.partition import (
    Partition,
    Refusal,
    adopt_rows,
    clear_refusal,
    generation_of,
    rows_to_try_again,
)
from vlm_assets.assets.rows_in_doubt import RowsInDoubt, alert_failed_canaries
from vlm_assets.assets.run_watch import (
    ImagesAwayError,
    RunProgress,
    note_run,
    wait_for_store,
    wait_while_paused,
)
from vlm_assets.assets.stored_settings import MachineDiffersError, refuse_other_settings
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.config.where import WhereError
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_catalog.stored_catalog import pull_catalog
from vlm_catalog.withdrawn_ids import read_withdrawn
from vlm_durable.commands import command
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.journal_errors import JournalLockedError
from vlm_durable.journal.recovery import Recovery
from vlm_durable.journal.setting_aside import move_set_aside, note_set_aside, unmoved
from vlm_durable.mirror.bucket import ObjectDeniedError, StoreAwayError, StoreError, UnfitStoreError
from vlm_durable.mirror.stored_journal import (
    CopiesWaitError,
    Copying,
    StoredJournal,
    TakenOverError,
    close_published,
    close_set_aside,
    pull_closed,
    pull_others,
)
from vlm_durable.state.withdrawing import being_withdrawn
from vlm_durable.state.workers import Phase, WorkerBeat, Workers
from vlm_durable.versions.partition_files import CannotRestoreError, PublishedRecord, PutBackError
from vlm_durable.versions.published import Publication, PublishedPartitions, StagedFile, Verification
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.wording import counted
from vlm_engine.canary import Canary, WrongAnswersError
from vlm_engine.devices.find import Device
from vlm_engine.devices.leases import NoDeviceFreeError, uses_cuda
from vlm_engine.devices.left_out import at_work_on
from vlm_engine.ladder import GarbageOutputError
from vlm_engine.server.model_server import ServerOutageError
from vlm_engine.server.running_server import ServerUnreachableError

Metadata = dict[str, dg.MetadataValue]
_T = TypeVar("_T")

Event = dg.Output[StagedFile | Publication] | dg.AssetCheckResult

_COPY_QUEUE_BYTES = 1 << 30
"""Bytes of a run's committed rows that may wait here for the store: hundreds of thousands of descriptions.
More than that would be lost with the machine."""

_AWAY = (
    NoDeviceFreeError,
    ServerUnreachableError,
    ServerOutageError,
    ImagesAwayError,
    StoreAwayError,
    ObjectDeniedError,
    UnfitStoreError,
    TakenOverError,
    CopiesWaitError,
)

ACCEPTED_FAILED = "accepted_failed"
"""Key in the published record's metadata: how many failed rows a person accepted, who and when."""


class RunOptions(dg.Config):
    """What a person may ask of a materialization in the launchpad. Without it, finished work is kept.

    recompute: compute every property of the partition again, beside the old output, which stays until all
    is done. retry_failed: try the properties that ended as failed once more, and keep all others.
    accept_failed: publish, however many properties have failed; the published record says so.
    stale: what to do with a partition that was published under other settings. "anew" makes it anew; "keep"
    leaves it as it is; a digest (``Fingerprint.settings_digest``) makes it anew if the settings still have
    that digest.
    """

    recompute: bool = False
    retry_failed: bool = False
    accept_failed: bool = False
    stale: str = ANEW


class JoinedRunOptions(RunOptions):
    """The options of a run over several assets of one op.

    sets: those of single assets, by their names, in place of the ones above.
    """

    sets: dict[str, RunOptions] = Field(default_factory=dict)

    def of(self, asset: str) -> RunOptions:
        """The options of one of the assets."""
        return self.sets.get(asset, self)


class RunRefusedError(ValueError):
    """The run's options or partitions are not possible; the message says what to launch instead."""


class BeingWithdrawnError(RuntimeError):
    """Properties of the partition are being withdrawn, or were since this run read them."""


class Work(Protocol):
    """What an asset adds to a materialization: one partition's properties, their rows, and the checks."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the range, in the order of the catalogue."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The digest of all that decides the meaning of its rows."""

    @property
    def inputs(self) -> Mapping[str, str]:
        """The digest of all that decides a row, by id."""

    def rows_schema(self) -> pa.Schema:
        """The columns of the rows; asked for only where there is work."""

    def rows_left_out(self, ids: Collection[str]) -> pa.Table:
        """The rows of those of these properties that are not asked. They need no device."""

    def would_refuse(self, failed: int, *, accepted: Acceptance) -> bool:
        """Whether the checks would refuse a file with ``failed`` failed rows."""

    def check(self, file: Path, *, accepted: Acceptance) -> Sequence[CheckOutcome]:
        """Run the checks on a file."""

    def record_metadata(self, file: Path) -> dict[str, Any]:
        """What the published record keeps of the file's rows."""

    def metadata(self, file: Path) -> Metadata:
        """What people read about the finished file."""


def range_of_run(context: dg.AssetExecutionContext, settings: Settings) -> tuple[Catalog, PropertyRange]:
    """The catalogue, and the range of this run's partition; both are pulled from the store first.

    Raises CatalogError, StoreError, RunRefusedError for a run over several partitions, and dg.Failure where a
    Dagster of somebody else's lacks a setting.
    """
    settings.name_in_commands()
    outlive_outages(context.instance)
    if settings.names.prefix:
        try:
            refuse_unfit(context.instance, context.job_def.executor_def.name)
        except UnfitInstanceError as error:
            note_run(context, NEEDS_PERSON)
            raise dg.Failure(str(error), allow_retries=False) from error
    keys: Sequence[str] = context.partition_keys
    if len(keys) != 1:
        raise RunRefusedError(
            f"This run was launched for {counted(len(keys), 'partitions')} at once. A partition is a"
            f" run of its own here,"
            " so that one can fail, wait or be resumed without the others: launch a backfill without the"
            " option 'single run'."
        )
    store = settings.mirror

    def pull() -> list[str]:
        pull_catalog(settings.home, store)
        assets = settings.partitioned_assets
        with no_retry_without_a_person(context):
            notes = [note for asset in assets for note in StoredPartitions(asset, store).pull(keys[0])]
        for asset in assets:
            pull_closed(asset.partition(keys[0]), store)
        return notes

    for note in wait_for_store(context, settings, pull):
        context.log.warning(note)
    return Catalog.open(settings.home), PropertyRange.from_key(keys[0])


class Materialization:
    """The run of one partition. Make it with ``begin``; its methods are the steps, in their order."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        partition: Partition,
        work: Work,
        options: RunOptions,
        beat: WorkerBeat,
        settings: Settings,
    ) -> None:
        self.partition = partition
        self.progress: RunProgress
        self.key = settings.names.key(partition.asset)
        self._context = context
        self._work = work
        self._options = options
        self._beat = beat
        self._settings = settings
        self._published = PublishedPartitions(partition.paths.asset)
        self._record = self._published.settled(partition.key)
        alert_failed_canaries(settings)  # of a run that was killed before it could
        self._finish_setting_aside()
        asked_by = root_run_of(context) if options.recompute or options.retry_failed else None
        self._generation = generation_of(partition, self._record, asked_by)
        self._restored: Metadata = {}
        self._copying: Copying

    @classmethod
    @contextlib.contextmanager
    def begin(
        cls,
        context: dg.AssetExecutionContext,
        settings: Settings,
        asset: str,
        work: Work,
        options: RunOptions,
    ) -> Iterator[Materialization]:
        """Wait while paused, then register this process as the partition's worker until the context ends.

        Raises RunRefusedError, BeingWithdrawnError, dg.Failure where an older version was put back, and
        MachineDiffersError where the store is worked with under other settings.
        """
        interrupt_once(context.run.run_id)
        if options.recompute and options.retry_failed:
            note_run(context, NEEDS_PERSON, [asset])
            raise RunRefusedError("recompute computes every row again, failed ones too: set only one.")
        wait_while_paused(context, control_state(settings))
        _refuse_other_settings(context, settings, asset, work.fingerprint.parts)
        partition = Partition(settings, asset, context.partition_key, work.ids, work.fingerprint)
        with Workers(control_state(settings)).begin(
            run_id=context.run.run_id,
            asset=partition.asset,
            partition=partition.key,
            expected=len(partition.expected_ids),
            began=_began(context),
        ) as beat:
            # A withdrawal that begins later sees the heartbeat.
            _refuse_withdrawn(context, settings, partition)
            with no_retry_without_a_person(context, asset):
                materialization = cls(context, partition, work, options, beat, settings)
            yield materialization

    @property
    def is_complete(self) -> bool:
        """Whether the run has nothing to compute: it is published already, or is to stay as it is."""
        if self._keeps_stale:
            return True
        record = self._record
        if record is None or record.fingerprint != self.partition.fingerprint.digest:
            return False
        # A run retry of a recomputation that was already published must not compute it a second time.
        asks_for_rows = self._options.recompute or self._options.retry_failed
        return not asks_for_rows or record.metadata.get("generation") == self._generation

    @property
    def _keeps_stale(self) -> bool:
        """Whether this run leaves a file of other settings as it is: nobody agreed to the current ones."""
        record, now, option = self._record, self.partition.fingerprint, self._options.stale
        if record is None or record.fingerprint == now.digest or option in (ANEW, now.settings_digest):
            return False
        return not follows_upstream(changed_parts(record.metadata.get("parts", {}), now.parts))

    def verify(self) -> Iterator[Event]:
        """Read every byte of a complete partition, put back what is damaged, and run the checks."""
        record, key = self._record, self.partition.key
        verified: Metadata
        if record is None:
            raise ValueError(f"partition {key} is not complete: resume it instead")
        verification = self._published.verify(key)
        message = verification.sentence()
        if not verification.ok:
            self._context.log.warning(message)
            try:
                restored = self._published.restore(key, self._fetch)
            except CannotRestoreError as error:
                raise dg.Failure(
                    f"{error} To compute it again, materialize this partition with `recompute: true`.",
                    allow_retries=False,
                ) from error
            message = " ".join((message, *restored.notes))
        if self._options.recompute or self._options.retry_failed:
            message += " What the re-executed run asked for is published: to compute anew, launch it anew."
        generation, file = str(record.metadata["generation"]), self._published.path(key)
        if self._keeps_stale:
            stays = f"It was made with other settings or images than now, and stays: {command('run', key)}."
            self._context.log.info(f"{message} {stays}")
            verified = {"verified": dg.MetadataValue.text(f"{message} {stays}")}
            yield from self._emit(self._output(Publication(record, changed=False), verified))
            self._finish_retirement(generation)
            # The file was not made with the current settings, which the checks know: they only warn.
            outcomes = self._work.check(file, accepted=self._accepted_before)
            warnings = [replace(outcome, severity=dg.AssetCheckSeverity.WARN) for outcome in outcomes]
            yield from self._emit(*(check_result(self.key, warning) for warning in warnings))
            yield from self._emit(published_file_result(self.key, Verification(key, record)))
            return
        self._context.log.info(f"{message} Complete and unchanged: no device was needed.")
        outcomes, refusal = self._check(file, accepted=self._accepted_before)
        results = [check_result(self.key, outcome) for outcome in outcomes]
        if refusal is not None:
            # Computed again it would come out the same.
            self._note(NEEDS_PERSON)
            yield from self._emit(*results, published_file_result(self.key, Verification(key, record)))
            raise refusal
        verified = {"verified": dg.MetadataValue.text(f"{message} No device was needed.")}
        metadata = self._work.metadata(file) | verified | self._internals
        yield from self._emit(self._output(Publication(record, changed=False), metadata))
        # The IO manager has put the file into the store: its rows in the store's journal are not needed now.
        self._finish_retirement(generation)
        yield from self._emit(*results)
        yield from self._emit(published_file_result(self.key, Verification(key, record)))

    def _fetch(self, record: PublishedRecord) -> bytes | None:
        """The file of a version from the store; waits while the store is away."""
        stored = StoredPartitions(self.partition.paths.asset, self._settings.mirror)
        return self._wait_for_store(lambda: stored.content_of(record))

    @contextlib.contextmanager
    def resume(self) -> Iterator[Journal]:
        """Open the journal, say what it restored, and adopt the finished rows that others have.

        What the store has is fetched first, and what is committed is copied there beside the work.
        """
        try:
            with contextlib.ExitStack() as stack:
                self._copying = copying = self._begin_copying(stack)
                journal = stack.enter_context(
                    self.partition.open_journal(self._generation, self._work.rows_schema())
                )
                self._wait_for_store(lambda: copying.begin(journal))
                self._restored = _report_restored(self._context, self.key, journal.recovery)
                self._refuse_rows_in_doubt(journal)
                if (left_out := self._work.rows_left_out(journal.missing_ids)).num_rows:
                    journal.submit(left_out)
                    journal.flush()
                if not self._options.recompute:
                    adopted, notes = adopt_rows(
                        journal,
                        self.partition,
                        self._work.inputs,
                        self._published,
                        failed_too=not self._options.retry_failed,
                        in_doubt=RowsInDoubt(self._settings).among,
                    )
                    for note in notes:
                        self._context.log.warning(note)
                    if adopted or self._options.retry_failed:
                        self._restored["kept rows"] = dg.MetadataValue.int(adopted)
                if journal.missing_ids:
                    clear_refusal(self.partition.paths)
                self._beat.resume(restored=journal.committed_rows)
                self.progress = RunProgress(
                    self._context,
                    asset=self.key,
                    expected=len(self.partition.expected_ids),
                    journal=journal,
                    beat=self._beat,
                    state=control_state(self._settings),
                    may_go_on=copying.check,
                )
                self.progress.report()
                yield journal
        except GarbageOutputError:
            # Failed rows count as new rows: retries by themselves would fill the partition with them.
            self._note(NEEDS_PERSON)
            raise
        except _AWAY:
            # A device, server, disk or store that is away says nothing about the partition.
            self._note(NO_ATTEMPT)
            raise
        except WrongAnswersError as error:
            if error.rows_in_doubt:
                # First, because it needs no database: from here on no run uses these rows.
                note_set_aside(self.partition.paths, self._generation, str(error))
                self._finish_setting_aside()
            self._note(NO_ATTEMPT)
            alert_failed_canaries(self._settings)
            raise

    def _note(self, tag: str) -> None:
        note_run(self._context, tag, [self.partition.asset])

    def _wait_for_store(self, find: Callable[[], _T], title: str = "No store to work from") -> _T:
        assets = [self.partition.asset]
        return wait_for_store(self._context, self._settings, find, title, assets=assets)

    def work_beside(self, runs: Iterable[Materialization]) -> None:
        """Share a device and a model with other partitions of this run. See ``WorkerBeat.work_beside``."""
        self._beat.work_beside(run._beat for run in runs)

    @contextlib.contextmanager
    def at_work(
        self, engine: object, device: Device, *, beside: Sequence[Materialization] = ()
    ) -> Iterator[None]:
        """Ask the engine the canary before the work inside and after it, when all its rows are committed.

        beside: the others whose questions it is asked. Raises WrongAnswersError.
        """
        runs = (self, *beside)
        canary = Canary(
            control_state(self._settings),
            device,
            at_work_on(self.partition.asset, self.partition.key),
            # Asked with others, the first question may come out otherwise in its last bits.
            "+".join(run.partition.fingerprint.settings_digest for run in runs),
            log=self._context.log,
        )
        self.progress.watch(engine)
        canary.begin(engine)
        for run in runs:
            run.progress.start()
        yield
        canary.end(engine)

    def _refuse_rows_in_doubt(self, journal: Journal) -> None:
        """Return where no committed row was made by a device since its last good canary. See RowsInDoubt."""
        if in_doubt := RowsInDoubt(self._settings).in_journal(journal):
            raise WrongAnswersError(
                f"{counted(in_doubt, 'rows')} of {self.partition.key} were made by a device that gives wrong"
                " answers. Nothing is published, and all rows of this work are set aside in .quarantine. The"
                " partition is tried again by itself.",
                rows_in_doubt=True,
            )

    def _finish_setting_aside(self) -> None:
        """Close the copy of each generation that is noted as set aside; move its folder into .quarantine."""
        paths = self.partition.paths
        for generation in unmoved(paths):
            try:
                close_set_aside(paths, generation, self._settings.mirror)
                aside = move_set_aside(paths, generation)
            except (StoreError, JournalLockedError) as error:
                self._context.log.warning(f"{paths.journal(generation)} is to be set aside: {error}")
                continue
            self._context.log.warning(f"The rows of generation {generation} are set aside in {aside}.")

    def _begin_copying(self, stack: contextlib.ExitStack) -> Copying:
        """Fetch the partition's work from the store."""
        store, paths = self._settings.mirror, self.partition.paths
        stored = StoredJournal(paths, self._generation, store)

        def pull() -> list[str]:
            return [*stored.pull(), *pull_others(paths, self._generation, store)]

        for note in self._wait_for_store(pull):
            self._context.log.warning(note)
        copying = Copying(stored, most_bytes=_COPY_QUEUE_BYTES)
        copying.on_lag = lambda lag: self._beat.copy(lag.segments, lag.since)
        return stack.enter_context(copying)

    def to_do(self, journal: Journal) -> frozenset[str]:
        """The ids to compute next: those without a row, or else failed ones that have a try left."""
        if journal.missing_ids or self._options.accept_failed:
            return journal.missing_ids
        return rows_to_try_again(journal)

    def rounds(self, journal: Journal) -> Iterator[frozenset[str]]:
        """The ids to compute, round after round, until nothing is left to do.

        The caller submits a row for each id before it asks for the next round. Ends early where so many have
        failed that the checks would refuse the file: their cause may need time, so their tries are kept for
        a later run. Raises RuntimeError.
        """
        while to_do := self.to_do(journal):
            before = journal.failed_tries
            clear_refusal(self.partition.paths)
            yield to_do
            journal.flush()
            after, missing = journal.failed_tries, journal.missing_ids
            self._refuse_unfinished(
                property_id
                for property_id in to_do
                if property_id in missing
                or (property_id in before and after.get(property_id) == before[property_id])
            )
            if self._work.would_refuse(len(after), accepted=self._accepted_before):
                return

    @contextlib.contextmanager
    def device(
        self,
        gpu: GpuResource,
        *,
        server_digest: str | None,
        computes_elsewhere: bool = False,
        needed_by: Collection[str] = (),
    ) -> Iterator[Device]:
        """Lease a device for the work inside.

        server_digest: of the model server that is to stay on the device. computes_elsewhere: what fails in
        the work, CUDA errors too, says nothing of the device here. needed_by: assets that compute later
        where the run makes them too. Else the device is given back after the work, and not only when the
        process ends, which takes seconds; but one with a CUDA context of this process has its memory until
        then.
        """
        asset, key, names = self.partition.asset, self.partition.key, self._settings.names
        lease = gpu.lease(
            run_id=self._context.run.run_id,
            partition=key,
            step=asset,
            log=self._context.log,
            server_digest=server_digest,
            will_be_free=self.progress.device_wait,
        )
        if computes_elsewhere:
            self.progress.load(None)
            yield lease.device
        else:
            self.progress.load(lease.device.id)
            with gpu.blame(lease.device, asset=asset, partition=key, log=self._context.log):
                yield lease.device
        # Empty: all assets of a job.
        selection = self._context.run.asset_selection
        is_needed = any(not selection or names.key(later) in selection for later in needed_by)
        if not is_needed and not uses_cuda():
            lease.release()

    def publish(self, journal: Journal, computed: Metadata) -> Iterator[Event]:
        """Stage one file of all rows and check it; publish it, or raise and leave the old one in place.

        computed: what the page says of the work.
        """
        journal.flush()
        self.progress.report()
        self._refuse_unfinished(journal.missing_ids)
        # The device that made the restored rows may have failed since this run began.
        self._refuse_rows_in_doubt(journal)
        self._beat.enter(Phase.PUBLISHING)
        key = self.partition.key
        staged = self._published.stage(
            key,
            journal.read_ordered(),
            self._work.rows_schema(),
            expected_ids=self.partition.expected_ids,
            fingerprint=self.partition.fingerprint.digest,
            metadata={
                "generation": self._generation,
                "parts": dict(self.partition.fingerprint.parts),
                SETTINGS: dict(self.partition.fingerprint.settings),
                "began": self._beat.worker.started_at,
            },
        )
        with staged:
            failed, accepted = len(journal.failed_tries), self._accepted_before
            if self._options.accept_failed:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                accepted = Acceptance(failed, getpass.getuser(), now)
            staged.remember(self._work.record_metadata(staged.path))
            if self._work.would_refuse(failed, accepted=NOT_ACCEPTED) and failed <= accepted.rows:
                staged.remember({ACCEPTED_FAILED: asdict(replace(accepted, rows=failed))})
            outcomes, refusal = self._check(staged.path, accepted=accepted)
            results = [check_result(self.key, outcome) for outcome in outcomes]
            if refusal is not None:
                findings = {outcome.name: outcome.sentence() for outcome in outcomes if not outcome.passed}
                Refusal(self._generation, findings).write(self.partition.paths)
                if not rows_to_try_again(journal):
                    self._note(NEEDS_PERSON)
                yield from self._emit(*results)
                standing = Verification(key, None) if self._record is None else self._published.verify(key)
                yield from self._emit(published_file_result(self.key, standing))
                raise refusal
            clear_refusal(self.partition.paths)
            metadata = self._work.metadata(staged.path) | self._restored | computed | self._internals
            # The publication below ends only when the store has it: wait here for a store that is away.
            # A worker that was taken over publishes nothing.
            self._wait_for_store(self._copying.flush, "No store to publish in")
            self._refuse_rows_in_doubt(journal)  # again: the wait may have taken hours
            yield from self._emit(self._output(staged, metadata))
        # The IO manager has published the file and read both copies back: the journal has done its work.
        journal.retire()
        self._retire_stored(self._copying.retire)
        yield from self._emit(*results)
        yield from self._emit(published_file_result(self.key, Verification(key, self._published.record(key))))

    def _emit(self, *events: Event) -> Iterator[Event]:
        return emit(self._context.run.run_id, *events)

    def _output(
        self, published: StagedFile | Publication, metadata: Metadata
    ) -> dg.Output[StagedFile | Publication]:
        """What the IO manager publishes or leaves, with the versions of its rows as Dagster compares them."""
        # They replace Dagster's tags, which would name the settings now: a file of other settings may stay.
        tags = version_tags(published.record, self.partition.fingerprint.parts)
        name = self._context.output_for_asset_key(self.key)
        return dg.Output(published, output_name=name, metadata=metadata, tags=tags)

    @property
    def _internals(self) -> Metadata:
        """Details for finding the cause of a problem: they come last on the page."""
        return {"fingerprint": dg.MetadataValue.text(self.partition.fingerprint.digest)}

    @property
    def _accepted_before(self) -> Acceptance:
        """The failed rows of the published file that a person accepted: no more of them only warn again."""
        accepted = self._record.metadata.get(ACCEPTED_FAILED) if self._record else None
        return Acceptance(**accepted) if accepted else NOT_ACCEPTED

    def _check(self, file: Path, *, accepted: Acceptance) -> tuple[Sequence[CheckOutcome], dg.Failure | None]:
        """The outcomes of the checks, and the error of those that keep the file from being published."""
        asset, key = self.partition.asset, self.partition.key
        outcomes = self._work.check(file, accepted=accepted)
        stopping = [outcome for outcome in outcomes if outcome.stops_publication]
        if not stopping:
            return outcomes, None
        findings = " ".join(f"{outcome.name}: {outcome.sentence()}" for outcome in stopping)
        old = "The file published before stays in place." if self._record else "No file was there before."
        return outcomes, dg.Failure(
            f"Partition {key} of {asset} is not published. {findings} {old} The finished rows are kept and"
            " will not be computed again.",
            metadata={outcome.name: outcome.sentence() for outcome in stopping},
            allow_retries=False,
        )

    def _refuse_unfinished(self, ids: Iterable[str]) -> None:
        if unfinished := sorted(ids):
            raise RuntimeError(
                f"The work on {self.partition.key} of {self.partition.asset} ended, and"
                f" {counted(len(unfinished), 'properties have', 'property has')} no row, such as"
                f" {', '.join(unfinished[:3])}. What is finished is kept:"
                " start it again. If that repeats, it is a defect of this program: please open an issue."
            )

    def _retire_stored(self, retire: Callable[[], None]) -> None:
        """Take published rows out of the store's journal; where that fails, the next start does it."""
        try:
            retire()
        except StoreError as error:
            self._context.log.warning(f"The store keeps the journal of this partition for now: {error}")

    def _finish_retirement(self, generation: str) -> None:
        """Retire the journal of a published file if a crash came between publication and retirement."""
        store = self._settings.mirror
        self._retire_stored(lambda: close_published(self.partition.paths, generation, store))
        if leftover := self.partition.finish_retirement(generation, self._work.rows_schema):
            self._context.log.warning(leftover)


def _refuse_other_settings(
    context: dg.AssetExecutionContext, settings: Settings, asset: str, parts: Mapping[str, str]
) -> None:
    store = settings.mirror
    try:
        wait_for_store(
            context,
            settings,
            lambda: refuse_other_settings(store, asset, parts, settings.home),
            assets=[asset],
        )
    except (MachineDiffersError, UnfitStoreError, ObjectDeniedError):
        # Another machine may have the right settings; after a few interruptions a person is alerted.
        note_run(context, NO_ATTEMPT, [asset])
        raise


def _refuse_withdrawn(context: dg.AssetExecutionContext, settings: Settings, partition: Partition) -> None:
    """Raise BeingWithdrawnError where properties of the partition are being withdrawn or were withdrawn."""
    is_withdrawn = partition.key in (being_withdrawn(control_state(settings)) or ())
    assets = [partition.asset]
    if not is_withdrawn:
        wait_for_store(context, settings, lambda: pull_catalog(settings.home, settings.mirror), assets=assets)
        rows = Catalog.open(settings.home).slice(PropertyRange.from_key(partition.key))
        is_withdrawn = tuple(rows["property_id"].to_pylist()) != partition.expected_ids
    if is_withdrawn:
        note_run(context, NO_ATTEMPT, assets)
        raise BeingWithdrawnError(
            f"Properties of {partition.key} are being withdrawn, or were since this run read them, so nothing"
            f" was computed. It goes on by itself. {command('withdraw')} finishes a withdrawal that was cut"
            " short."
        )
    withdrawn = read_withdrawn(settings.home)
    if withdrawn is not None and any(property_id in withdrawn for property_id in partition.expected_ids):
        note_run(context, NO_ATTEMPT, assets)
        raise BeingWithdrawnError(
            f"Withdrawn properties are back in the catalogue, in {partition.key}, so nothing was computed: an"
            f" older catalogue was put back. {command('withdraw')} withdraws them again;"
            f" {command('withdraw', '--undo', 'ID')} takes an id off the list."
        )


@contextlib.contextmanager
def no_retry_without_a_person(context: dg.AssetExecutionContext, *assets: str) -> Iterator[None]:
    """Fail without a retry where a partition was put back, or a condition cannot be evaluated.

    Every further run would fail alike.

    assets: those whose failure that is; without any, all that the run has not made.
    """
    try:
        yield
    except (PutBackError, WhereError) as error:
        note_run(context, NEEDS_PERSON, assets)
        raise dg.Failure(f"{str(error).rstrip('.')}. Nothing was computed.", allow_retries=False) from error


def root_run_of(context: dg.AssetExecutionContext) -> str:
    """The first run of this one's chain of retries, or itself: a retry resumes what that run began."""
    run: dg.DagsterRun = context.run
    return run.get_root_run_id() or run.run_id


def _began(context: dg.AssetExecutionContext) -> float:
    """When the work of a step began, in unix seconds: for the run's first step, its launch."""
    stats = context.instance.get_run_stats(context.run.run_id)
    launched = stats.launch_time or stats.start_time
    is_first = not (stats.steps_succeeded or stats.steps_failed)
    return launched if launched is not None and is_first else time.time()


def _report_restored(context: dg.AssetExecutionContext, asset: dg.AssetKey, recovery: Recovery) -> Metadata:
    """Report what opening the journal restored, in the log and as an event, before any work.

    Returns the part of it that the finished file's page repeats.
    """
    restored: Metadata = {
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
        dg.AssetObservation(asset_key=asset, partition=context.partition_key, metadata=restored | details)
    )
    return restored


def _number_or(number: int | None, otherwise: str) -> dg.MetadataValue:
    return dg.MetadataValue.text(otherwise) if number is None else dg.MetadataValue.int(number)
