"""The path of every file of a home. All other code takes its paths from here and builds none by hand.

property_descriptions/KEY.parquet    finished partitions and nothing else: any reader may open the folder
.versions/ASSET/                     KEY.json (record), KEY.copy.json, KEY.0.parquet (second copy),
                                     KEY.1.parquet and KEY.2.parquet (the two versions before)
.staging/ASSET/                      temporary files before their rename
.journal/ASSET/KEY/GENERATION/       work under way
.quarantine/ASSET/KEY/               files that did not verify, and generations that were set aside; never
                                     deleted by themselves
.state/                              high-water marks, version marks, notes of what was set aside, locks,
                                     leases, the control state, the list of withdrawn ids, the words that a
                                     search looks for
.machine.json                        the machine that works here, for a home on a network file system
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

VERSION_NUMBERS = (0, 1, 2)
"""0 is the second copy of the published file, 1 and 2 are the versions before it."""

_VERSIONS, _STAGING, _JOURNAL, _QUARANTINE, _STATE = (
    ".versions",
    ".staging",
    ".journal",
    ".quarantine",
    ".state",
)
_WORKING_FOLDERS = (_VERSIONS, _STAGING, _JOURNAL, _QUARANTINE)
_HIGH_WATER_MARKS, _VERSION_MARKS = "high_water_marks", "version_marks"
_PARQUET = ".parquet"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class UnusableHomeError(Exception):
    """This version cannot work in a home directory. Nothing in it was changed."""


@dataclass(frozen=True)
class Home:
    """A home directory (``VLM_ASSETS_HOME``).

    ``read_origin`` gives the id of what a home's partitions belong to, its catalogue's; None where no file
    says it. Homes with the same id have the same partitions: copies, or machines that share a store.
    """

    root: Path
    read_origin: Callable[[Path], str | None] | None = field(default=None, compare=False, repr=False)

    @property
    def state(self) -> Path:
        """The control state, high-water marks and locks."""
        return self.root / _STATE

    @property
    def claim(self) -> Path:
        """The note of the machine that works here, where the home is on a network file system."""
        return self.root / ".machine.json"

    @property
    def word_index(self) -> Path:
        """The words of all descriptions, for searches; built anew where it is lost."""
        return self.state / "search" / "words.sqlite"

    def close_to_others(self) -> None:
        """Take away other accounts' right to enter the existing working folders, where this account may."""
        for folder in self._private_folders():
            with contextlib.suppress(OSError):
                if stat.S_IMODE(folder.stat().st_mode) & _OTHERS:
                    folder.chmod(0o700)

    def open_to_others(self) -> Iterator[Path]:
        """The home where others may write in it, and each working folder that they may enter."""
        with contextlib.suppress(FileNotFoundError):
            if self.root.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                yield self.root
        for folder in self._private_folders():
            with contextlib.suppress(FileNotFoundError):
                if stat.S_IMODE(folder.stat().st_mode) & _OTHERS:
                    yield folder

    def _private_folders(self) -> Iterator[Path]:
        return (self.root / name for name in (*_WORKING_FOLDERS, _STATE))

    def asset(self, name: str) -> AssetFolders:
        """The folders of one asset, such as ``property_descriptions``."""
        return AssetFolders(self, name)

    def asset_names(self) -> set[str]:
        """The assets that have anything beside their published files: a record, a journal, a mark.

        Raises OSError.
        """
        marks = (self.state / folder for folder in (_HIGH_WATER_MARKS, _VERSION_MARKS))
        folders = (*(self.root / name for name in _WORKING_FOLDERS), *marks)
        return {path.name for folder in folders for path in _folders_in(folder)}

    def refuse_unusable(self) -> None:
        """Raise UnusableHomeError where a folder is on a disk that is not there, or on another device.

        Renames and hard links work within one device only. ``.state`` may be on another: nothing moves
        between it and the rest.
        """
        for folder in (self.root, *self._private_folders()):
            if problem := dangling_link(folder):
                raise UnusableHomeError(problem)
        if other := next(self._on_other_devices(), None):
            raise UnusableHomeError(
                f"{other} is on another device than {self.root} (EXDEV): a finished file could not be moved "
                "into place in one step. Nothing was changed. Keep the whole home directory on one file "
                "system: remove the mount or the link, or set VLM_ASSETS_HOME to a folder without one."
            )

    def _on_other_devices(self) -> Iterator[Path]:
        if not self.root.is_dir():
            return
        device = self.root.stat().st_dev
        working = [self.root / name for name in _WORKING_FOLDERS]
        of_assets = [path for folder in working for path in _folders_in(folder)]
        assets = [self.root / name for name in sorted({path.name for path in of_assets})]
        for path in (*working, *of_assets, *assets):
            if path.is_dir() and path.stat().st_dev != device:
                yield path


@dataclass(frozen=True)
class AssetFolders:
    """The folders of one asset. ``name`` is its key in Dagster."""

    home: Home
    name: str

    @property
    def origin(self) -> str:
        """The id of what the partitions belong to; "" while no file says it. Read once."""
        if not self._origin and self.home.read_origin is not None:
            self._origin.extend(filter(None, [self.home.read_origin(self.home.root)]))
        return self._origin[0] if self._origin else ""

    @cached_property
    def _origin(self) -> list[str]:
        return []

    @cached_property
    def published(self) -> Path:
        """The finished partitions, ``KEY.parquet`` each. Nothing else is ever in this folder."""
        return self.home.root / self.name

    @cached_property
    def versions(self) -> Path:
        """Records, second copies and earlier versions."""
        return self.home.root / _VERSIONS / self.name

    @cached_property
    def staging(self) -> Path:
        """Temporary files of publications."""
        return self.home.root / _STAGING / self.name

    @cached_property
    def journals(self) -> Path:
        """A folder for each partition with work under way."""
        return self.home.root / _JOURNAL / self.name

    @cached_property
    def quarantine(self) -> Path:
        """A folder for each partition with a file that did not verify."""
        return self.home.root / _QUARANTINE / self.name

    @cached_property
    def high_water_marks(self) -> Path:
        """A folder for each partition that was ever worked on."""
        return self.home.state / _HIGH_WATER_MARKS / self.name

    @cached_property
    def version_marks(self) -> Path:
        """Two copies of a mark for each file that was ever published."""
        return self.home.state / _VERSION_MARKS / self.name

    @cached_property
    def marks_staging(self) -> Path:
        """Temporary files of version marks: ``.state`` may be on another device than the rest."""
        return self.home.state / "staging" / self.name

    @cached_property
    def refusals(self) -> Path:
        """A note for each partition whose publication a check refused."""
        return self.home.state / "refusals" / self.name

    @cached_property
    def set_aside_notes(self) -> Path:
        """A folder for each partition with a generation that was set aside."""
        return self.home.state / "set_aside" / self.name

    @cached_property
    def locks(self) -> Path:
        """A lock file for each partition that was ever published."""
        return self.home.state / "publication_locks" / self.name

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders of the asset; those by which ``Home.asset_names`` knows it come last."""
        known_by = (self.staging, self.quarantine, self.journals, self.high_water_marks, self.versions)
        others = (self.published, self.refusals, self.set_aside_notes, self.locks, self.marks_staging)
        return (*others, *known_by, self.version_marks)

    def partition(self, key: str) -> PartitionPaths:
        """The files of one partition."""
        return PartitionPaths(self, key)

    def published_keys(self) -> list[str]:
        """The keys of the files that readers see now, sorted. Raises OSError."""
        return sorted(
            name.removesuffix(_PARQUET) for name in _names_in(self.published) if name.endswith(_PARQUET)
        )

    def recorded_keys(self) -> set[str]:
        """The keys with a record of a publication, readable or not. Raises OSError."""
        return {name.partition(".")[0] for name in _names_in(self.versions) if name.endswith(".json")}

    def touched_keys(self) -> set[str]:
        """The keys that have anything: a file, a version, a record, a journal, a mark."""
        folders = (self.published, self.versions, self.journals, self.high_water_marks, self.version_marks)
        return {name.partition(".")[0] for folder in folders for name in _names_in(folder)}

    def journal_keys(self) -> list[str]:
        """The keys with a journal folder, sorted. Raises OSError."""
        return [path.name for path in _folders_in(self.journals)]


@dataclass(frozen=True)
class PartitionPaths:
    """The files of one partition of an asset."""

    asset: AssetFolders
    key: str

    @property
    def published(self) -> Path:
        """The file that readers see."""
        return self.asset.published / f"{self.key}{_PARQUET}"

    @property
    def record(self) -> Path:
        """The record of the published file and its versions: size, rows and digest of each."""
        return self.asset.versions / f"{self.key}.json"

    @property
    def record_copy(self) -> Path:
        """The second copy of the record."""
        return self.asset.versions / f"{self.key}.copy.json"

    def version(self, number: int) -> Path:
        """The second copy of the published file (0), the version before it (1), the one before that (2)."""
        return self.asset.versions / f"{self.key}.{number}{_PARQUET}"

    @property
    def version_mark(self) -> Path:
        """The newest version of the published file, apart from its record."""
        return self.asset.version_marks / f"{self.key}.json"

    @property
    def refusal(self) -> Path:
        """The note of the checks that refused the finished rows of this partition."""
        return self.asset.refusals / f"{self.key}.json"

    @property
    def publication_lock(self) -> Path:
        """Held by the one process that publishes or restores this partition."""
        return self.asset.locks / f"{self.key}.lock"

    @property
    def journals(self) -> Path:
        """A folder for each generation with work under way."""
        return self.asset.journals / self.key

    def journal(self, generation: str) -> Path:
        """The journal of one generation."""
        return self.journals / generation

    @property
    def quarantine(self) -> Path:
        """Files of this partition that did not verify."""
        return self.asset.quarantine / self.key

    @property
    def high_water_marks(self) -> Path:
        """The high-water marks of all generations of this partition."""
        return self.asset.high_water_marks / self.key

    def high_water_mark(self, generation: str) -> Path:
        """The high-water mark of one generation."""
        return self.high_water_marks / f"{generation}.json"

    def set_aside_note(self, generation: str) -> Path:
        """The note that a generation was set aside, and why: none of its rows is ever used."""
        return self.asset.set_aside_notes / self.key / f"{generation}.json"


def dangling_link(folder: Path) -> str | None:
    """What to do about a folder that is a link to nothing, which is not empty; None where it is none."""
    if not folder.is_symlink() or folder.exists():
        return None
    return (
        f"{folder} is a link to {folder.readlink()}, which is not there. Nothing was changed. Mount its disk,"
        " or point the link to where that folder is, then do the same again."
    )


def _folders_in(folder: Path) -> list[Path]:
    """The folders directly in ``folder``, sorted; none where it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []


def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except FileNotFoundError:
        return []
