"""The files of the catalogue on disk: publishing a new one, its second copy, its mark, and putting one back.

Of two whole versions the newer is true. The version mark (``vlm_durable/versions/version_mark.py``) says
which version was the newest, so that a file that was put back to an older one is not believed. At every
moment the file that readers see has an intact second copy, or is itself the second copy's successor.
``catalog_file.py`` has the format.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from vlm_catalog.catalog_file import (
    UNREADABLE,
    CatalogError,
    CatalogFormatError,
    CatalogHeader,
    read_header,
    verify_file,
)
from vlm_catalog.ranges import CATALOG, range_assets
from vlm_durable.commands import command
from vlm_durable.files.files import (
    TEMPORARY_SUFFIX,
    DurableWriteError,
    make_directory,
    set_aside,
    sha256_of,
    write_replacing,
)
from vlm_durable.files.layout import AssetFolders, Home
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.version_mark import (
    UNKNOWN_STORE,
    MarkComparison,
    VersionMark,
    VersionMarkReading,
    compare_with_mark,
    mark_copies,
)
from vlm_durable.versions.versioned_object import PublishedError, VersionedObject
from vlm_durable.wording import counted

_KEY = "catalog"
_NOTE = "put_back.json"
_WAIT_SECONDS = 60.0
"""How long to wait for another process that publishes or puts back: each takes a few seconds."""

_WAS_DAMAGED = "The catalogue was damaged and was put back"
_WAS_OLDER = "The catalogue was an older version and was put back"
_MARK_WAS_BEHIND = "The catalogue's version mark was behind"
_MARK_WAS_DAMAGED = "The catalogue's version mark could not be read"


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
            _put_right(home, damage=reason)
            if second_copy.exists():
                if sha256_of(second_copy) == sha256_of(path):
                    return
                set_aside(second_copy, quarantine(home), keep=True)
            _replace(home, second_copy, path.read_bytes())
    except OSError as error:
        raise unreadable(home, f"{reason}, and it could not be put back: {error}") from error


def publish_catalog(home: Path, data: bytes) -> None:
    """Put a new catalogue in place, each row of it read, with a second copy; then raise its mark.

    Raises CatalogUnreadableError, OSError; of an older version or another home's too, with nothing changed.
    """
    path = catalog_path(home)
    second_copy, previous = backup_paths(home)
    with only_catalog_writer(home):
        header = _header_to_publish(home, data)
        if not path.exists():
            _publish_beside_nothing(home, header, data)
            return
        if isinstance(damage := _header_of(path, wholly=True), str):
            # One that rotted keeps no newer one away, and is no version before.
            try:
                _put_right(home, damage=f"cannot be read: {damage}")
            except CatalogUnreadableError:
                if not _comes_after_files(home, header):
                    raise
                # No row of an ingest that only this home has is lost: an ingest reads every row of the
                # catalogue that it extends, so what it hands in has them all, and rows that do not read make
                # none. What a store hands in comes after these files, and the quarantine keeps them.
                _publish_over_files(home, header, data)
                return
        before = path.read_bytes()
        _replace(home, previous, before)
        try:
            _replace(home, second_copy, data)
            _replace(home, path, data)
        except OSError:
            # A second copy that is newer counts as the catalogue, and this one was refused.
            with contextlib.suppress(OSError):
                _replace(home, second_copy, before)
            raise
        _raise_mark(home, header)


def replace_catalog(home: Path, data: bytes, *, chosen: CatalogHeader | None = None) -> None:
    """Put a newer catalogue in place of files that may be damaged or old; they are kept in the quarantine.

    chosen: the header of these bytes, each row of which was read, where a person says that this is the true
    catalogue, whichever one the mark is of. Raises as ``publish_catalog`` does.
    """
    with only_catalog_writer(home):
        _publish_over_files(home, chosen or _header_to_publish(home, data), data)


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
    """The highest sequence number of each catalogue that a file or a mark of this home names, by its id.

    With a mark, only the mark's catalogue counts, unless neither the catalogue nor its second copy is that
    one. Where the two copies of the mark are of two homes, both count. Raises CatalogFormatError.
    """
    headers = [_header_of(path) for path in (catalog_path(home), *backup_paths(home))]
    mark, _ = _mark(home, headers[0], headers[1])
    versions = [
        (header.catalog_id, header.sequence) for header in headers if isinstance(header, CatalogHeader)
    ]
    if mark is None:
        versions += [(reading.origin, reading.sequence) for reading in _mark_reading(home).marks]
    else:
        if mark.origin in _catalog_ids(headers[0], headers[1]):
            versions = [version for version in versions if version[0] == mark.origin]
        versions.append((mark.origin, mark.sequence))
    return {id_: max(sequence for other, sequence in versions if other == id_) for id_, _ in versions}


def trouble_of(home: Path, header: CatalogHeader) -> str | None:
    """Why a catalogue that is whole must not become this home's, or None. Raises CatalogFormatError."""
    mark, doubt = _own_mark(home)
    return f"may be an older version: {doubt}" if doubt is not None else _problem(header, mark)


def last_store(home: Path) -> str | None:
    """The last store that had this home's catalogue; UNKNOWN_STORE where the mark cannot tell.

    Raises CatalogFormatError.
    """
    mark, doubt = _own_mark(home)
    if doubt is not None:
        return UNKNOWN_STORE
    return mark.store if mark is not None else None


def note_store(home: Path, store: Mirror) -> None:
    """Note that a store has this home's catalogue. Where the disk refuses, the next look does it."""
    if not store.keeps_copies or last_store(home) == str(store):
        return
    with contextlib.suppress(OSError), only_catalog_writer(home):
        mark, _ = _own_mark(home)
        if mark is not None:
            _catalog(home).mark.write(mark.noting(str(store)))


def catalog_id_of(home: Path) -> str | None:
    """The id of this home's catalogue; None where there is none, or its files and its mark do not agree."""
    try:
        header, copy = (_header_of(path) for path in (catalog_path(home), backup_paths(home)[0]))
        mark, doubt = _mark(home, header, copy)
    except CatalogFormatError:
        return None
    ids = set(_catalog_ids(header, copy))
    if mark is not None:
        return mark.origin if not ids or mark.origin in ids else None
    return next(iter(ids)) if len(ids) == 1 and doubt is None else None


def recorded_catalogs(home: Path) -> set[str]:
    """The ids of the catalogues that the records of published partitions name. Raises OSError."""
    ids: set[str] = set()
    for asset in range_assets(Home(home)):
        for key in asset.recorded_keys():
            with contextlib.suppress(PublishedError, FormatVersionError):
                record = PublishedPartitions(asset).record(key)
                ids.update([record.origin] if record is not None and record.origin else [])
    return ids


def choose_command(home: Path, place: object) -> str:
    """The command that checks a catalogue and makes it the home's."""
    return command("repair", "--home", home, "--catalog", place)


def unreadable(home: Path, problem: str) -> CatalogUnreadableError:
    """The error for a catalogue that cannot be put back: what is wrong, and which files there are.

    problem: the rest of a sentence that begins with the path of the catalogue.
    """
    described, readable, own = [], list[tuple[int, Path]](), _own_id(home)
    for path in (catalog_path(home), *backup_paths(home)):
        if not path.exists():
            continue
        header = _header_of(path)
        if isinstance(header, CatalogHeader):
            if own in (None, header.catalog_id):
                readable.append((header.sequence, path))
            described.append(f"{path} (ingest {header.sequence}, {counted(header.rows, 'properties')})")
        else:
            described.append(f"{path} (unreadable)")
    advice = "Bring it back from a copy of your own, which this checks first: " + choose_command(home, "FILE")
    if readable:
        newest = max(readable, key=lambda candidate: candidate[0])[1]
        advice += (
            f". If there is none, this checks the newest file that is here, says what it lacks, and asks:"
            f" {choose_command(home, newest)}"
        )
    return CatalogUnreadableError(
        f"{catalog_path(home)} {problem}. Nothing was changed. Files of it here:"
        f" {', '.join(described) if described else 'none'}. {advice}"
    )


def _catalog_ids(*headers: CatalogHeader | str) -> list[str]:
    """The ids of the catalogues whose headers could be read."""
    return [header.catalog_id for header in headers if isinstance(header, CatalogHeader)]


def _own_id(home: Path) -> str | None:
    """The id of this home's catalogue, as partitions, both copies or the mark say; None where none does."""
    with contextlib.suppress(OSError, ValueError):
        (recorded,) = recorded_catalogs(home)
        return recorded
    header, copy = (_header_of(path) for path in (catalog_path(home), backup_paths(home)[0]))
    ids = _catalog_ids(header, copy)
    if len(ids) == 2 and len(set(ids)) == 1:
        return ids[0]
    mark, _ = _mark(home, header, copy)
    return mark.origin if mark is not None else None


@dataclass(frozen=True)
class _CatalogFiles:
    """The catalogue and its second copy by their headers, beside the mark.

    doubt: why the mark does not say which version is the newest although there is one. problem: why the
    catalogue is not the newest version that is known of; None where it is. is_disputed: the two copies of the
    mark are of two homes.
    """

    header: CatalogHeader | str
    copy: CatalogHeader | str
    mark: VersionMark | None
    doubt: str | None
    problem: str | None
    is_disputed: bool

    @classmethod
    def read(cls, home: Path, *, damage: str | None = None) -> _CatalogFiles:
        """damage: what a reader ran into; then all of the catalogue is read. Raises CatalogFormatError."""
        header = _header_of(catalog_path(home), wholly=damage is not None)
        copy = _header_of(backup_paths(home)[0])
        mark, doubt = _mark(home, header, copy)
        problem = cls._problem_of(header, copy, mark, damage)
        # Without a mark two copies that are alike are believed.
        if doubt is not None and not (_is_alike(header, copy) and problem is None):
            problem = f"{problem}, and {doubt}" if problem is not None else f"is in doubt: {doubt}"
        return cls(header, copy, mark, doubt, problem, _is_disputed(_mark_reading(home)))

    @property
    def catalog(self) -> CatalogHeader:
        """The header of the catalogue, which must be without a problem."""
        assert isinstance(self.header, CatalogHeader)
        return self.header

    @property
    def is_marked(self) -> bool:
        """Whether the catalogue, which must be without a problem, is the version of the mark."""
        return not self.is_disputed and _standing(self.catalog, self.mark) is MarkComparison.CURRENT

    @property
    def is_sound(self) -> bool:
        """Whether the catalogue by itself reads and is not behind its mark."""
        return isinstance(self.header, CatalogHeader) and _problem(self.header, self.mark) is None

    @property
    def may_take_copy(self) -> bool:
        """Whether the second copy, if it is whole, is the newest version."""
        if self.doubt is not None:
            return False
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
        if copy.sequence == header.sequence and _standing(header, mark) is not MarkComparison.CURRENT:
            return f"and its second copy are both ingest {copy.sequence}, with different properties"
        return None


def _put_right(home: Path, *, damage: str | None = None) -> CatalogHeader:
    """Make the catalogue the newest version that is whole, and the mark say so. The caller holds the lock.

    damage: what a reader ran into; then every row is read. Raises CatalogUnreadableError, CatalogFormatError,
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
            # A killed ingest or the disk left this copy; the next opening makes it again.
            set_aside(second_copy, quarantine(home))
        else:
            raise unreadable(home, files.problem)
    assert isinstance(header, CatalogHeader)
    if files.doubt is not None:
        notes.append(
            (
                _MARK_WAS_DAMAGED,
                f"The catalogue and its second copy are alike; {files.doubt}: it was written anew.",
            )
        )
    elif not _is_explained(home, header, files):
        marked = "nothing" if files.mark is None else files.mark.sequence
        sentence = (
            f"The catalogue is ingest {header.sequence}, and its mark in {mark_path(home).parent} said"
            f" {marked}: .state was lost, or is an older copy. The mark was raised, and nothing"
            " of the catalogue was changed. Look whether the rest of .state is as new as the data."
        )
        notes.append((_MARK_WAS_BEHIND, sentence))
    if notes:
        # The note first: a process that dies after the repair would leave an alert unsent.
        note_repair(home, notes[0][0], " ".join(sentence for _, sentence in notes))
    if takes_copy:
        _replace(home, path, second_copy.read_bytes())
    _raise_mark(home, header)
    return header


def _is_explained(home: Path, header: CatalogHeader, files: _CatalogFiles) -> bool:
    """Whether the mark says this version, or a kill between a catalogue and its mark left it behind."""
    if _standing(header, files.mark) is MarkComparison.CURRENT:
        return True
    if not backup_paths(home)[0].exists():
        # A first catalogue is marked before it is copied.
        return True
    copy = _header_of(backup_paths(home)[0], wholly=True)
    if files.mark is not None and (isinstance(copy, str) or _problem(copy, files.mark)):
        # Then it replaced files that were damaged or old.
        return True
    before = _header_of(backup_paths(home)[1])
    # One that came from a store may be several ingests ahead.
    return isinstance(before, CatalogHeader) and _standing(before, files.mark) is MarkComparison.CURRENT


def _is_alike(header: CatalogHeader | str, copy: CatalogHeader | str) -> bool:
    return (
        isinstance(header, CatalogHeader) and isinstance(copy, CatalogHeader) and header.sha256 == copy.sha256
    )


def _problem(header: CatalogHeader, mark: VersionMark | None) -> str | None:
    """Why a header is not that of the newest version by its mark; None where it is, or is newer."""
    match _standing(header, mark):
        case MarkComparison.CURRENT | MarkComparison.NEWER:
            return None
        case MarkComparison.OLDER if mark is not None:
            return (
                f"is an older version: ingest {header.sequence}, with {counted(header.rows, 'properties')},"
                " where ingest"
                f" {mark.sequence} was durable here ({mark.marked_at})"
            )
        case _ if mark is not None and mark.origin != header.catalog_id:
            return (
                f"is catalogue {header.catalog_id}, and the mark in .state is that of another one: ingest"
                f" {mark.sequence} of {mark.origin} ({mark.marked_at}). One of the two is another home's"
            )
        case _:
            assert mark is not None
            return f"is not the catalogue that was ingest {mark.sequence} of this home ({mark.marked_at})"


def _standing(header: CatalogHeader, mark: VersionMark | None) -> MarkComparison:
    if mark is not None and mark.origin != header.catalog_id:
        return MarkComparison.OTHER
    return compare_with_mark(mark, header.sequence, _version(header))


def _version(header: CatalogHeader) -> str:
    """A version as the mark keeps it, beside its number: the catalogue's id and its digest."""
    return f"{header.catalog_id}:{header.sha256}"


def _mark(
    home: Path, header: CatalogHeader | str, copy: CatalogHeader | str
) -> tuple[VersionMark | None, str | None]:
    """The mark of the catalogue, and why it does not say which version is the newest where there is one.

    A copy of the mark that is of another home does not count, unless both are. Where the copies are of two
    homes, the published partitions tell which one is this home's; where there are none, the catalogue and its
    second copy, if both are of the same home. Raises CatalogFormatError.
    """
    reading = _mark_reading(home)
    where = " and ".join(map(str, mark_copies(mark_path(home))))
    if reading.is_unreadable:
        return None, f"its mark cannot be read ({where})"
    ids = _catalog_ids(header, copy)
    if not _is_disputed(reading):
        return reading.mark, None
    in_both = set(ids) if len(ids) == 2 and ids[0] == ids[1] else set[str]()
    own = set[str]()
    with contextlib.suppress(OSError):
        own = recorded_catalogs(home) or in_both
    if len(own) != 1 and not in_both:
        return None, f"the two copies of its mark are those of two homes ({where})"
    # Where nothing says whose home it is, a mark that contradicts the files is taken: then everything stops.
    trusted = [mark for mark in reading.marks if len(own) == 1 and mark.origin in own]
    contradicting = [mark for mark in reading.marks if mark.origin not in ids]
    return (*trusted, *contradicting, *reading.marks)[0], None


def _is_disputed(reading: VersionMarkReading) -> bool:
    return len({mark.origin for mark in reading.marks}) > 1


def _mark_reading(home: Path) -> VersionMarkReading:
    try:
        return _catalog(home).mark.read()
    except FormatVersionError as error:
        raise CatalogFormatError(str(error)) from None


def _own_mark(home: Path) -> tuple[VersionMark | None, str | None]:
    return _mark(home, _header_of(catalog_path(home)), _header_of(backup_paths(home)[0]))


def _raise_mark(home: Path, header: CatalogHeader) -> bool:
    """Have the mark say this version; False where the disk refuses. Then the next opening does it."""
    with contextlib.suppress(OSError):
        mark = _catalog(home).mark
        mark.raise_to(VersionMark.now(mark.name, header.sequence, _version(header)))
        return True
    return False


def _header_of(path: Path, *, wholly: bool = False) -> CatalogHeader | str:
    """The header of a file, or why it cannot be read. wholly: read all rows. Raises CatalogFormatError."""
    try:
        return verify_file(path) if wholly else read_header(path)
    except FileNotFoundError:
        return "it is gone"
    except UNREADABLE as error:
        return str(error)


def _header_to_publish(home: Path, data: bytes) -> CatalogHeader:
    """Read every row of what should be the catalogue; the disk gets these bytes, and is read back."""
    refused = "is not replaced: what should replace it"
    try:
        header = verify_file(pa.BufferReader(data))
    except UNREADABLE as error:
        raise unreadable(home, f"{refused} cannot be read: {error}") from error
    if problem := trouble_of(home, header):
        raise unreadable(home, f"{refused} {problem}")
    return header


def _comes_after_files(home: Path, header: CatalogHeader) -> bool:
    """Whether the catalogue and its second copy, where their footers read, come before this one or are it.

    The mark may be behind them.
    """
    footers = (_header_of(path) for path in (catalog_path(home), backup_paths(home)[0]))
    return all(
        other.catalog_id == header.catalog_id
        and (other.sequence < header.sequence or other.sha256 == header.sha256)
        for other in footers
        if isinstance(other, CatalogHeader)
    )


def _publish_over_files(home: Path, header: CatalogHeader, data: bytes) -> None:
    """Keep the catalogue and its second copy in the quarantine, and publish as beside nothing."""
    make_directory(quarantine(home))
    for path in (catalog_path(home), backup_paths(home)[0]):
        if path.exists():
            set_aside(path, quarantine(home), keep=True)
    _publish_beside_nothing(home, header, data)


def _publish_beside_nothing(home: Path, header: CatalogHeader, data: bytes) -> None:
    """The copy comes last: a copy without a catalogue means that the catalogue was lost.

    A new copy beside no mark means that the mark was lost. So where the mark could not be written, the next
    regular look makes the copy; but none that was replaced stays, or it might count as the newest.
    """
    second_copy = backup_paths(home)[0]
    _replace(home, catalog_path(home), data)
    if _raise_mark(home, header) or second_copy.exists():
        _replace(home, second_copy, data)


def _replace(home: Path, path: Path, data: bytes) -> None:
    write_replacing(path, data, _folders(home).staging)


def _catalog(home: Path) -> VersionedObject[None]:
    """Its record is the footer of its file, so that an opening reads no other."""
    return VersionedObject(_folders(home).partition(_KEY))


def _folders(home: Path) -> AssetFolders:
    return Home(home).asset(CATALOG)


@contextlib.contextmanager
def only_catalog_writer(home: Path) -> Iterator[None]:
    """Let one process at a time replace the catalogue. Raises DurableWriteError, OSError."""
    catalog = _catalog(home)
    lock = catalog.lock(_WAIT_SECONDS)
    if lock is None:
        raise DurableWriteError(f"another process has been writing the catalogue for {_WAIT_SECONDS:.0f} s")
    try:
        for folder in (catalog.staging, catalog.marks_staging):
            for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):
                leftover.unlink()
        yield
    finally:
        lock.close()
