"""Backing up a home while work goes on, and restoring it.

What is copied one after the other was never there together. The order makes every mixture a state that a kill
could have left, from which a start goes on:

1. the control state, and marks before what they speak of: no mark promises what was copied before it;
2. journals before published files: rows that are published meanwhile are in the published file, and with it
   comes the mark that says that their journal is closed;
3. embeddings before descriptions, and the catalogue after both: nothing stands without what it was made from.

The files of one partition are copied again until none of them changed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from vlm_assets.assets.truth import REVIEWS
from vlm_assets.config.extensions import installed, left_by_missing
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.kept_assets import kept_assets
from vlm_assets.services.progress import doing, doing_each
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_copies import backup_paths, catalog_path
from vlm_catalog.catalog_file import withdrawal_note
from vlm_durable.commands import command
from vlm_durable.files.file_backup import (
    BackupWriter,
    ChangedError,
    FileList,
    KeptFile,
    open_backup,
    restore,
)
from vlm_durable.files.files import TEMPORARY_SUFFIX
from vlm_durable.files.layout import VERSION_NUMBERS, AssetFolders
from vlm_durable.files.sealed_json import BrokenSealError
from vlm_durable.files.seen_files import signature_of
from vlm_durable.journal.commits import decode_manifest, newest_manifest, sequence_of
from vlm_durable.journal.high_water_mark import read_marks, slots
from vlm_durable.journal.writer_lock import LOCK_NAME
from vlm_durable.state.database import NAME as STATE_NAME
from vlm_durable.versions.partition_files import PartitionFiles
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.version_mark import mark_copies
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted

_OF_THIS_MACHINE = frozenset(
    {
        "copies",
        "damaged",
        "explore",
        "leases",
        "publication_locks",
        "runs",
        "search",
        "servers",
        "tables",
        "workers",
    }
)
"""Folders of ``.state`` that mean nothing elsewhere, hold a server's key, or are copied in another way."""

_TRIES = 100
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Backup:
    """What a backup holds. copied: files that were not in it before."""

    folder: Path
    properties: int
    published: int
    under_way: int
    files: int
    bytes: int
    copied: int
    copied_bytes: int
    at: str

    def sentence(self) -> str:
        """All of it, for people."""
        return (
            f"{self.folder} holds this home as of {self.at}: the catalogue of"
            f" {counted(self.properties, 'properties')},"
            f" {counted(self.published, 'published files')}, the committed rows of"
            f" {counted(self.under_way, 'journals')}, control state and reviews."
            f" {counted(self.files, 'files')}, {self.bytes / 1e6:,.1f} MB; copied now:"
            f" {self.copied:,} ({self.copied_bytes / 1e6:,.1f} MB)."
        )


def back_up(settings: Settings, folder: Path, *, deep: bool = False) -> Backup:
    """Bring a backup of a home up to date. What runs meanwhile goes on, and is in it as far as it was then.

    deep: contents that were copied before are read again. Raises CommandError, BackupError, CatalogError,
    OSError; the backup before stays as it was then.
    """
    home = settings.layout.root.resolve()
    if home.is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(home):
        raise CommandError(f"{folder} and the home {home} lie in each other. Name a folder elsewhere.")
    for distribution, path in left_by_missing(settings.layout, assets_alone=True):
        raise CommandError(
            f"{path} is of {distribution}, which is not installed here, so a backup would lack it. The backup"
            f" before stays. Install {distribution} beside vlm-assets, in the same way, then back up again."
        )
    catalog = Catalog.open(settings.home)
    at = datetime.now(UTC).astimezone().isoformat(" ", "seconds")
    with open_backup(folder, deep=deep) as backup:
        other = backup.before.about.get("catalog_id") if backup.before is not None else None
        if other not in (None, catalog.catalog_id):
            raise CommandError(
                f"{folder} holds the backup of another home (catalogue {other}). Nothing was changed. Name a"
                " folder of its own for each home."
            )
        while True:
            header = Catalog.open(settings.home).header
            _refuse_during_withdrawal(settings)
            backup.kept.clear()
            published, under_way = _Copying(settings, backup).all()
            _refuse_during_withdrawal(settings)
            # Of rows that were updated or withdrawn meanwhile some files may be from before, some from after.
            if Catalog.open(settings.home).header.digests[: len(header.digests)] == header.digests:
                break
        backup.finish({"catalog_id": catalog.catalog_id, "at": at, "home": str(home)})
        sizes = {kept.sha256: kept.size for kept in backup.kept.values()}
        return Backup(
            folder,
            header.rows,
            published,
            under_way,
            len(backup.kept),
            sum(sizes.values()),
            backup.copied,
            backup.copied_bytes,
            at,
        )


def restore_home(settings: Settings, folder: Path) -> FileList:
    """Restore a backup into an empty home. Raises BackupError, OSError."""
    return restore(
        folder, settings.layout.root, last=_restored_last, advance=partial(doing, "restoring files")
    )


def _restored_last(name: str) -> int:
    """The catalogue, without which no command works, comes last; its copies after it."""
    if name.startswith("property_catalog/"):
        return 1
    return 2 if name.startswith(".versions/property_catalog/") else 0


def _refuse_during_withdrawal(settings: Settings) -> None:
    if withdrawal_note(settings.state_directory).exists():
        raise CommandError(
            "A withdrawal is under way or was cut short, so a backup would hold what it should remove. The"
            f" backup before stays. Finish it with {command('withdraw')}, then back up again."
        )


class _Copying:
    """The steps of a backup, in their order."""

    def __init__(self, settings: Settings, backup: BackupWriter) -> None:
        self._settings = settings
        self._backup = backup
        self._layout = settings.layout
        self._root = settings.layout.root
        # What is made from the other comes first.
        self._assets = kept_assets(settings)[::-1]
        self._of_extensions = [
            self._layout.asset(name) for extension in installed() for name in extension.assets
        ]

    def all(self) -> tuple[int, int]:
        """Copy everything; the numbers of published files and of journals."""
        doing("copying the control state")
        self._copy_control_state()
        self._copy_settled(lambda: _files_below(self._layout.state, without=_OF_THIS_MACHINE))
        for asset in self._assets:
            for key in doing_each(f"copying journals of {asset.name}, partitions", asset.journal_keys()):
                for folder in _folders(asset.partition(key).journals):
                    self._copy_journal(folder)
        for asset in self._of_extensions:
            self._copy_tree(asset.journals)
        for asset in self._assets:
            keys = sorted(asset.touched_keys() - {""})
            for key in doing_each(f"copying {asset.name}, partitions", keys):
                self._copy_partition(asset, key)
        for asset in self._of_extensions:
            self._copy_tree(asset.published)
            self._copy_tree(asset.versions)
        self._copy_settled(lambda: [self._root / REVIEWS, *_files_below(self._root / "rejected")])
        doing("copying the catalogue")
        # The file before its copies, so that no copy is older than it.
        for path in (catalog_path(self._root), *backup_paths(self._root)):
            self._copy_settled(lambda path=path: [path])  # type: ignore[misc]
        folders = [str(asset.published.relative_to(self._root)) for asset in self._assets]
        parts = [Path(name).parts for name in self._backup.kept]
        published = sum(folder in folders for folder, *_ in parts)
        journals = {names[:4] for names in parts if names[0] == ".journal" and names[1] in folders}
        return published, len(journals)

    def _copy_control_state(self) -> None:
        """A verified copy of the database, as itself: a file that is written to cannot be copied."""
        if self._settings.state_url is not None or not (self._layout.state / STATE_NAME).exists():
            return
        control_state(self._settings).write(lambda connection: None, copy=True)
        copies = self._layout.state / "copies"

        def newest() -> list[Path]:
            return sorted(copies.glob("state.*.db"))[-1:]

        copied = self._try(newest, lambda kept: True)
        for kept in copied.values():
            self._backup.keep({str((self._layout.state / STATE_NAME).relative_to(self._root)): kept})

    def _copy_partition(self, asset: AssetFolders, key: str) -> None:
        """Copy a partition's file, versions, record and marks as they were at one moment.

        A journal that was closed by then is not in the backup. Refuses where no whole file is left.
        """
        partition = PartitionFiles(asset, key)
        folder, version_mark = partition.paths.high_water_marks, partition.paths.version_mark
        names = [self._name(path) for path in (partition.published, partition.slot(0))]
        closed: list[str] = []

        def listed() -> Iterator[Path]:
            yield from (partition.published, *map(partition.slot, VERSION_NUMBERS), *partition.record_paths)
            yield from mark_copies(version_mark)
            closed[:] = [mark.generation for mark in read_marks(folder, key) if mark.retired]
            for generation in closed:
                yield from slots(partition.paths.high_water_mark(generation))

        def is_whole(copies: dict[str, KeptFile]) -> bool:
            record = partition.peek()
            digests = [copies[name].sha256 for name in names if name in copies]
            return record is None or record.sha256 in digests

        try:
            # The backup may have the newest version alone: an older one must not take its place.
            PublishedPartitions(asset).refuse_put_back(key)
            copies = self._try(listed, is_whole)
        except PublishedError as error:
            raise CommandError(f"{error} The backup before stays as it is.") from error
        self._backup.keep(copies)
        for generation in closed:
            self._backup.drop(f"{self._name(partition.paths.journal(generation))}/")

    def _copy_journal(self, folder: Path) -> None:
        """Copy a journal: its manifests first, then all that they may list."""

        def listed() -> Iterator[Path]:
            if not folder.is_dir():
                return
            names = sorted(path.name for path in folder.iterdir() if path.is_file())
            manifests = [name for name in names if sequence_of(name) is not None]
            yield from (folder / name for name in manifests)
            segments = sorted(path.name for path in folder.iterdir() if path.is_file())
            yield from (folder / name for name in segments if sequence_of(name) is None and name != LOCK_NAME)

        for _ in self._tries(folder):
            copies: dict[str, KeptFile] = {}
            try:
                for path in listed():
                    if not path.name.endswith(TEMPORARY_SUFFIX):
                        copies[self._name(path)] = self._backup.copy(path, self._name(path))
            except (FileNotFoundError, ChangedError):
                continue  # An older manifest was removed, or the journal is being closed.
            if self._has_all_segments(folder, copies):
                self._backup.keep(copies)
                return

    def _has_all_segments(self, folder: Path, copies: dict[str, KeptFile]) -> bool:
        """Whether what the newest manifest lists was there to be copied, or is missing from the journal."""
        numbers = [sequence_of(Path(name).name) for name in copies]
        newest = max((number for number in numbers if number is not None), default=None)
        name = next((copied for copied in copies if sequence_of(Path(copied).name) == newest), None)
        if newest is None or name is None:
            return True
        try:
            manifest = decode_manifest((self._root / name).read_bytes(), self._root / name)
        except FileNotFoundError:
            return False
        except BrokenSealError:
            return True  # A start goes on from the manifest before it, here as there.
        if manifest.retired or all(
            self._name(folder / segment.name) in copies for segment in manifest.segments
        ):
            return True
        # Gone already, if this is the newest manifest still; else the journal was closed meanwhile.
        standing = newest_manifest(folder)
        return standing is not None and standing.sequence == newest

    def _copy_tree(self, folder: Path) -> None:
        """Copy each folder in a folder, and its own files, each as it was at one moment."""
        name = folder.relative_to(self._root)
        for subfolder in doing_each(f"copying folders of {name}", _folders(folder)):
            self._copy_settled(lambda subfolder=subfolder: _files_below(subfolder))  # type: ignore[misc]
        self._copy_settled(lambda: [path for path in _entries(folder) if path.is_file()])

    def _copy_settled(self, listed: Callable[[], Iterable[Path]]) -> None:
        self._backup.keep(self._try(listed, lambda copies: True))

    def _try(
        self, listed: Callable[[], Iterable[Path]], is_whole: Callable[[dict[str, KeptFile]], bool]
    ) -> dict[str, KeptFile]:
        """Copy files until none of them, and not their list, changed meanwhile. Raises CommandError."""
        for _ in self._tries(listed):
            before = _signatures(listed())
            try:
                copies = {self._name(path): self._backup.copy(path, self._name(path)) for path in before}
            except (FileNotFoundError, ChangedError):
                continue
            if _signatures(listed()) == before and is_whole(copies):
                return copies
        raise AssertionError

    def _tries(self, what: object) -> Iterator[int]:
        for number in range(_TRIES):
            yield number
            time.sleep(_PAUSE_SECONDS)
        where = what if isinstance(what, Path) else next(iter(what()), self._root)  # type: ignore[operator]
        raise CommandError(
            f"{where} changes all the time, or is not what its record says. The backup before stays as it is."
            f" {command('repair')}, then back up again."
        )

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))


def _signatures(paths: Iterable[Path]) -> dict[Path, str]:
    """The files that are there, each with what changes when it is replaced."""
    signatures = {}
    for path in paths:
        try:
            signatures[path] = signature_of(path.stat())
        except FileNotFoundError:
            continue
    return signatures


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir()]


def _files_below(folder: Path, *, without: frozenset[str] = frozenset()) -> list[Path]:
    """All files below a folder that are no locks, temporaries or open databases."""
    paths = []
    for path in _entries(folder):
        if path.is_dir():
            paths += [] if path.name in without else _files_below(path)
        elif path.is_file() and not path.name.endswith((TEMPORARY_SUFFIX, ".lock", ".db", "-wal", "-shm")):
            paths.append(path)
    return paths
