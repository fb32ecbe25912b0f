"""The table of described properties: an Apache Iceberg table with one commit for each published partition.

A partition is written once its vectors are of its descriptions. Which version of it the table has, the table
itself says: the column ``source`` of its file. ``iceberg_files.py`` knows the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, ValidationError
from pyiceberg.io.pyarrow import _dataframe_to_data_files, _pyarrow_to_schema_without_ids
from pyiceberg.manifest import ManifestFile
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import assign_fresh_schema_ids
from pyiceberg.table import StaticTable, Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update import AssertTableUUID, RemoveSnapshotsUpdate
from pyiceberg.table.update.snapshot import _ManifestMergeManager, _OverwriteFiles
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import StringType

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.partition import NOT_ASKED
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import is_tombstone
from vlm_catalog.ranges import PropertyRange
from vlm_durable.commands import command, given_command
from vlm_durable.files.files import make_directory, set_aside
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.mirror.bucket import Place, S3Folder
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.wording import counted
from vlm_results.changes import Change, Rows, compared, row_of, time_of, vector_bytes
from vlm_results.exported_images import ExportedImages, Images
from vlm_results.exported_rows import ExportedRows, in_order
from vlm_results.guarantee import Guarantee
from vlm_results.iceberg_files import (
    DurableFileIO,
    files_in,
    location_of,
    lost_files,
    named_files,
    remove_unnamed,
    states_among,
)
from vlm_results.joined_rows import SETS, further_records, lacking_sentences
from vlm_results.known_tables import NAME, refuse_away, remember, versions_in
from vlm_results.published_table import are_vectors_of, lacking_rows, published_records
from vlm_results.results_settings import ResultsSettings

NAMESPACE: Final = "vlm_assets"
RANGE: Final = "range"
SOURCE: Final = "source"

RECENT_SNAPSHOTS: Final = 50
DAILY_SNAPSHOTS: Final = 50
"""The newest snapshots are kept, and before them the last one of as many days."""

LOCK_SECONDS: Final = 300.0
"""Longest wait for another process, which holds the lock for one partition, or while it removes files."""

_TRIES: Final = 5
"""Commits of a partition beside a program that does not know our lock, such as Spark's maintenance."""

_FORMAT: Final = 1
"""The format of the rows: with another one each partition is written anew."""

_CATALOG_ID: Final = "vlm-assets.catalog-id"
_PROPERTIES: Final = {
    "format-version": "2",
    # A manifest outlives a file: with the least and greatest texts of it, it could name a withdrawn property.
    "write.metadata.metrics.default": "none",
    "write.metadata.metrics.column.ordinal": "full",
    f"write.metadata.metrics.column.{RANGE}": "full",
    f"write.metadata.metrics.column.{SOURCE}": "full",
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.target-size-bytes": str(512 << 10),
    "write.metadata.previous-versions-max": "20",
    "write.metadata.delete-after-commit.enabled": "true",
}
_UNREADABLE: Final = (ValidationError, OSError, ValueError, EOFError, LookupError, AssertionError)
"""What pyiceberg raises for a file that is gone or damaged."""


class _OtherTypesError(Exception):
    """A column of the table has a type that cannot become the rows' type."""


@dataclass(frozen=True)
class BroughtUpToDate:
    """The table after it was brought up to date.

    written: partitions that were committed. waiting: partitions whose vectors are not of their descriptions
    yet; the table has their version before, if any. other_types: partitions whose fields have other types
    than the table's. lacking: described properties without a row of a further question set, by its name.
    removed: files that nothing named any more. snapshot: the id of the current one.
    """

    folder: str
    table: str
    rows: int
    partitions: int
    written: int
    waiting: tuple[str, ...]
    other_types: tuple[str, ...]
    lacking: Mapping[str, int]
    removed: int
    snapshots: int
    snapshot: int | None

    def sentences(self) -> Iterator[str]:
        """What is not in the table yet, and what to do."""
        if self.waiting:
            yield (
                f"{counted(len(self.waiting), 'partitions wait', 'partition waits')} for vectors of their"
                f" descriptions, such as {self.waiting[0]}: {command('run')}."
            )
        if self.other_types:
            yield (
                f"{counted(len(self.other_types), 'partitions have', 'partition has')} fields of other types"
                f" than the newest, such as {self.other_types[0]}: materialize them with the newest schema."
            )
        yield from lacking_sentences(self.lacking)


@dataclass(frozen=True)
class TablePlace:
    """A folder that holds the table.

    catalog_url: the database of its catalogue; None: SQLite in the folder, which is on disk then.
    """

    folder: Place
    catalog_url: str | None = None

    @classmethod
    def from_settings(cls, settings: Settings, folder: Place | None = None) -> TablePlace:
        """The table in a folder, or the asset's own, whose catalogue the settings name."""
        of_results = ResultsSettings.part_of(settings)
        own = of_results.described_table
        folder = own if folder is None else folder.absolute() if isinstance(folder, Path) else folder
        secret = of_results.table_catalog or settings.state_url
        return cls(folder, secret.get_secret_value() if secret is not None and folder == own else None)

    @property
    def disk(self) -> Path:
        """The folder where the catalogue and the lock are beside the table. Raises CommandError: on S3."""
        if isinstance(self.folder, S3Folder):
            raise CommandError(
                f"The catalogue of a table on S3 is in Postgres: set {PREFIX}TABLE_CATALOG, and {PREFIX}TABLE"
                f" to {self.folder}."
            )
        return self.folder

    @contextmanager
    def opened(self) -> Iterator[DescribedTable]:
        """The table, with a catalogue that works. Raises CommandError."""
        if self.catalog_url is None:
            make_directory(self.disk)
        try:
            with ExitStack() as stack:
                try:
                    catalogue = stack.enter_context(self._catalogue())
                except (sa.exc.IntegrityError, sa.exc.ProgrammingError):
                    # Another process made its tables at the same moment.
                    catalogue = stack.enter_context(self._catalogue())
                except sa.exc.DatabaseError as error:
                    if self.catalog_url is not None or isinstance(error, sa.exc.OperationalError):
                        raise
                    # It is no database any more. All that it had is the name of the table's newest state.
                    set_aside(self.sqlite, self.disk / ".quarantine")
                    catalogue = stack.enter_context(self._catalogue())
                yield DescribedTable(self, catalogue)
        except sa.exc.SQLAlchemyError as error:
            raise CommandError(
                f"The catalogue of the table in {self.folder} failed ({str(error).splitlines()[0]})."
                " The table is as its last commit left it. Do it again once the database works."
            ) from error

    @contextmanager
    def _catalogue(self) -> Iterator[SqlCatalog]:
        implementation = f"{DurableFileIO.__module__}.{DurableFileIO.__name__}"
        url = self.catalog_url or f"sqlite:///{self.sqlite}"
        with closing(SqlCatalog(NAMESPACE, uri=url, **{"py-io-impl": implementation})) as catalogue:
            catalogue.create_namespace_if_not_exists(NAMESPACE)
            yield catalogue

    @property
    def sqlite(self) -> Path:
        """The catalogue's file, where no database keeps it."""
        return self.disk / "catalog.db"

    def read(self) -> Table:
        """The table, to be read. Raises CommandError where there is none."""
        table = None
        if versions_in(self.folder):
            with self.opened() as described:
                table = described.current()
        if table is None:
            raise CommandError(f"There is no table in {self.folder}.")
        return table


class DescribedTable:
    """The table of an open catalogue. has_withdrawn: whether a commit took withdrawn properties out of it."""

    def __init__(self, place: TablePlace, catalogue: SqlCatalog) -> None:
        self._place = place
        self._catalogue = catalogue
        self._lock_connection: sa.Connection | None = None
        self.has_withdrawn = False

    def bring_up_to_date(self, rows: ExportedRows) -> BroughtUpToDate:
        """Write the partitions that changed, a commit each, and remove what nothing names any more.

        Raises CommandError, PublishedError, OSError.
        """
        described = published_records(rows.settings.descriptions, rows.catalog)
        embedded = published_records(rows.settings.embeddings, rows.catalog)
        if not described:
            raise CommandError(f"No description is published yet: {command('run')}.")
        rows.images.refuse_away()
        self.put_right(rows.catalog)
        removed = self.remove_unnamed()
        sources = self.sources()
        newest = max(described.values(), key=lambda record: record.published_at).key
        written, waiting, other_types = 0, [], []
        for number, (key, record) in enumerate(described.items()):
            doing("writing partitions into the table", number, len(described))
            further = further_records(rows.settings, key)
            if sources.get(key) == _source(rows, key, record, embedded.get(key), further):
                continue
            if not _is_complete(rows.settings, record, embedded.get(key)):
                waiting.append(key)
                self.drop_withdrawn(rows.catalog, key)
                continue
            try:
                written += self.write(rows, key)
            except _OtherTypesError as error:
                if key != newest:
                    other_types.append(key)
                    self.drop_withdrawn(rows.catalog, key)
                    continue
                self._begin_anew()
                doing(f"a new table begins: {error}")
                return self.bring_up_to_date(rows)
        if self.has_withdrawn:
            removed += self.remove_unnamed()
        table = self.current()
        snapshot = None if table is None else table.current_snapshot()
        total = 0 if snapshot is None or snapshot.summary is None else snapshot.summary["total-records"]
        return BroughtUpToDate(
            folder=str(self._place.folder),
            table=f"{NAMESPACE}.{NAME}",
            rows=int(total or 0),
            partitions=len(self.sources()),
            written=written,
            waiting=tuple(waiting),
            other_types=tuple(other_types),
            lacking=lacking_rows(
                rows.settings, rows.catalog, {key: record.rows for key, record in described.items()}
            ),
            removed=removed,
            snapshots=0 if table is None else len(table.snapshots()),
            snapshot=None if snapshot is None else snapshot.snapshot_id,
        )

    def current(self) -> Table | None:
        """The table as its catalogue has it now."""
        return self._load(NAME)

    def sources(self) -> dict[str, str]:
        """What each partition that the table has was made from."""
        table = self.current()
        return {} if table is None else _sources(table)

    def write(self, rows: ExportedRows, key: str) -> bool:
        """Write a partition as it is published. Returns False where another process did, or it changed.

        Raises _OtherTypesError, CommandError, PublishedError, OSError.
        """
        with self._locked():
            exported, read = rows.read(key)
            source = _source(rows, key, read.described, read.embedded, read.further_records)
            table = self.current()
            if table is not None and _sources(table, key).get(key) == source:
                return False
            if not _is_complete(rows.settings, read.described, read.embedded):
                return False
            exported, _ = rows.images.place(exported, key)
            exported = _as_table_rows(in_order(exported), key, source)
            if table is None:
                table = self._create(rows.catalog, exported.schema)
                remember(rows.settings, self._place.folder)
            ordinals = _withdrawn_ordinals(rows.catalog, key)
            withdraws = bool(_rows_of_withdrawn(table, key, ordinals))
            self._commit(
                table,
                key,
                exported,
                {"vlm-assets.source": source, "vlm-assets.sequence": str(read.described.sequence)},
                expires_all=withdraws,
            )
        return True

    def drop_withdrawn(self, catalog: Catalog, key: str) -> None:
        """Take withdrawn properties out of a partition, and expire all snapshots that had them."""
        ordinals = _withdrawn_ordinals(catalog, key)
        if not ordinals:
            return
        with self._locked():
            for name in self._names():
                table = self._load(name)
                if table is None or not _rows_of_withdrawn(table, key, ordinals):
                    continue
                kept = table.scan(row_filter=_of_range(key)).to_arrow()
                kept = kept.filter(pc.invert(pc.is_in(kept["ordinal"], pa.array(ordinals, pa.int64()))))
                self._commit(table, key, kept, {"vlm-assets.source": "withdrawal"}, expires_all=True)

    def remove_unnamed(self) -> int:
        """Remove files that nothing names: of expired snapshots, or left by a kill. Returns how many."""
        removed = 0
        with self._locked():
            for name, version in self._names().items():
                table = self._load(name)
                if table is not None:
                    removed += remove_unnamed(self._place.folder, version, named_files(table))
                elif not states_among(files_in(self._place.folder, version)):
                    # A process was killed before this table had a first state: no other run goes on with it.
                    removed += remove_unnamed(self._place.folder, version, set())
        return removed

    def _names(self) -> dict[str, str]:
        """The name of each table, and of its folder: those that were followed are called as their folders."""
        versions = versions_in(self._place.folder)
        names = {version: version for version in versions[:-1]}
        for version in versions[-1:]:
            names[version if self._is_entered(version) else NAME] = version
        return names

    def _is_entered(self, name: str) -> bool:
        return (NAMESPACE, name) in self._catalogue.list_tables(NAMESPACE)

    def _load(self, name: str) -> Table | None:
        """The table of this name. Raises CommandError where the catalogue has a table of another folder."""
        self._refuse_another_folder(name)
        try:
            return self._catalogue.load_table((NAMESPACE, name))
        except NoSuchTableError:
            return None

    def _refuse_another_folder(self, name: str) -> None:
        """The catalogue's entry says it: the other folder may be on a disk that is not there now."""
        of_table = (IcebergTables.catalog_name == NAMESPACE, IcebergTables.table_namespace == NAMESPACE)
        entry = sa.select(IcebergTables.metadata_location).where(*of_table, IcebergTables.table_name == name)
        with self._catalogue.engine.connect() as connection:
            location = connection.scalar(entry)
        folder = self._place.folder
        # FOLDER/described_properties_1/metadata/STATE.metadata.json
        other = None if location is None else location.rsplit("/", 3)[0]
        if other is None or other == location_of(folder):
            return
        if self._place.catalog_url is None:
            raise _moved(folder, other)
        raise CommandError(
            f"The catalogue of the table in {folder} has the table in {other}, and a catalogue has one table."
            f" Nothing was changed. Set {PREFIX}TABLE_CATALOG to a database of this home's own; or, if both"
            f" are one table, {PREFIX}TABLE to {other}."
        )

    def put_right(self, catalog: Catalog) -> None:
        """Enter into the catalogue what it lost; refuse a table of another catalogue of properties."""
        with self._locked():
            for name, version in self._names().items():
                files = files_in(self._place.folder, version)
                if not states_among(files):
                    continue
                try:
                    table = self._load(name)
                    is_whole = table is not None and not lost_files(table, files)
                except _UNREADABLE:
                    table, is_whole = None, False
                if not is_whole:
                    table = self._entered_again(name, version, files)
                assert table is not None
                if table.properties.get(_CATALOG_ID) != catalog.catalog_id:
                    raise CommandError(
                        f"{self._place.folder} holds the table of another catalogue than {catalog.path}: name"
                        " another folder."
                    )

    def _entered_again(self, name: str, version: str, files: dict[str, float]) -> Table:
        """Enter the newest state of a table whose files are all there; what it lacks is written again.

        Raises CommandError: no state is whole, or the table was moved.
        """
        folder = self._place.folder
        for location in states_among(files):
            try:
                state = StaticTable.from_metadata(location, self._catalogue.properties)
                is_whole = not lost_files(state, files)
            except _UNREADABLE:
                continue
            if state.location() != f"{location_of(folder)}/{version}":
                raise _moved(folder, state.location())
            if is_whole:
                if self._is_entered(name):
                    self._catalogue.drop_table((NAMESPACE, name))
                return self._catalogue.register_table((NAMESPACE, name), location)
        raise CommandError(
            f"No state of the table in {folder} has all of its files. Remove {version} there, and catalog.db"
            " if it is there, and do it again: the table is written anew from what is published, without its"
            " earlier snapshots."
        )

    def _begin_anew(self) -> None:
        """Keep the table under the name of its folder; the next partition begins another one."""
        with self._locked():
            followed = versions_in(self._place.folder)[-1]
            if self._is_entered(NAME) and not self._is_entered(followed):
                self._catalogue.rename_table((NAMESPACE, NAME), (NAMESPACE, followed))

    def _create(self, catalog: Catalog, rows: pa.Schema) -> Table:
        versions = versions_in(self._place.folder)
        number = 1 + (int(versions[-1].rpartition("_")[2]) if versions else 0)
        schema = assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(rows))
        by_range = PartitionField(
            schema.find_field(RANGE).field_id, PARTITION_FIELD_ID_START, IdentityTransform(), RANGE
        )
        return self._catalogue.create_table(
            (NAMESPACE, NAME),
            schema,
            location=f"{location_of(self._place.folder)}/{NAME}_{number}",
            partition_spec=PartitionSpec(by_range),
            properties={**_PROPERTIES, _CATALOG_ID: catalog.catalog_id},
        )

    def _commit(
        self,
        table: Table,
        key: str,
        rows: pa.Table,
        summary: Mapping[str, str],
        *,
        expires_all: bool,
    ) -> None:
        """Put these rows in the place of a partition's, in one snapshot. Raises _OtherTypesError, OSError.

        expires_all: the snapshots before are gone with the same step.
        """
        for _ in range(_TRIES):
            replaced = [task.file for task in table.scan(row_filter=_of_range(key)).plan_files()]
            transaction = Transaction(table)
            try:
                with transaction.update_schema() as update:
                    update.union_by_name(rows.schema)
            except ValidationError as error:
                raise _OtherTypesError(str(error)) from error
            commit = _Replacement(
                Operation.OVERWRITE if replaced else Operation.APPEND,
                transaction,
                table.io,
                snapshot_properties={"vlm-assets.range": key, **summary},
            )
            for file in _dataframe_to_data_files(
                transaction.table_metadata, rows, table.io, write_uuid=commit.commit_uuid
            ):
                commit.append_data_file(file)
            for file in replaced:
                commit.delete_data_file(file)
            updates, requirements = commit._commit()
            expired = _expired(table.metadata, everything=expires_all)
            if self._lock_connection is not None:
                self._lock_connection.execute(sa.select(1))  # The lock is lost with its connection.
            self.has_withdrawn |= expires_all
            try:
                self._catalogue.commit_table(
                    table,
                    (*requirements, AssertTableUUID(uuid=table.metadata.table_uuid)),
                    (
                        *transaction._updates,
                        *updates,
                        *([RemoveSnapshotsUpdate(snapshot_ids=expired)] if expired else []),
                    ),
                )
            except CommitFailedException:
                table = self._catalogue.load_table(table.name())
            else:
                return
        raise CommandError(
            f"The table in {self._place.folder} changes all the time. Nothing of {key} was written."
            " Do it again once the other program is done."
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only one of our processes, on all machines, that writes. Raises CommandError."""
        folder = self._place.folder
        busy = CommandError(f"Another process has written into {folder} for minutes. Do it again later.")
        if self._place.catalog_url is None:
            lock = acquire_lock(self._place.disk / ".lock", seconds=LOCK_SECONDS)
            if lock is None:
                raise busy
            with closing(lock):
                yield
            return
        number = int.from_bytes(hashlib.sha256(str(folder).encode()).digest()[:8], signed=True)
        # Without a pool the connection is closed at the end, and with it the database frees the lock.
        engine = sa.create_engine(
            self._place.catalog_url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT"
        )
        with engine.connect() as connection:
            connection.execute(sa.text(f"SET lock_timeout = {LOCK_SECONDS * 1000:.0f}"))
            try:
                connection.execute(sa.select(sa.func.pg_advisory_lock(number)))
            except sa.exc.OperationalError as error:
                raise busy from error
            self._lock_connection = connection
            try:
                yield
            finally:
                self._lock_connection = None


def _moved(folder: Place, made_in: str) -> CommandError:
    return CommandError(
        f"The table in {folder} was made in {made_in}, and its files name each other by whole paths. Name the"
        " folder as it was named then, or move it back; or remove it, and do it again: it is written anew"
        " from what is published, without earlier snapshots."
    )


class _Replacement(_OverwriteFiles):
    """One snapshot in which a partition's new file takes the place of its old one."""

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        """The manifests without what earlier snapshots removed, and merged: each commit adds one."""
        manifests = [
            manifest
            for manifest in manifests
            if manifest.has_added_files()
            or manifest.has_existing_files()
            or manifest.added_snapshot_id == self._snapshot_id
        ]
        properties = self._transaction.table_metadata.properties
        merging = _ManifestMergeManager(
            target_size_bytes=int(properties["commit.manifest.target-size-bytes"]),
            min_count_to_merge=100,
            merge_enabled=True,
            snapshot_producer=self,
        )
        return merging.merge_manifests(manifests)


def _is_complete(settings: Settings, described: PublishedRecord, embedded: PublishedRecord | None) -> bool:
    """Whether the vectors are those of the descriptions; without an embedding model there need be none."""
    if embedded is None:
        return settings.embeddings.name not in settings.computed_assets
    return are_vectors_of(embedded, described)


def _source(
    rows: ExportedRows,
    key: str,
    described: PublishedRecord,
    embedded: PublishedRecord | None,
    further: Mapping[str, PublishedRecord],
) -> str:
    """A digest of all that the rows of a partition are made from."""
    return digest_of([_FORMAT, *rows.images.question, rows.sources(key, described, embedded, further)])


def _as_table_rows(exported: pa.Table, key: str, source: str) -> pa.Table:
    """The rows with their partition and source, and vectors of any width."""
    at = exported.schema.get_field_index("embedding")
    vectors = exported["embedding"].cast(pa.list_(pa.float32()))
    exported = exported.set_column(at, "embedding", vectors)
    for name, value in ((SOURCE, source), (RANGE, key)):
        exported = exported.add_column(0, name, pa.array([value] * exported.num_rows, pa.string()))
    return exported


def _sources(table: Table, key: str | None = None) -> dict[str, str]:
    column = table.schema().find_field(SOURCE).field_id
    scan = table.scan() if key is None else table.scan(row_filter=_of_range(key))
    sources: dict[str, str] = {}
    for task in scan.plan_files():
        bound = (task.file.lower_bounds or {}).get(column)
        sources[task.file.partition[0]] = "" if bound is None else from_bytes(StringType(), bound)
    return sources


def _of_range(key: str) -> str:
    return f"{RANGE} == '{key}'"


def _withdrawn_ordinals(catalog: Catalog, key: str) -> list[int]:
    listed = catalog.slice(PropertyRange.from_key(key)).select(["ordinal", "property_id"]).to_pylist()
    return [row["ordinal"] for row in listed if is_tombstone(row["property_id"])]


def _rows_of_withdrawn(table: Table, key: str, ordinals: Collection[int]) -> int:
    """How many rows of a partition still have the ids of withdrawn properties."""
    if not ordinals:
        return 0
    rows = table.scan(row_filter=_of_range(key), selected_fields=("ordinal", "property_id")).to_arrow()
    withdrawn = rows.filter(pc.is_in(rows["ordinal"], pa.array(ordinals, pa.int64())))
    return sum(not is_tombstone(property_id) for property_id in withdrawn["property_id"].to_pylist())


def _expired(metadata: TableMetadata, *, everything: bool) -> list[int]:
    """The snapshots that go with the next commit; tagged ones stay.

    everything: all go, tagged ones too.
    """
    snapshots = sorted(metadata.snapshots, key=lambda snapshot: snapshot.sequence_number or 0, reverse=True)
    if everything:
        return [snapshot.snapshot_id for snapshot in snapshots]
    kept = {ref.snapshot_id for name, ref in metadata.refs.items() if name != MAIN_BRANCH}
    earlier = snapshots[RECENT_SNAPSHOTS - 1 :]
    last_of_days = {snapshot.timestamp_ms // 86_400_000: snapshot.snapshot_id for snapshot in earlier[::-1]}
    kept |= {last_of_days[day] for day in sorted(last_of_days)[-DAILY_SNAPSHOTS:]}
    return [snapshot.snapshot_id for snapshot in earlier if snapshot.snapshot_id not in kept]


class TableChanges:
    """What changed between a snapshot of the table, or none, and its newest one.

    since: the id of a snapshot, or a time. Raises CommandError.
    """

    def __init__(self, table: Table, since: str | None) -> None:
        self._table = table
        newest = table.current_snapshot()
        if newest is None:
            raise CommandError(f"The table in {table.location()} has no rows yet.")
        self.snapshot = newest.snapshot_id
        self._before = None if since is None else self._snapshot_of(since)

    def changes(self) -> Iterator[Change]:
        """The changes, partition after partition. Raises OSError."""
        before, current = self._files(self._before), self._files(self.snapshot)
        for key in sorted(current):
            if before.get(key) != current[key]:
                earlier = self._rows(self._before, key) if key in before else {}
                yield from compared(earlier, self._rows(self.snapshot, key))

    def _snapshot_of(self, since: str) -> int | None:
        kept = sorted(self._table.snapshots(), key=lambda snapshot: snapshot.sequence_number or 0)
        if since.isdecimal():
            if self._table.snapshot_by_id(int(since)) is None:
                raise CommandError(
                    f"The table has no snapshot {since} any more: it is too old, or a withdrawal removed it."
                    " Without --since every property is new; what --next writes outlives a withdrawal."
                )
            return int(since)
        time = time_of(since)
        until = [snapshot for snapshot in kept if snapshot.timestamp_ms <= time.timestamp() * 1000]
        if until:
            return until[-1].snapshot_id
        if kept[0].sequence_number == 1:
            return None
        raise CommandError(
            f"The table keeps no snapshot of {since} any more. Without --since every property is new."
        )

    def _files(self, snapshot: int | None) -> dict[str, set[str]]:
        files: dict[str, set[str]] = {}
        if snapshot is not None:
            for task in self._table.scan(snapshot_id=snapshot).plan_files():
                files.setdefault(task.file.partition[0], set()).add(task.file.file_path)
        return files

    def _rows(self, snapshot: int | None, key: str) -> Rows:
        columns = ["ordinal", "property_id", "status", "answer", "text", "embedding"]
        of_range = self._table.scan(snapshot_id=snapshot, row_filter=_of_range(key))
        if SETS in of_range.projection().column_names:
            columns += [SETS, "description"]
        rows = of_range.select(*columns).to_arrow()
        vectors = vector_bytes(rows)
        return {
            row["ordinal"]: row_of(
                row["property_id"],
                row["status"],
                row["answer"],
                vectors.get(row["ordinal"], b""),
                row["text"] or "",
                _of_further(row),
            )
            for row in rows.drop_columns(["embedding"]).to_pylist()
        }


def _of_further(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What a row has of further question sets that were asked: what changed of it is told."""
    return {
        name: [of_set["status"], of_set["answer"], row["description"]]
        for name, of_set in (row.get(SETS) or {}).items()
        if of_set is not None and of_set["status"] != NOT_ASKED
    }


def bring_up_to_date(
    settings: Settings,
    catalog: Catalog,
    place: TablePlace,
    images: Images = Images.link,
    base_url: str | None = None,
) -> BroughtUpToDate:
    """Bring the table in a folder up to date with what is published.

    Raises CommandError, PublishedError, StoreAwayError, OSError.
    """
    if images in (Images.copy, Images.embed):
        raise CommandError(f"A table holds no image files: {given_command('--images', Images.none)}.")
    if set("#?%") & set(str(place.folder)):
        raise CommandError(f"{place.folder} has #, ? or % in it, which the address of a table cannot have.")
    refuse_away(settings, place.folder)
    if versions_in(place.folder):
        remember(settings, place.folder)
    elif _has_other_files(place):
        raise CommandError(f"{place.folder} holds other files: name an empty folder, or a new one.")
    # A row has no path that begins in the table's folder, since no image is copied there.
    exported_images = ExportedImages(catalog, Path(), images, base_url)
    rows = ExportedRows(settings, catalog, exported_images, Guarantee.read(settings))
    with place.opened() as described:
        return described.bring_up_to_date(rows)


def _has_other_files(place: TablePlace) -> bool:
    if isinstance(place.folder, S3Folder):
        return any(place.folder.names())
    own = (place.sqlite.name, ".lock", ".quarantine")
    return any(path.name not in own for path in place.folder.glob("*"))


def forget_properties(settings: Settings, keys: Collection[str]) -> Iterator[str]:
    """Take withdrawn properties out of the asset's table and its files. Safe to repeat.

    Raises CommandError, OSError.
    """
    place = TablePlace.from_settings(settings)
    refuse_away(settings, place.folder)
    catalog = Catalog.open(settings.home)
    with place.opened() as described:
        described.put_right(catalog)
        for key in keys:
            described.drop_withdrawn(catalog, key)
        described.remove_unnamed()
    if described.has_withdrawn:
        yield f"Removed the properties from the table in {place.folder}, with its earlier snapshots."
