"""The files of an Iceberg table: durable before anything names them, and removed when nothing does.

The table is in a folder on disk or on S3. A file is known by its location, as ``file:///srv/table/…`` or
``s3://BUCKET/…``.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import pyarrow as pa
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.table import Table

from vlm_durable.files.files import (
    TEMPORARY_SUFFIX,
    TemporaryFile,
    make_directory,
    publish_replacing,
    sync_directory,
)
from vlm_durable.mirror.bucket import NoObjectError, ObjectDamagedError, Place, S3Folder

_SCHEME: Final = "file://"
_MOST_BYTES: Final = 5 << 30
"""The largest object: S3 takes no larger one in one put."""


class DurableFileIO(FileIO):
    """Writes a file whole, makes it durable and reads it back, and only then gives it its name."""

    def new_input(self, location: str) -> _File:
        """A file to be read."""
        return _ObjectFile(location) if location.startswith("s3://") else _DiskFile(location)

    def new_output(self, location: str) -> _File:
        """A file to be written."""
        return self.new_input(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Remove a file. Raises OSError, StoreError."""
        self.new_input(location if isinstance(location, str) else location.location).remove()


class _File(InputFile, OutputFile):
    def to_input_file(self) -> InputFile:
        return self

    def remove(self) -> None:
        raise NotImplementedError


class _DiskFile(_File):
    @property
    def path(self) -> Path:
        return Path(self.location.removeprefix(_SCHEME))

    def __len__(self) -> int:
        return self.path.stat().st_size

    def exists(self) -> bool:
        return self.path.exists()

    def open(self, seekable: bool = True) -> InputStream:
        return cast(InputStream, pa.OSFile(str(self.path)))

    def create(self, overwrite: bool = False) -> OutputStream:
        """A stream whose file has its name once the stream is closed. Raises FileExistsError, OSError."""
        if not overwrite and self.path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
        make_directory(self.path.parent)
        return cast(OutputStream, _PublishedOnClose(self.path))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


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


class _ObjectFile(_File):
    """An object, in memory as a whole."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        bucket, _, self._name = location.removeprefix("s3://").partition("/")
        self._bucket = S3Folder(bucket, "")

    def __len__(self) -> int:
        stored = self._bucket.head(self._name)
        if stored is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.location)
        return stored.size

    def exists(self) -> bool:
        return self._bucket.head(self._name) is not None

    def open(self, seekable: bool = True) -> InputStream:
        """The object's bytes, verified. Raises StoreAwayError; OSError where it is gone or damaged."""
        try:
            return cast(InputStream, pa.BufferReader(self._bucket.get(self._name, most=_MOST_BYTES)))
        except NoObjectError as error:
            raise FileNotFoundError(errno.ENOENT, str(error), self.location) from error
        except ObjectDamagedError as error:
            raise OSError(errno.EIO, str(error), self.location) from error

    def create(self, overwrite: bool = False) -> OutputStream:
        """A stream that is put as one object once it is closed, under a name that must be free."""
        return cast(OutputStream, _PutOnClose(self._bucket, self._name))

    def remove(self) -> None:
        self._bucket.delete(self._name)


class _PutOnClose(io.BytesIO):
    """A binary sink that pyarrow's writers take."""

    def __init__(self, bucket: S3Folder, name: str) -> None:
        super().__init__()
        self._bucket, self._name = bucket, name

    def close(self) -> None:
        """Put the object. The store verifies its bytes. Safe to call twice. Raises StoreError."""
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._bucket.put(self._name, content, over=None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            super().close()
        self.close()

    def __del__(self) -> None:
        """Put nothing: whoever began it did not close it."""


def location_of(folder: Place) -> str:
    """The folder as Iceberg names it."""
    return str(folder) if isinstance(folder, S3Folder) else f"{_SCHEME}{folder}"


def files_in(folder: Place, version: str) -> dict[str, float]:
    """The location of each file of a table, and when it was written (unix seconds)."""
    if isinstance(folder, S3Folder):
        listed = folder.listed(f"{version}/")
        return {folder.address(entry.name): entry.modified.timestamp() for entry in listed}
    paths = (path for path in (folder / version).rglob("*") if not path.is_dir())
    return {f"{_SCHEME}{path}": path.stat().st_mtime for path in paths}


def states_among(files: dict[str, float]) -> list[str]:
    """The locations of the table's states among its files, the newest first."""
    states = [location for location in files if location.endswith(".metadata.json")]
    return sorted(
        states, key=lambda location: (_name_of(location).partition("-")[0], files[location]), reverse=True
    )


def named_files(table: Table) -> set[str]:
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
    return locations | manifests


def lost_files(table: Table, files: Collection[str]) -> set[str]:
    """Files that the table names and that are not there, but for those of its earlier states."""
    earlier = {entry.metadata_file for entry in table.metadata.metadata_log}
    return named_files(table) - earlier - set(files)


def remove_unnamed(folder: Place, version: str, named: set[str]) -> int:
    """Remove the files of a table that nothing names: of expired snapshots, or left by a kill.

    A file that names others goes before them: whatever is there reads whole. Returns how many were removed.
    Raises OSError, StoreError.
    """
    unnamed = sorted(files_in(folder, version).keys() - named, key=_names_others_first)
    files = [DurableFileIO().new_input(location) for location in unnamed]
    for file in files:
        file.remove()
    for parent in sorted({file.path.parent for file in files if isinstance(file, _DiskFile)}):
        sync_directory(parent)
    return len(unnamed)


def _names_others_first(location: str) -> tuple[int, str]:
    name = _name_of(location)
    if name.endswith(TEMPORARY_SUFFIX):
        return 0, location
    if name.endswith(".metadata.json"):
        return 1, location
    return (2 if name.startswith("snap-") else 3 if name.endswith(".avro") else 4), location


def _name_of(location: str) -> str:
    return location.rpartition("/")[2]
