"""The files of the catalogue on disk: publishing a new one, its second copy, and putting a damaged one back.

At every moment the file that readers see has an intact second copy, or is itself the second copy's successor.
``catalog_file.py`` has the format.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from resources.storage.files import (
    TEMPORARY_SUFFIX,
    DurableWriteError,
    make_directory,
    set_aside,
    sha256_of,
    write_replacing,
)
from resources.storage.layout import AssetFolders, Home
from resources.storage.lock_files import taken
from vlm_assets.catalog.catalog_file import (
    UNREADABLE,
    CatalogError,
    CatalogFormatError,
    read_header,
    verify_file,
)

_ASSET = "property_catalog"
_NOTE = "put_back.json"
_WAIT_SECONDS = 60.0
"""For another process that publishes or puts back: each takes a few seconds."""


class CatalogUnreadableError(CatalogError):
    """There is a catalogue, but it cannot be read or is not what was ingested. Never the same as empty."""


def catalog_path(home: Path) -> Path:
    """The catalogue of a home."""
    return _folders(home).published / "catalog.parquet"


def backup_paths(home: Path) -> tuple[Path, Path]:
    """The second copy of the catalogue, and the catalogue before the last change."""
    versions = _folders(home).versions
    return versions / "catalog.0.parquet", versions / "catalog.1.parquet"


def quarantine(home: Path) -> Path:
    """The folder of damaged catalogues that were replaced by their second copy."""
    return _folders(home).quarantine


def publish_catalog(home: Path, data: bytes) -> None:
    """Put a new catalogue in place, verified, with a second copy. Raises CatalogUnreadableError, OSError."""
    path = catalog_path(home)
    second_copy, previous = backup_paths(home)
    with _only_writer(home):
        for left in _folders(home).staging.glob(f"*{TEMPORARY_SUFFIX}"):
            left.unlink()
        if not path.exists():
            # The copy comes last: a copy without a catalogue means that the catalogue was lost.
            _replace(home, path, data)
            _verify_written(path)
            _replace(home, second_copy, data)
            return
        _replace(home, previous, path.read_bytes())
        _verify_written(previous)
        _replace(home, second_copy, data)
        _verify_written(second_copy)
        _replace(home, path, data)


def renew_second_copy(home: Path) -> None:
    """Write the second copy again if it is not what the catalogue is. Raises OSError, CatalogUnreadableError.

    An ingest that was killed, or a disk, may have left it so.
    """
    path, second_copy = catalog_path(home), backup_paths(home)[0]
    with _only_writer(home):
        if not second_copy.exists() or sha256_of(second_copy) != sha256_of(path):
            _verify_written(path)
            _replace(home, second_copy, path.read_bytes())


def put_back(home: Path, reason: str) -> None:
    """Replace a damaged or missing catalogue by its second copy; the damaged file goes into the quarantine.

    Does nothing if the catalogue is whole (another process was faster). Raises CatalogUnreadableError, with
    nothing changed, if the second copy is not whole either or the disk refuses.
    """
    path, second_copy = catalog_path(home), backup_paths(home)[0]
    try:
        with _only_writer(home):
            if _is_whole(path):
                return
            try:
                verify_file(second_copy)
            except UNREADABLE as error:
                raise unreadable(home, reason) from error
            data = second_copy.read_bytes()
            make_directory(quarantine(home))
            # The note first: a process that dies after the repair would leave an alert unsent.
            aside = set_aside(path, quarantine(home), keep=True) if path.exists() else None
            note = {"at": time.time(), "reason": reason, "aside": aside and str(aside)}
            _replace(home, quarantine(home) / _NOTE, json.dumps(note).encode())
            _replace(home, path, data)
            _verify_written(path)
    except OSError as error:
        raise unreadable(home, f"{reason}, and it could not be put back: {error}") from error


def last_put_back(home: Path) -> tuple[float, str] | None:
    """When the catalogue was last replaced by its second copy (unix seconds), and a sentence about it."""
    try:
        note = json.loads((quarantine(home) / _NOTE).read_bytes())
        kept = f" The damaged file is kept as {note['aside']}." if note["aside"] else ""
        return float(note["at"]), f"It was put back from its second copy ({note['reason']}).{kept}"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0, f"It was put back from its second copy; see {quarantine(home)}."


def check_copies(home: Path) -> None:
    """Compare the catalogue with its second copy, byte for byte, and put right the one that is damaged.

    Costs one read of both files. Raises CatalogUnreadableError if both are damaged, CatalogFormatError.
    """
    path, second_copy = catalog_path(home), backup_paths(home)[0]
    try:
        if path.exists() and second_copy.exists() and sha256_of(path) == sha256_of(second_copy):
            return
        whole = _is_whole(path)
    except OSError:
        whole = False
    if whole:
        renew_second_copy(home)
    else:
        put_back(home, "it is not what was written")


def unreadable(home: Path, reason: str) -> CatalogUnreadableError:
    """The error for a catalogue that cannot be put back: what is wrong, and which backups there are."""
    found, readable = [], []
    for backup in backup_paths(home):
        if not backup.exists():
            continue
        try:
            header = read_header(backup)
        except (*UNREADABLE, CatalogFormatError):
            found.append(f"{backup} (unreadable too)")
            continue
        readable.append(backup)
        found.append(f"{backup} (ingest {header.sequence}, {header.rows} properties)")
    path = catalog_path(home)
    advice = (
        f"Put one back: {shlex.join(['cp', str(readable[0]), str(path)])}"
        if readable
        else "Bring it back from a copy of your own: a new ingest would number the properties anew."
    )
    return CatalogUnreadableError(
        f"{path} cannot be read: {reason}. Nothing was changed. "
        f"Backups: {', '.join(found) if found else 'none'}. {advice}"
    )


def _is_whole(path: Path) -> bool:
    try:
        verify_file(path)
    except UNREADABLE:
        return False
    return True


def _verify_written(path: Path) -> None:
    try:
        verify_file(path)
    except UNREADABLE as error:
        raise CatalogUnreadableError(
            f"{path} does not read back as it was written: {error}. The catalogue in use was not changed."
            " Look at the disk, then do it again."
        ) from error


def _replace(home: Path, path: Path, data: bytes) -> None:
    write_replacing(path, data, _folders(home).staging)


def _folders(home: Path) -> AssetFolders:
    return Home(home).asset(_ASSET)


@contextlib.contextmanager
def _only_writer(home: Path) -> Iterator[None]:
    """Let one process at a time replace the catalogue. Raises DurableWriteError, OSError."""
    folders = _folders(home)
    for folder in (folders.published, folders.versions, folders.staging, folders.locks):
        make_directory(folder)
    lock = taken(folders.locks / "catalog.lock", seconds=_WAIT_SECONDS)
    if lock is None:
        raise DurableWriteError(f"another process has been writing the catalogue for {_WAIT_SECONDS:.0f} s")
    try:
        yield
    finally:
        lock.close()
