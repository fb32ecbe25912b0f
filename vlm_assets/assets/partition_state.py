"""The state of a partition, from the catalogue, the published record and the journal.

``vlm-assets status``, ``run``, ``audit`` and ``repair``, the drift sensor, the retry schedule and the
progress picture all ask ``PartitionStates``, so they cannot disagree. It changes nothing on disk; only
``VerifiedFiles.save`` writes a note.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_assets.assets.changed_settings import changed_in_words
from vlm_assets.assets.fingerprint import (
    CATALOGUE_SLICE,
    LOOKED_AT,
    OF_THE_PARTITION,
    SETTINGS,
    TEXTS,
    WHERE,
    Fingerprint,
    Meanings,
    changed_parts,
    digest_of,
    follows_upstream,
    row_parts,
)
from vlm_assets.assets.looked_at import published_digest
from vlm_assets.assets.partition import INPUTS, NOT_ASKED, Refusal
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_durable.journal.inspection import JournalInspection, inspect_journals
from vlm_durable.journal.journal_errors import accept_loss_command
from vlm_durable.state.workers import Worker, Workers
from vlm_durable.versions.findings import Finding, FindingKind, store_step, worst
from vlm_durable.versions.partition_files import (
    PartitionFiles,
    PublishedRecord,
    PutBackError,
    judge,
    put_back_finding,
)
from vlm_durable.versions.partition_findings import (
    RecordReading,
    finding_of,
    of_copies,
    of_record,
    read_record,
    record_behind,
    without_record,
)
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_durable.versions.versioned_object import RecordDamagedError
from vlm_durable.wording import counted

_READINGS = 3
"""A publication or a commit may move files during a reading. Such a reading is repeated."""


class State(StrEnum):
    """The state of a partition."""

    DONE = "done"
    STALE = "stale"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    GIVEN_UP = "given up"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    DAMAGED = "damaged"
    LOST = "rows lost"
    NOT_STARTED = "not started"


MEANING: Mapping[State, str] = {
    State.DONE: "published",
    State.STALE: "published, and made with another catalogue, settings or texts than now",
    State.RUNNING: "a process works on it now",
    State.INTERRUPTED: "resumes from what is committed when it is materialized again",
    State.FAILED: "its last run failed; it is tried again by itself",
    State.GIVEN_UP: "it was tried too often without progress: look at it in the UI",
    State.CANCELLED: "a person cancelled it: launched by hand, it goes on",
    State.REFUSED: "all rows are there, but a check kept them from being published",
    State.DAMAGED: "its file or record is not what was published: a repair restores it",
    State.LOST: "committed rows are missing from its journal",
    State.NOT_STARTED: "nothing is committed yet",
}


_COUNTABLE = frozenset({FindingKind.DIGEST_DIFFERS, FindingKind.ROWS_DIFFER})


@dataclass(frozen=True)
class PartitionState:
    """One partition of one asset.

    path: of its published file. rows: published ones, else committed ones that are on disk. expected: rows of
    the catalogue. record: of the published file; None where nothing is published or it cannot be read.
    changed: parts of the fingerprint that would be different now; why: the changes in words. new_images:
    properties whose images have changed; None where their digests cannot be read. fingerprint_now: the digest
    of the fingerprint that it would have now, where something is published. countable: whether the rows of
    its file can be counted. note: a sentence about the partition.
    """

    asset: str
    key: str
    path: Path = field(repr=False)
    state: State
    rows: int
    expected: int
    record: PublishedRecord | None = None
    findings: tuple[Finding, ...] = ()
    changed: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    new_images: int | None = 0
    fingerprint_now: str = ""
    countable: bool = False
    note: str | None = None

    @property
    def percent(self) -> float:
        """How much of it is done."""
        return 100.0 * self.rows / self.expected

    @property
    def is_complete(self) -> bool:
        """Whether a materialization would change nothing, or only what a person decides: stale settings."""
        return self.state is State.DONE or (self.state is State.STALE and not follows_upstream(self.changed))


class PartitionStates:
    """The states of a home's partitions.

    deep: read every byte of files, copies and journals. verified: files that need not be read again; None:
    read every published file. meanings: of the current settings; computed once. stored: what is wrong in the
    store, a sentence for each asset and partition. assets: those of the settings unless given; of others
    nothing is called stale.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        *,
        meanings: Meanings | None = None,
        verified: VerifiedFiles | None = None,
        deep: bool = False,
        stored: Mapping[tuple[str, str], str] = MappingProxyType({}),
        assets: Sequence[AssetFolders] | None = None,
    ) -> None:
        self._stored = stored
        self._catalog = catalog
        self._ranges = {property_range.key: property_range for property_range in catalog.ranges}
        self._assets = settings.partitioned_assets if assets is None else assets
        self._named, self._computed = settings.partitioned_assets, settings.computed_assets
        self._described, self._embedded = settings.descriptions, settings.embeddings
        self._home = settings.layout
        self._conditions = {
            asked.asset.name: asked.settings.where
            for asked in question_sets(settings)
            if asked.settings.where is not None
        }
        self._workers = Workers(control_state(settings))
        self._verified = verified
        self._deep = deep
        self.meanings = meanings or Meanings.from_settings(settings)

    def all(
        self, advance: Callable[[int, int], None] = lambda done, partitions: None
    ) -> list[PartitionState]:
        """Every partition of every asset, upstream first, in the order of the catalogue.

        Of assets that the settings do not compute, such as embeddings without a model, only partitions that
        have a published file or a finding. advance: called with how many of the partitions were read.
        """
        running = {(worker.asset, worker.partition) for worker in self._workers.living()}
        touched = {asset.name: asset.touched_keys() for asset in self._assets}
        states: dict[str, list[PartitionState]] = {asset.name: [] for asset in self._assets}
        for number, property_range in enumerate(self._catalog.ranges):
            advance(number, len(self._catalog.ranges))
            described: PartitionState | None = None
            for asset in self._assets:
                is_running = (asset.name, property_range.key) in running
                in_doubt = (asset.name, property_range.key) in self._stored
                if property_range.key in touched[asset.name] or is_running or in_doubt:
                    texts_of = described if asset == self._embedded else None
                    state = self._state(asset, property_range, is_running=is_running, described=texts_of)
                else:
                    state = _untouched(asset, property_range)
                states[asset.name].append(state)
                described = state if asset == self._described else described
        for name in states.keys() - set(self._computed):
            states[name] = [state for state in states[name] if state.record or state.findings]
        return [state for asset in self._assets for state in states[asset.name]]

    def read(self, asset: str, key: str) -> PartitionState:
        """The state of one partition. Raises KeyError for an asset or a range that does not exist."""
        folders = {assets.name: assets for assets in self._assets}[asset]
        workers: list[Worker] = self._workers.living()
        is_running = any((worker.asset, worker.partition) == (asset, key) for worker in workers)
        return self._state(folders, self._ranges[key], is_running=is_running)

    def _state(
        self,
        asset: AssetFolders,
        property_range: PropertyRange,
        *,
        is_running: bool,
        described: PartitionState | None = None,
    ) -> PartitionState:
        """described: for embeddings, the state of their descriptions as it was read a moment ago."""
        files = PartitionFiles(asset, property_range.key)
        before: PartitionState | None = None
        for _ in range(_READINGS):
            reading = read_record(files)
            texts = described.record if described is not None else None
            state = self._read_once(asset, files, reading, property_range, is_running=is_running, texts=texts)
            # Whether it is stale follows from its record alone.
            is_odd = any(finding.kind is not FindingKind.STALE for finding in state.findings)
            has_moved = is_odd and read_record(files).content != reading.content
            # Rows are called lost if two looks say so: a commit or a publication may lie between.
            if not has_moved and (state.state is not State.LOST or state == before):
                break
            before, described = state, None
        return state

    def _read_once(
        self,
        asset: AssetFolders,
        files: PartitionFiles,
        reading: RecordReading,
        property_range: PropertyRange,
        *,
        is_running: bool,
        texts: PublishedRecord | None,
    ) -> PartitionState:
        state = self._compare_files(files, reading, _untouched(asset, property_range))
        if state.record is not None and asset not in self._named:
            state = replace(state, state=State.DONE)
        elif state.record is not None:
            state = self._staleness(asset, property_range, state, state.record, texts)
        elif not state.findings:
            state = self._unfinished(asset, state, check=not is_running)
        if sentence := self._stored.get((asset.name, property_range.key)):
            stored = finding_of(files, FindingKind.STORE, sentence, store_step())
            state = replace(state, findings=(*state.findings, stored))
        if is_running:
            rows = state.rows if state.record is None else committed_rows(asset, property_range.key)
            return replace(state, state=State.RUNNING, rows=rows)
        damage = worst(
            finding
            for finding in state.findings
            if not finding.kind.is_warning and finding.kind is not FindingKind.DESCRIPTIONS_DIFFER
        )
        if damage is not None and state.state is not State.LOST:
            return replace(state, state=State.DAMAGED, note=damage.text)
        if state.note is None and (finding := worst(state.findings)) is not None:
            return replace(state, note=finding.text)
        return state

    def _compare_files(
        self, files: PartitionFiles, reading: RecordReading, untouched: PartitionState
    ) -> PartitionState:
        """What is published, and what is wrong with it. untouched: the partition's state without a file."""
        versions = reading.newest
        record = versions.published if versions is not None else None
        is_settled = not reading.damaged and not reading.unsettled
        is_unchanged = (
            self._verified is not None
            and not self._deep
            and record is not None
            and is_settled
            and self._verified.is_unchanged(files, record)
        )
        newest, older, doubt = None, None, None
        try:
            if not is_unchanged:
                newest, older = files.put_back(reading.records)
        except RecordDamagedError as error:
            damaged = finding_of(files, FindingKind.RECORD, f"{error}")
            return replace(untouched, findings=(damaged,), countable=files.published.exists())
        except PutBackError as error:
            doubt = error
        if newest is not None and (place := files.whole_file(newest)) is not None:
            behind = (record_behind(files, newest, place),)
            countable = place == files.published
            return replace(untouched, rows=newest.rows, record=newest, findings=behind, countable=countable)
        if versions is None or (versions.published is None and versions.pending is None):
            lost = without_record(files, reading, newest)
            if lost is None:
                return untouched
            countable = lost.kind is not FindingKind.VANISHED and files.published.exists()
            return replace(untouched, findings=(lost,), countable=countable)
        findings = list(of_record(files, reading, versions))
        if newest is not None and older is not None:
            # Readers see the older version: the checks below are of it.
            versions = older
            findings = [put_back_finding(files, newest, older.published)]
        elif doubt is not None:
            findings = [finding_of(files, FindingKind.PUT_BACK, str(doubt))]
        record = files.peek() if versions.pending else versions.published
        if record is None:
            return replace(untouched, findings=tuple(findings))
        if is_unchanged:
            damage = None
        elif self._verified is None or newest is not None or doubt is not None:
            damage = judge(files.published, record, deep=True, asset=files.asset)
        else:
            damage = self._verified.judge(files, record)
        if damage is not None:
            findings.append(damage)
        elif record.rows != untouched.expected:
            sentence = (
                f"{counted(record.rows, 'rows were', 'row was')} published where the catalogue has"
                f" {untouched.expected}."
            )
            findings.append(
                finding_of(files, FindingKind.IDS, sentence, f"{command('repair')} computes it again.")
            )
        if not versions.pending:
            findings += of_copies(files, (record, *versions.previous), deep=self._deep)
        countable = damage is None or damage.kind in _COUNTABLE
        return replace(
            untouched, rows=record.rows, record=record, findings=tuple(findings), countable=countable
        )

    def _staleness(
        self,
        asset: AssetFolders,
        property_range: PropertyRange,
        state: PartitionState,
        record: PublishedRecord,
        texts: PublishedRecord | None,
    ) -> PartitionState:
        """The state with the parts of the fingerprint that changed since publication."""
        made_with: Mapping[str, str] = record.metadata.get("parts", {})
        meaning = self.meanings.of_asset(asset.name)
        now = {**meaning.parts, CATALOGUE_SLICE: self._catalog.slice_digest(property_range)}
        described = texts
        if asset.name == self._embedded.name and TEXTS in made_with:
            if described is None or described.metadata.get(TEXTS) != made_with[TEXTS]:
                # Read again: both may have been published since the descriptions were read.
                with contextlib.suppress(RecordDamagedError):
                    described = PartitionFiles(self._described, property_range.key).peek()
            now[TEXTS] = "" if described is None else str(described.metadata.get(TEXTS))
        if (where := self._conditions.get(asset.name)) is not None:
            digest = published_digest(where, self._home, property_range.key)
            now |= {} if digest is None else {LOOKED_AT: digest}
        # A model that cannot be read now says nothing of the condition either.
        changed = changed_parts(made_with, now if meaning.parts else {**made_with, **now})
        kind, sentence, step = FindingKind.STALE, "", f"{command('run', property_range.key)} makes it anew."
        if TEXTS in changed:
            kind = FindingKind.DESCRIPTIONS_DIFFER
            sentence, step = "Embeddings are published where no descriptions are.", ""
            if described is not None:
                sentence = (
                    "The embeddings were made from other texts than the descriptions published now have"
                    f" (version {described.sequence})."
                )
                step = "Materialize them: that is little work."
        elif follows_upstream(changed):
            kind = FindingKind.DESCRIPTIONS_DIFFER
            sentence = "The answers that its `where` looked at are not those published now."
            step = "Materialize it: what it answered to the same of them is kept."
        elif changed == (CATALOGUE_SLICE,):
            sentence = "The catalogue's rows of this range were updated after it was published."
            step = f"{command('run', property_range.key)} describes what changed."
        elif changed:
            others = (name.replace("_", " ") for name in changed if name != LOOKED_AT)
            sentence = f"It was made with another {', '.join(others)}."
        if asset.name == self._embedded.name:
            del now[CATALOGUE_SLICE]
        state = replace(state, state=State.DONE, fingerprint_now=Fingerprint(now).digest)
        if not changed:
            return state
        before = {WHERE: "all properties", **record.metadata.get(SETTINGS, {})}
        settings_now = {WHERE: "all properties", **meaning.settings}
        why = [
            changed_in_words(
                part,
                before,
                settings_now,
                (made_with.get(part, ""), now.get(part, "")),
                schema_too="schema" in changed,
            )
            for part in changed
            if part not in OF_THE_PARTITION
        ]
        images = CATALOGUE_SLICE in changed
        stale = finding_of(PartitionFiles(asset, property_range.key), kind, sentence, step)
        return replace(
            state,
            state=State.STALE,
            changed=changed,
            why=tuple(filter(None, why)),
            new_images=self._new_images(asset, property_range, made_with) if images else 0,
            findings=(*state.findings, stale),
        )

    def _new_images(
        self, asset: AssetFolders, property_range: PropertyRange, made_with: Mapping[str, str]
    ) -> int | None:
        """How many properties have other images than those that their rows were made of."""
        meaning = row_parts(made_with)
        path = asset.partition(property_range.key).published
        try:
            rows = pq.read_table(
                path,
                columns=["property_id", INPUTS],
                partitioning=None,
                filters=[("status", "!=", NOT_ASKED)],
            )
        except (OSError, pa.ArrowException):
            return None
        made_of = dict(zip(*(rows[name].to_pylist() for name in ("property_id", INPUTS)), strict=True))
        listed = self._catalog.slice(property_range)
        images = zip(*(listed[name].to_pylist() for name in ("property_id", "inputs_digest")), strict=True)
        return sum(
            1
            for property_id, now in images
            if (LOOKED_AT not in made_with or property_id in made_of)
            and made_of.get(property_id) != digest_of({"images": now, **meaning})
        )

    def _unfinished(self, asset: AssetFolders, state: PartitionState, *, check: bool) -> PartitionState:
        """The state of an unpublished partition: the rows that its journals hold, and lost ones."""
        try:
            journals = _journals(asset, state.key, deep=self._deep)
        except FormatVersionError as error:
            newer = Finding(FindingKind.JOURNAL, asset.name, state.key, str(error))
            return replace(state, state=State.LOST, findings=(newer,))
        rows = max((journal.rows for journal in journals), default=0)
        lost = [journal for journal in journals if journal.lost_rows or journal.troubles] if check else []
        if lost:
            findings = tuple(_lost_rows(asset, state.key, journal) for journal in lost)
            return replace(state, state=State.LOST, rows=rows, findings=findings)
        finished = [journal.generation for journal in journals if journal.rows >= state.expected]
        if finished and (refusal := Refusal.read(asset.partition(state.key), finished)) is not None:
            checks = "; ".join(f"{check}: {sentence}" for check, sentence in refusal.checks.items())
            return replace(state, state=State.REFUSED, rows=rows, note=f"{MEANING[State.REFUSED]}: {checks}")
        return replace(state, state=State.INTERRUPTED if rows else State.NOT_STARTED, rows=rows)


def _untouched(asset: AssetFolders, property_range: PropertyRange) -> PartitionState:
    """A partition of which there is no file at all."""
    published = asset.partition(property_range.key).published
    return PartitionState(
        asset.name, property_range.key, published, State.NOT_STARTED, 0, len(property_range)
    )


def _journals(asset: AssetFolders, key: str, *, deep: bool) -> list[JournalInspection]:
    paths = asset.partition(key)
    return inspect_journals(paths.journals, paths.high_water_marks, key, deep=deep)


def committed_rows(asset: AssetFolders, key: str) -> int:
    """Committed rows of a partition's unfinished work that are on disk; the most of any generation."""
    return max((journal.rows for journal in _journals(asset, key, deep=False)), default=0)


def _lost_rows(asset: AssetFolders, key: str, journal: JournalInspection) -> Finding:
    why = f": {'; '.join(journal.troubles)}" if journal.troubles else ""
    sentence = (
        f"{counted(journal.promised, 'rows are', 'row is')} committed, and its journal (generation"
        f" {journal.generation}) holds {journal.rows} of them{why}. A start stops before it computes"
        " anything."
    )
    step = f"Put the files back, or give the rows up: {accept_loss_command(key)}."
    folder = asset.partition(key).journal(journal.generation)
    return Finding(FindingKind.JOURNAL, asset.name, key, sentence, step, str(folder))
