"""The files of an Iceberg table: durable before anything names them, and removed when nothing does."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from pyiceberg.io import InputFile, OutputFile, OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.table import Table

from vlm_durable.files.files import (
    TEMPORARY_SUFFIX,
    TemporaryFile,
    make_directory,
    publish_replacing,
    sync_directory,
)

SCHEME = "file://"


class DurableFileIO(PyArrowFileIO):
    """Writes a file whole, makes it durable and reads it back, and only then gives it its name."""

    def new_output(self, location: str) -> PyArrowFile:
        """A file to be written."""
        file = super().new_output(location)
        return _DurableFile(location, file._path, file._filesystem)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Remove a file. Raises FileNotFoundError."""
        path_of(location if isinstance(location, str) else location.location).unlink()


class _DurableFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        """A stream whose file has its name once the stream is closed. Raises FileExistsError, OSError."""
        path = Path(self._path)
        if not overwrite and path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        make_directory(path.parent)
        return cast(OutputStream, _PublishedOnClose(path))


class _PublishedOnClose(TemporaryFile):
    def close(self) -> None:
        """Make the file durable and give it its name. Safe to call twice. Raises OSError."""
        if not self.closed:
            self.seal()
            publish_replacing(self.path, self.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()
            return
        try:
            self.close()
        except BaseException:
            self.discard()
            raise


def path_of(location: str) -> Path:
    """The path of a file of the table on this machine."""
    return Path(location.removeprefix(SCHEME))


def named_files(table: Table) -> set[Path]:
    """Every file that the table's state or one of its snapshots names. Raises OSError, ValueError."""
    metadata = table.metadata
    locations = {table.metadata_location, *(entry.metadata_file for entry in metadata.metadata_log)}
    statistics = (*metadata.statistics, *metadata.partition_statistics)
    locations |= {file.statistics_path for file in statistics}
    manifests = set()
    for snapshot in metadata.snapshots:
        locations.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in manifests:
                manifests.add(manifest.manifest_path)
                locations |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
    return {path_of(location) for location in locations | manifests}


def lost_files(table: Table) -> list[Path]:
    """Files that the table names and that are not there, but for those of its earlier states."""
    earlier = {path_of(entry.metadata_file) for entry in table.metadata.metadata_log}
    return sorted(path for path in named_files(table) - earlier if not path.exists())


def metadata_files(folder: Path) -> list[Path]:
    """The states of the table in a folder, the newest first."""
    files = (folder / "metadata").glob("*.metadata.json")
    return sorted(
        files, key=lambda path: (path.name.partition("-")[0], path.stat().st_mtime_ns), reverse=True
    )


def remove_unnamed(folder: Path, named: set[Path]) -> int:
    """Remove the files of a table that nothing names: of expired snapshots, or left by a kill.

    A file that names others goes before them: whatever is there reads whole. Returns how many were removed.
    Raises OSError.
    """
    unnamed = sorted(set(_files_below(folder)) - named, key=_names_others_first)
    for path in unnamed:
        path.unlink(missing_ok=True)
    for parent in sorted({path.parent for path in unnamed}):
        sync_directory(parent)
    return len(unnamed)


def _files_below(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names)


def _names_others_first(path: Path) -> tuple[int, str]:
    if path.name.endswith(TEMPORARY_SUFFIX):
        return 0, str(path)
    if path.name.endswith(".metadata.json"):
        return 1, str(path)
    return (2 if path.name.startswith("snap-") else 3 if path.suffix == ".avro" else 4), str(path)
