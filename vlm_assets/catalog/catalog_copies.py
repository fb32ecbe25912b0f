"""The files of the catalogue on disk: publishing a new one, its second copy, its mark, and putting one back.

Of two whole versions the newer is true. The version mark (``resources/storage/version_mark.py``) says which
version was the newest, so that a file that was put back to an older one is not believed. At every moment the
file that readers see has an intact second copy, or is itself the second copy's successor.
``catalog_file.py`` has the format.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

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
from resources.storage.sealed_json import FormatVersionError
from resources.storage.version_mark import (
    Standing,
    VersionMark,
    mark_copies,
    raise_version_mark,
    read_version_mark,
    standing,
)
from vlm_assets.catalog.catalog_file import (
    UNREADABLE,
    CatalogError,
    CatalogFormatError,
    CatalogHeader,
    read_header,
    verify_file,
)

_ASSET, _KEY = "property_catalog", "catalog"
_NOTE = "put_back.json"
_WAIT_SECONDS = 60.0
"""For another process that publishes or puts back: each takes a few seconds."""

_WAS_DAMAGED = "The catalogue was damaged and was put back"
_WAS_OLDER = "The catalogue was an older version and was put back"
_MARK_WAS_BEHIND = "The catalogue's version mark was behind"


class CatalogUnreadableError(CatalogError):
    """There is a catalogue, but no newest version of it that reads. Never the same as empty."""


def catalog_path(home: Path) -> Path:
    """The catalogue of a home."""
    return _folders(home).published / f"{_KEY}.parquet"


def backup_paths(home: Path) -> tuple[Path, Path]:
    """The second copy of the catalogue, and the catalogue before the last change."""
    versions = _folders(home).versions
    return versions / f"{_KEY}.0.parquet", versions / f"{_KEY}.1.parquet"


def mark_path(home: Path) -> Path:
    """The version mark of the catalogue."""
    return _folders(home).partition(_KEY).version_mark


def catalog_folders(home: Path) -> tuple[Path, ...]:
    """What has to be removed to number the properties anew: nothing finished may depend on the numbers."""
    return catalog_path(home).parent, backup_paths(home)[0].parent, mark_path(home).parent


def quarantine(home: Path) -> Path:
    """The folder of catalogues that were replaced by their second copy."""
    return _folders(home).quarantine


def has_catalog(home: Path) -> bool:
    """Whether this home has a catalogue, or anything says that it had one."""
    paths = (catalog_path(home), *backup_paths(home), *mark_copies(mark_path(home)))
    return any(path.exists() for path in paths)


def newest_header(home: Path) -> CatalogHeader:
    """The header of the catalogue, put right first if a newer version is here or was.

    Costs the footers of the catalogue and of its second copy. Raises CatalogUnreadableError,
    CatalogFormatError.
    """
    files = _CatalogFiles.read(home)
    if files.problem is None and files.is_marked:
        return files.catalog
    try:
        with only_catalog_writer(home):
            return _put_right(home)
    except OSError as error:
        if files.problem is None:
            # Only the mark is behind. A disk that cannot be written is no reason to read nothing.
            return files.catalog
        raise unreadable(home, f"{files.problem}, and it could not be put back: {error}") from error


def put_back(home: Path, reason: str) -> None:
    """Replace a damaged or missing catalogue by its second copy; the damaged file goes into the quarantine.

    Does nothing if the catalogue is whole (another process was faster). Raises CatalogUnreadableError, with
    nothing changed, if the second copy is not whole or is an older version, or the disk refuses.
    """
    try:
        with only_catalog_writer(home):
            _put_right(home, damage=f"cannot be read: {reason}")
    except OSError as error:
        raise unreadable(home, f"cannot be read: {reason}, and it could not be put back: {error}") from error


def check_copies(home: Path) -> None:
    """Compare the catalogue with its second copy, byte for byte, and put right the one that is wrong.

    Costs one read of both files. Raises CatalogUnreadableError if neither is whole and the newest version,
    CatalogFormatError.
    """
    path, second_copy = catalog_path(home), backup_paths(home)[0]
    files = _CatalogFiles.read(home)
    with contextlib.suppress(OSError):
        is_alike = sha256_of(path) == sha256_of(second_copy)
        if is_alike and files.problem is None and files.is_marked:
            with only_catalog_writer(home):
                _raise_mark(home, files.catalog)  # Both copies of the mark say it from now on.
            return
    reason = "cannot be read: it is not what was written"
    try:
        with only_catalog_writer(home):
            catalog = _put_right(home, damage=reason)
            if second_copy.exists() and sha256_of(second_copy) == sha256_of(path):
                return
            copy = _header_of(second_copy)
            if isinstance(copy, CatalogHeader) and copy.sequence >= catalog.sequence:
                set_aside(second_copy, quarantine(home), keep=True)
            _replace(home, second_copy, path.read_bytes())
    except OSError as error:
        raise unreadable(home, f"{reason}, and it could not be put back: {error}") from error


def publish_catalog(home: Path, data: bytes) -> None:
    """Put a new catalogue in place, verified, with a second copy; then raise its mark.

    Raises CatalogUnreadableError, OSError; of an older version or another home's too, with nothing changed.
    """
    path = catalog_path(home)
    second_copy, previous = backup_paths(home)
    with only_catalog_writer(home):
        header = _header_to_publish(home, data)
        if not path.exists():
            _publish_beside_nothing(home, header, data)
            return
        before = path.read_bytes()
        _replace(home, previous, before)
        _verify_written(previous)
        try:
            _replace(home, second_copy, data)
            _verify_written(second_copy)
            _replace(home, path, data)
        except (OSError, CatalogUnreadableError):
            # A second copy that is newer counts as the catalogue, and this one was refused.
            with contextlib.suppress(OSError):
                _replace(home, second_copy, before)
            raise
        _raise_mark(home, header)


def replace_catalog(home: Path, data: bytes) -> None:
    """Put a newer catalogue in place of files that may be damaged or old; they are kept in the quarantine.

    Raises as ``publish_catalog`` does.
    """
    with only_catalog_writer(home):
        header = _header_to_publish(home, data)
        make_directory(quarantine(home))
        for path in (catalog_path(home), backup_paths(home)[0]):
            if path.exists():
                set_aside(path, quarantine(home), keep=True)
        _publish_beside_nothing(home, header, data)


def note_repair(home: Path, title: str, sentence: str) -> None:
    """Write down what was put right, for ``last_put_back``. Raises OSError."""
    make_directory(quarantine(home))
    note = {"at": time.time(), "title": title, "sentence": sentence}
    _replace(home, quarantine(home) / _NOTE, json.dumps(note).encode())


def last_put_back(home: Path) -> tuple[float, str, str] | None:
    """When the catalogue was last put right (unix seconds), a title and a sentence about it."""
    try:
        note = json.loads((quarantine(home) / _NOTE).read_bytes())
        return float(note["at"]), str(note["title"]), str(note["sentence"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0, _WAS_DAMAGED, f"It was put back from its second copy; see {quarantine(home)}."


def known_versions(home: Path) -> dict[str, int]:
    """By the id of each catalogue that anything here speaks of, its highest sequence number.

    With a mark that is this home's catalogue alone. Raises CatalogFormatError.
    """
    mark = _mark(home)
    headers = [_header_of(path) for path in (catalog_path(home), *backup_paths(home))]
    versions = [(one.catalog_id, one.sequence) for one in headers if isinstance(one, CatalogHeader)]
    if mark is not None:
        own = mark.digest.partition(":")[0]
        versions = [(own, mark.sequence), *(one for one in versions if one[0] == own)]
    return {id_: max(sequence for other, sequence in versions if other == id_) for id_, _ in versions}


def trouble_of(home: Path, header: CatalogHeader) -> str | None:
    """Why a catalogue that is whole must not become this home's, or None. Raises CatalogFormatError."""
    return _problem(header, _mark(home))


def choose_command(home: Path, place: object) -> str:
    """The command that checks a catalogue and makes it the home's."""
    return f"`{shlex.join(['vlm-assets', 'repair', '--home', str(home), '--catalog', str(place)])}`"


def unreadable(home: Path, problem: str) -> CatalogUnreadableError:
    """The error for a catalogue that cannot be put back: what is wrong, and which files there are.

    problem: goes on after the path of the catalogue.
    """
    described, readable = [], list[tuple[int, Path]]()
    for path in (catalog_path(home), *backup_paths(home)):
        if not path.exists():
            continue
        header = _header_of(path)
        if isinstance(header, CatalogHeader):
            readable.append((header.sequence, path))
            described.append(f"{path} (ingest {header.sequence}, {header.rows} properties)")
        else:
            described.append(f"{path} (unreadable)")
    advice = "Bring it back from a copy of your own, which this checks first: " + choose_command(home, "FILE")
    if readable:
        newest = max(readable, key=lambda one: one[0])[1]
        advice += (
            f". If there is none, this checks the newest file that is here, says what it lacks, and asks:"
            f" {choose_command(home, newest)}"
        )
    return CatalogUnreadableError(
        f"{catalog_path(home)} {problem}. Nothing was changed. Files of it here:"
        f" {', '.join(described) if described else 'none'}. {advice}"
    )


@dataclass(frozen=True)
class _CatalogFiles:
    """The catalogue and its second copy by their headers, beside the mark.

    problem: why the catalogue is not the newest version that is known of; None where it is.
    """

    header: CatalogHeader | str
    copy: CatalogHeader | str
    mark: VersionMark | None
    problem: str | None

    @classmethod
    def read(cls, home: Path, *, damage: str | None = None) -> _CatalogFiles:
        """damage: what a reader met, so that all of the catalogue is read. Raises CatalogFormatError."""
        mark = _mark(home)
        header = _header_of(catalog_path(home), wholly=damage is not None)
        copy = _header_of(backup_paths(home)[0])
        return cls(header, copy, mark, cls._problem_of(header, copy, mark, damage))

    @property
    def catalog(self) -> CatalogHeader:
        """The header of the catalogue, which must be without a problem."""
        assert isinstance(self.header, CatalogHeader)
        return self.header

    @property
    def is_marked(self) -> bool:
        """Whether the catalogue, which must be without a problem, is the version of the mark."""
        return _standing(self.catalog, self.mark) is Standing.CURRENT

    @property
    def is_sound(self) -> bool:
        """Whether the catalogue by itself reads and is not behind its mark."""
        return isinstance(self.header, CatalogHeader) and _problem(self.header, self.mark) is None

    @property
    def may_take_copy(self) -> bool:
        """Whether the second copy, if it is whole, is the newest version."""
        if not isinstance(self.copy, CatalogHeader) or _problem(self.copy, self.mark) is not None:
            return False
        if not isinstance(self.header, CatalogHeader) or not self.is_sound:
            return True
        is_of_this_home = self.copy.catalog_id == self.header.catalog_id
        return is_of_this_home and self.copy.sequence > self.header.sequence

    @staticmethod
    def _problem_of(
        header: CatalogHeader | str, copy: CatalogHeader | str, mark: VersionMark | None, damage: str | None
    ) -> str | None:
        if isinstance(header, str):
            return damage or f"cannot be read: {header}"
        if problem := _problem(header, mark):
            return problem
        if not isinstance(copy, CatalogHeader) or _problem(copy, mark) or copy.sha256 == header.sha256:
            return None
        if copy.catalog_id != header.catalog_id:
            return "is of another home than its second copy, and no mark says which of them is this home's"
        if copy.sequence > header.sequence:
            return (
                f"is ingest {header.sequence}, and its second copy is ingest {copy.sequence}: an ingest was"
                " killed, or the file was put back to an older version"
            )
        if copy.sequence == header.sequence and _standing(header, mark) is not Standing.CURRENT:
            return f"and its second copy are both ingest {copy.sequence}, with different properties"
        return None


def _put_right(home: Path, *, damage: str | None = None) -> CatalogHeader:
    """Have the catalogue be the newest version that is whole, and the mark say so. Wants the lock held.

    damage: what a reader met, so that every row is read. Raises CatalogUnreadableError, CatalogFormatError,
    OSError.
    """
    path, second_copy = catalog_path(home), backup_paths(home)[0]
    files = _CatalogFiles.read(home, damage=damage)
    header, notes = files.header, list[tuple[str, str]]()
    takes_copy = False
    if files.problem is not None:
        if not files.may_take_copy:
            raise unreadable(home, files.problem)
        copy = _header_of(second_copy, wholly=True)
        make_directory(quarantine(home))
        if isinstance(copy, CatalogHeader):
            aside = set_aside(path, quarantine(home), keep=True) if path.exists() else None
            kept = f" The file that stood there is kept as {aside}." if aside else ""
            title = _WAS_OLDER if isinstance(header, CatalogHeader) else _WAS_DAMAGED
            notes.append((title, f"It was put back from its second copy (it {files.problem}).{kept}"))
            header, takes_copy = copy, True
        elif files.is_sound:
            # An ingest that was killed or a disk has left it; the next look makes it again.
            set_aside(second_copy, quarantine(home))
    if not isinstance(header, CatalogHeader):
        raise unreadable(home, files.problem or "cannot be read")
    before = 0 if files.mark is None else files.mark.sequence
    if header.sequence > before + 1:
        # A kill between an ingest and its mark explains one version.
        sentence = (
            f"The catalogue is ingest {header.sequence}, and its mark in {mark_path(home).parent} said"
            f" {before or 'nothing'}: .state was lost, or is an older copy. The mark was raised, and nothing"
            " of the catalogue was changed. Look whether the rest of .state is as new as the data."
        )
        notes.append((_MARK_WAS_BEHIND, sentence))
    if notes:
        # The note first: a process that dies after the repair would leave an alert unsent.
        note_repair(home, notes[0][0], " ".join(sentence for _, sentence in notes))
    if takes_copy:
        _replace(home, path, second_copy.read_bytes())
        _verify_written(path)
    _raise_mark(home, header)
    return header


def _problem(header: CatalogHeader, mark: VersionMark | None) -> str | None:
    """Why a header is not that of the newest version by its mark; None where it is, or is newer."""
    match _standing(header, mark):
        case Standing.CURRENT | Standing.NEWER:
            return None
        case Standing.OLDER if mark is not None:
            return (
                f"is an older version: ingest {header.sequence}, with {header.rows} properties, where ingest"
                f" {mark.sequence} was durable here ({mark.marked_at})"
            )
        case _:
            assert mark is not None
            return f"is not the catalogue that was ingest {mark.sequence} of this home ({mark.marked_at})"


def _standing(header: CatalogHeader, mark: VersionMark | None) -> Standing:
    if mark is not None and mark.digest.partition(":")[0] != header.catalog_id:
        return Standing.OTHER
    return standing(mark, header.sequence, _version(header))


def _version(header: CatalogHeader) -> str:
    """What the mark says of a version beside its number: which catalogue it is of, and its digest."""
    return f"{header.catalog_id}:{header.sha256}"


def _mark(home: Path) -> VersionMark | None:
    try:
        return read_version_mark(mark_path(home), name=f"{_ASSET}/{_KEY}").mark
    except FormatVersionError as error:
        raise CatalogFormatError(str(error)) from None


def _raise_mark(home: Path, header: CatalogHeader) -> None:
    """Have the mark say this version. Where the disk refuses, the next opening does it."""
    mark = VersionMark.now(f"{_ASSET}/{_KEY}", header.sequence, _version(header))
    with contextlib.suppress(OSError):
        raise_version_mark(mark_path(home), mark)


def _header_of(path: Path, *, wholly: bool = False) -> CatalogHeader | str:
    """The header of a file, or why it cannot be read. wholly: read all rows. Raises CatalogFormatError."""
    try:
        return verify_file(path) if wholly else read_header(path)
    except FileNotFoundError:
        return "it is gone"
    except UNREADABLE as error:
        return str(error)


def _header_to_publish(home: Path, data: bytes) -> CatalogHeader:
    header = read_header(pa.BufferReader(data))
    if problem := _problem(header, _mark(home)):
        raise unreadable(home, f"is not replaced: what should replace it {problem}")
    return header


def _publish_beside_nothing(home: Path, header: CatalogHeader, data: bytes) -> None:
    """The copy comes last: a copy without a catalogue means that the catalogue was lost."""
    _replace(home, catalog_path(home), data)
    _verify_written(catalog_path(home))
    _raise_mark(home, header)
    _replace(home, backup_paths(home)[0], data)


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
def only_catalog_writer(home: Path) -> Iterator[None]:
    """Let one process at a time replace the catalogue. Raises DurableWriteError, OSError."""
    folders = _folders(home)
    for folder in (folders.published, folders.versions, folders.staging, folders.locks):
        make_directory(folder)
    lock = taken(folders.locks / "catalog.lock", seconds=_WAIT_SECONDS)
    if lock is None:
        raise DurableWriteError(f"another process has been writing the catalogue for {_WAIT_SECONDS:.0f} s")
    try:
        for folder in (folders.staging, folders.version_marks):
            for left in folder.glob(f"*{TEMPORARY_SUFFIX}"):
                left.unlink()
        yield
    finally:
        lock.close()
