"""The audit: what is on disk against the catalogue, for every partition of every asset.

It adds the rows (``vlm_assets/assets/row_counts.py``), foreign files, and what extensions find in their own
files, to the states of partitions (``vlm_assets/assets/partition_state.py``).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa

from vlm_assets.assets.fingerprint import OF_THE_PARTITION
from vlm_assets.assets.partition_state import PartitionState, PartitionStates, State
from vlm_assets.assets.row_counts import Counted, RowCounts, RowsFile, count_rows
from vlm_assets.config.extensions import installed
from vlm_assets.config.settings import Settings
from vlm_assets.services.kept_assets import assets_in_store, kept_assets, removed_set_finding
from vlm_assets.services.progress import doing
from vlm_assets.services.store_contents import store_findings
from vlm_assets.services.store_looks import store_looks, store_unread
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import is_tombstone
from vlm_catalog.ranges import CATALOG
from vlm_catalog.withdrawn_ids import WithdrawnListError, lost_list, read_withdrawn
from vlm_durable.commands import command
from vlm_durable.files.files import TEMPORARY_SUFFIX
from vlm_durable.files.layout import AssetFolders
from vlm_durable.mirror.bucket import StoreError
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.partition_findings import stray_files
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_durable.wording import counted

_RANGES_TOGETHER = 100
"""Slices of the catalogue handed to DuckDB at a time."""


@dataclass(frozen=True)
class PartitionAudit:
    """One partition of one asset. version, fingerprint: of what is published; None where nothing is.

    note: a sentence about its state.
    """

    asset: str
    key: str
    state: State
    counts: RowCounts
    version: int | None
    fingerprint: str | None
    note: str | None = None


@dataclass(frozen=True)
class Audit:
    """The verdict on a home. Findings that are no warnings make it wrong."""

    home: str
    deep: bool
    assets: tuple[str, ...]
    partitions: tuple[PartitionAudit, ...]
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """What is wrong."""
        return tuple(finding for finding in self.findings if not finding.kind.is_warning)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What is worth knowing, with all published rows sound."""
        return tuple(finding for finding in self.findings if finding.kind.is_warning)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; partitions may still be missing."""
        return not self.wrong

    def total(self, asset: str) -> RowCounts:
        """The counts of all partitions of an asset."""
        counts = (partition.counts for partition in self.partitions if partition.asset == asset)
        return sum(counts, RowCounts())

    def partitions_in(self, asset: str, state: State) -> int:
        """How many partitions of an asset are in a state."""
        return sum(partition.asset == asset and partition.state is state for partition in self.partitions)

    def verdict(self) -> str:
        """The whole audit in one or two sentences."""
        read = (
            "every byte read"
            if self.deep
            else f"sizes, ids and changed files read; {command('audit', '--deep')} reads every byte"
        )
        incomplete = sum(partition.version is None for partition in self.partitions)
        not_published = (
            f" {incomplete} of {counted(len(self.partitions), 'partitions are', 'partition is')} not"
            " published yet."
            if incomplete
            else ""
        )
        if not self.ok:
            damaged = {(finding.asset, finding.key) for finding in self.wrong if finding.key is not None}
            return (
                f"WRONG: {len(self.wrong)} found, {len(damaged)} of"
                f" {counted(len(self.partitions), 'partitions')} wrong ({read})."
                f"{not_published} {command('repair')} says what it would do."
            )
        if incomplete == len(self.partitions):
            return f"Nothing is published yet, and nothing is wrong ({read})."
        has_left_out = any(partition.counts.not_asked for partition in self.partitions)
        statuses = "ok, failed or not asked" if has_left_out else "ok or failed"
        return (
            f"Conserved: every published id is there once, {statuses}, and no other ({read}).{not_published}"
        )

    def as_json(self) -> dict[str, object]:
        """Everything, for machines."""
        return {
            "home": self.home,
            "deep": self.deep,
            "ok": self.ok,
            "totals": {
                asset: {
                    **{
                        name: count
                        for name, count in asdict(self.total(asset)).items()
                        if name != "first_ids"
                    },
                    "partitions": {state.value: self.partitions_in(asset, state) for state in State},
                }
                for asset in self.assets
            },
            "wrong": [asdict(finding) for finding in self.wrong],
            "warnings": [asdict(finding) for finding in self.warnings],
            "partitions": [asdict(partition) for partition in self.partitions],
        }


def audit(settings: Settings, catalog: Catalog, *, deep: bool = False) -> Audit:
    """Audit a home, changing nothing but the note of what was verified. Raises CatalogError.

    deep: read every byte of files, copies and journals; otherwise of the files that changed since they were
    verified, or were verified long ago.
    """
    keys = frozenset(range_.key for range_ in catalog.ranges)
    verified = VerifiedFiles(settings.state_directory, seconds=math.inf)
    assets, stored, of_store = _look_at_store(settings, deep=deep)
    partition_states = PartitionStates(
        settings, catalog, assets=assets, verified=verified, deep=deep, stored=stored
    )
    states = partition_states.all(partial(doing, "looking at the files and journals of partitions"))
    verified.save()
    files = [
        RowsFile(state.asset, state.key, state.path, state.record.fingerprint if state.record else None)
        for state in states
        if state.countable
    ]
    advance = partial(doing, "comparing ids with the catalogue's, files")
    counts_of = count_rows(_expected(catalog), files, vectors=deep, advance=advance)
    findings: list[Finding] = []
    partitions: list[PartitionAudit] = []
    for state in states:
        of_rows = list(_row_findings(state, counts_of))
        # The rows themselves say more than their number.
        of_files = [
            finding for finding in state.findings if not (of_rows and finding.kind is FindingKind.IDS)
        ]
        findings += [*of_files, *of_rows]
        partitions.append(_partition(state, of_rows, counts_of))
    for asset in assets:
        findings += foreign_files(asset, keys)
        if asset in settings.partitioned_assets:
            findings += _settings_differ(asset.name, states)
        else:
            findings.append(removed_set_finding(asset))
    findings += _withdrawn(settings, catalog)
    for extension in installed():
        findings += extension.findings(settings, deep=deep)
    findings += of_store
    names = tuple(asset.name for asset in assets)
    return Audit(str(settings.home), deep, names, tuple(partitions), tuple(findings))


def _look_at_store(
    settings: Settings, *, deep: bool
) -> tuple[tuple[AssetFolders, ...], dict[tuple[str, str], str], list[Finding]]:
    """The assets to audit; what is wrong with their published files in the store, by asset and partition; and
    the store's other findings."""
    stored: dict[tuple[str, str], str] = {}
    try:
        in_store = assets_in_store(settings)
        for asset, looks in store_looks(settings, in_store).items():
            looks.inspect(deep=deep, advance=partial(doing, f"looking at partitions of {asset} in the store"))
            stored |= {(asset, key): trouble for key, trouble in looks.troubles().items()}
        of_store = list(store_findings(settings, in_store, deep=deep))
        return kept_assets(settings, settings.mirror), stored, of_store
    except StoreError as error:
        return kept_assets(settings), stored, [store_unread(settings, str(error))]


def _expected(catalog: Catalog) -> Iterator[pa.Table]:
    """The ids of all ranges with their keys, many ranges together, each slice verified against its digest."""
    slices = (
        table.select(["ordinal", "property_id"]).add_column(0, "key", pa.repeat(range_.key, table.num_rows))
        for range_, table in catalog.slices()
    )
    for done in range(0, len(catalog.ranges), _RANGES_TOGETHER):
        doing("reading the catalogue's ids, partitions", done, len(catalog.ranges))
        yield pa.concat_tables(islice(slices, _RANGES_TOGETHER))


def _partition(partition: PartitionState, of_rows: Sequence[Finding], counts_of: Counted) -> PartitionAudit:
    counts = counts_of.counts.get((partition.asset, partition.key))
    state, note = partition.state, partition.note
    if of_rows and state is not State.RUNNING:
        # The rows alone tell: their file is what was published.
        state, note = State.DAMAGED, note or of_rows[0].text
    if counts is None and state is State.DAMAGED:
        counts = RowCounts(expected=partition.expected, missing=partition.expected)
    elif partition.record is None:
        counts = counts or RowCounts(expected=partition.expected, not_yet=partition.expected)
    record = partition.record
    return PartitionAudit(
        asset=partition.asset,
        key=partition.key,
        state=state,
        counts=counts or RowCounts(expected=partition.expected),
        version=record.sequence if record else None,
        fingerprint=record.fingerprint if record else None,
        note=note,
    )


def _row_findings(partition: PartitionState, counts_of: Counted) -> Iterator[Finding]:
    def finding(kind: FindingKind, sentence: str) -> Finding:
        step = f"{command('repair')} restores the file or computes it again."
        return Finding(kind, partition.asset, partition.key, sentence, step, str(partition.path))

    reason = counts_of.uncounted.get((partition.asset, partition.key))
    if reason is not None:
        yield finding(FindingKind.COLUMNS, f"The rows of {partition.path} cannot be counted: {reason}.")
    counts = counts_of.counts.get((partition.asset, partition.key))
    if counts is None:
        return
    first = f" First: {', '.join(map(repr, counts.first_ids))}." if counts.first_ids else ""
    if not counts.conserved:
        deviations = ", ".join(
            f"{number} {name}"
            for number, name in (
                (counts.missing, "missing"),
                (counts.duplicate, "duplicate"),
                (counts.foreign, "foreign"),
                (counts.unsettled, "neither ok nor failed"),
                (counts.misnumbered, "with another ordinal"),
            )
            if number
        )
        sentence = (
            f"{counted(counts.expected, 'ids')} expected, {counted(counts.rows, 'rows')} found:"
            f" {deviations}.{first}"
        )
        yield finding(FindingKind.IDS, sentence)
    if counts.mixed:
        sentence = (
            f"{counted(counts.mixed, 'rows carry', 'row carries')} another fingerprint than the"
            f" file's record.{first}"
        )
        yield finding(FindingKind.MIXED, sentence)
    if counts.unlike:
        sentence = (
            f"{counted(counts.unlike, 'ids differ', 'id differs')} from the published descriptions.{first}"
        )
        yield finding(FindingKind.DESCRIPTIONS_DIFFER, sentence)


def _settings_differ(asset: str, states: Sequence[PartitionState]) -> Iterator[Finding]:
    """A warning where partitions of one asset were made with different settings."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for state in states:
        if state.asset == asset and state.record is not None:
            parts: Mapping[str, str] = state.record.metadata.get("parts", {})
            groups[tuple(sorted(p for p in parts.items() if p[0] not in OF_THE_PARTITION))].append(state.key)
    if len(groups) < 2:
        return
    differing = sorted(
        name
        for name in {name for parts in groups for name, _ in parts}
        if len({dict(parts).get(name) for parts in groups}) > 1
    )
    shares = "; ".join(
        f"{len(keys)} like {keys[0]}" for keys in sorted(groups.values(), key=len, reverse=True)
    )
    sentence = (
        f"Partitions were made with {counted(len(groups), 'different settings')}"
        f" ({', '.join(differing)} differ):"
        f" {shares}."
    )
    step = f"{command('run', '--stale')} makes those anew that are not of the settings now."
    yield Finding(FindingKind.SETTINGS_DIFFER, asset, None, sentence, step)


def _withdrawn(settings: Settings, catalog: Catalog) -> Iterator[Finding]:
    """Withdrawn properties that are in the catalogue all the same, and a list of them that is lost."""
    try:
        withdrawn = read_withdrawn(settings.home)
    except WithdrawnListError as error:
        yield Finding(FindingKind.WITHDRAWN, CATALOG, None, str(error))
        return
    tombstones, returned = 0, list[str]()
    for _, table in catalog.slices(with_tail=True):
        for property_id in table["property_id"].to_pylist():
            tombstones += is_tombstone(property_id)
            if withdrawn is not None and property_id in withdrawn:
                returned.append(property_id)
    if withdrawn is None and tombstones:
        lost = str(lost_list(settings.home, tombstones))
        yield Finding(FindingKind.WITHDRAWN, CATALOG, None, lost)
    if returned:
        sentence = (
            f"{counted(len(returned), 'properties')} that were withdrawn are in the catalogue again, such as"
            f" {returned[0]!r}: an older one was put back."
        )
        step = f"{command('withdraw')} withdraws them again."
        yield Finding(FindingKind.WITHDRAWN, CATALOG, None, sentence, step)


def foreign_files(asset: AssetFolders, keys: Collection[str]) -> Iterator[Finding]:
    """What lies in an asset's folders and belongs to no partition of the catalogue."""
    yield from stray_files(asset, keys)
    strange = (
        path for path in _entries(asset.published) if path.suffix != ".parquet" or path.name.startswith(".")
    )
    yield from (_unknown(asset.name, path) for path in strange)
    all_keys = asset.recorded_keys().union(keys)
    for folder, pattern in (
        (asset.versions, r"(?P<key>[^.]+)(\.copy)?\.json|(?P<version_of>[^.]+)\.[012]\.parquet"),
        (asset.staging, rf"\.(?P<key>[^.]+)\..*{re.escape(TEMPORARY_SUFFIX)}"),
        (asset.journals, r"(?P<key>.+)"),
    ):
        for path in _entries(folder):
            match = re.fullmatch(pattern, path.name)
            owners = match.groupdict() if match else {}
            if not all_keys.intersection(filter(None, owners.values())):
                yield _unknown(asset.name, path)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _unknown(asset: str, path: Path) -> Finding:
    sentence = f"{path} belongs to no partition."
    return Finding(FindingKind.UNKNOWN_FILE, asset, None, sentence, path=str(path))
