"""Work under way in an S3 store: each committed segment is copied there, and any machine goes on from there.

The journal on disk commits as it does without a store. Keys are those of the home's files, and ``head.json``
beside a journal's segments says what the store has of it.

Segments first, then the head, always in place of the head that was read (``If-Match``, and ``If-None-Match``
for the first). Each opening of a journal puts a head of its own before its first row: that is the takeover. A
machine that was overtaken meets a head that it did not put, and changes nothing more. No listing of the store
is trusted: the head names all that counts. Only where a head is damaged do the listed segments take its
place, each verified by the digest in its name, and numbered without a gap.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

from vlm_durable.files import files
from vlm_durable.files.layout import AssetFolders, PartitionPaths
from vlm_durable.files.sealed_json import BrokenSealError, sealed, unsealed
from vlm_durable.journal import commits
from vlm_durable.journal.commits import Manifest
from vlm_durable.journal.high_water_mark import HighWaterMark, read_mark, slots, write_mark
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.journal_errors import (
    JournalLockedError,
    accept_loss_command,
    sample,
    storage_error,
)
from vlm_durable.journal.segments import SEGMENT_NAME, SegmentRecord, segment_number, segment_paths
from vlm_durable.journal.setting_aside import note_set_aside
from vlm_durable.journal.writer_lock import WriterLock
from vlm_durable.mirror.bucket import (
    ObjectDamagedError,
    StoreAwayError,
    StoredObject,
    StoreError,
    TakenError,
)
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.wording import counted

HEAD = "head.json"
"""The object beside a journal's segments that says which of them count, and who writes."""

FORMAT = 1

_SET_ASIDE = "set_aside"
"""Name of the event in a closed journal's head: why none of its rows may be used."""

_AT_ONCE = 8
_HEAD_BYTES = 1 << 30
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_END_SECONDS = 10.0

_log = logging.getLogger(__name__)


class TakenOverError(StoreError):
    """Another machine works on this partition now. Rows committed on this machine stay on its disk."""


class CopiesWaitError(StoreError):
    """Too many committed rows wait for a store that is away: they are copied before more is computed."""


class HeadDamagedError(StoreError):
    """The head of a journal in the store cannot be read. Nothing was changed."""


@dataclass(frozen=True)
class CopyLag:
    """Segments committed on this machine and not in the store yet. since: of the oldest, in unix seconds."""

    segments: int = 0
    bytes: int = 0
    since: float | None = None


@dataclass(frozen=True)
class Head:
    """Who writes a journal, and which segments of it are in the store.

    writer: an id of one opening, so that no two heads are alike. home: that of the machine. epoch: higher
    with each takeover. manifest: the bytes of a manifest whose segments are all in the store; empty before
    the first.
    """

    writer: str
    home: str
    epoch: int
    manifest: bytes = b""

    def to_bytes(self) -> bytes:
        """Sealed JSON."""
        return sealed({**vars(self), "manifest": self.manifest.decode()}, format_=FORMAT)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Raises BrokenSealError, FormatVersionError."""
        content = unsealed(data, where, format_=FORMAT)
        return cls(content["writer"], content["home"], content["epoch"], content["manifest"].encode())

    def read(self, where: str) -> Manifest | None:
        """The manifest in it, verified. Raises BrokenSealError, FormatVersionError."""
        return commits.decode_manifest(self.manifest, where) if self.manifest else None


class StoredJournal:
    """The journal of one generation of a partition in a store. Every method raises StoreError."""

    def __init__(self, paths: PartitionPaths, generation: str, store: Mirror) -> None:
        self.directory = paths.journal(generation)
        self.key, self.generation = paths.key, generation
        self._mark = paths.high_water_mark(generation)
        self._quarantine = paths.quarantine
        self._store = store
        self._root = paths.asset.home.root
        self._writer = uuid.uuid4().hex
        self._head_object: StoredObject | None = None
        """The object of the head that was read, or put by this opening; also of a damaged head."""
        self._is_removed = False
        self._damaged_bytes = b""
        self.head: Head | None = None
        self.copied_names: set[str] = set()
        """Names of the segments that are in the store."""

    @property
    def is_kept(self) -> bool:
        """Whether there is a store to keep it."""
        return self._store.keeps_copies

    @property
    def where(self) -> str:
        """The head's address, for people."""
        return self._store.address(self._name(HEAD))

    def pull(self, *, accept_missing: bool = False) -> tuple[str, ...]:
        """Have this machine's disk hold what the store has, before the journal is opened here.

        Returns sentences: what was fetched, and what is missing in the store. Rows that only this disk has
        stay. A damaged head is refused where segments may be missing; with ``accept_missing`` a sentence
        says so instead.

        Of two histories the one with the higher epoch counts; of equal epochs the store's. The recovery that
        follows adopts missing rows from the other history, and keeps aside those that exist twice. After a
        kill anywhere, calling it again finishes the work. Raises HeadDamagedError, JournalLockedError,
        JournalStorageError.
        """
        if not self._store.keeps_copies:
            return ()
        self._store.prove()
        stored: Manifest | None = None
        damage: HeadDamagedError | None = None
        try:
            stored = self.read_manifest()
        except HeadDamagedError as error:
            damage = error
        marks = read_mark(self._mark, key=self.key, generation=self.generation)
        ended = marks.mark is not None and marks.mark.retired and not self.directory.exists()
        listed: dict[str, re.Match[str]] = {}
        if self.head is None and not ended:
            # A head is put before the first segment: one that is not there was removed.
            listed = {name: match for name in self._listed() if (match := SEGMENT_NAME.fullmatch(name))}
            self._is_removed = damage is None and bool(listed)
        if self._is_damaged:
            if ended:
                return ()
            doubt = self._doubt(listed, marks.mark)
            if doubt and not accept_missing:
                raise self._refusal(doubt) from damage
            if not listed:
                return (f"{self.where} cannot be read, and no segment of committed rows is there.",)
        elif self.head is None or ended or (stored is not None and stored.retired):
            rows = marks.mark.rows if marks.mark and not marks.mark.retired else 0
            if self.head is not None or not rows:
                return ()
            return (
                f"{self._store} has nothing of the {counted(rows, 'rows')} of {self.key} that are"
                f" committed here: they"
                " are copied there now. If they were there before, a lifecycle rule or a person has removed"
                " them.",
            )
        try:
            for folder in (self.directory, self._quarantine.parent, self._mark.parent):
                files.make_directory(folder)
            lock = WriterLock(self.directory)
            try:
                if self.head is None:
                    return (self._take_over_listed(listed, accept_missing=accept_missing),)
                return tuple(self._take_over(self.head.epoch, stored, marks.mark))
            finally:
                lock.release()
        except OSError as error:
            raise storage_error(error, doing="taking work over", where=self.directory) from error

    def read_manifest(self) -> Manifest | None:
        """Read the store's head and return its manifest. Raises HeadDamagedError."""
        self.head = None
        self.head = self._read_head()
        return self._manifest()

    def holds(self, record: SegmentRecord) -> bool:
        """Whether the store has a segment, to the byte."""
        stored_object = self._store.head(self._name(record.name))
        return stored_object is not None and stored_object.sha256 == record.sha256

    def claim(self, epoch: int) -> None:
        """Become the one writer in the store too, by a new head that lists what the last head listed.

        A damaged head is replaced at once by one that lists the recovered segments: an empty one would hide
        them. Raises TakenOverError where another machine has put a head since ``pull``.
        """
        if self._is_damaged:
            if self._damaged_bytes:
                copy_name = f"{self.generation}-{HEAD}.{hashlib.sha256(self._damaged_bytes).hexdigest()[:12]}"
                files.make_directory(self._quarantine)
                files.write_replacing(self._quarantine / copy_name, self._damaged_bytes)
            self.copy()
            return
        stored = self._manifest()
        manifest_bytes = (
            self.head.manifest if self.head is not None and stored and not stored.retired else b""
        )
        self._put_head(replace(self._new_head(epoch), manifest=manifest_bytes))

    def copy(self) -> Manifest | None:
        """Put the missing segments of the newest manifest on disk, then a head that lists them.

        Returns the manifest that the store has now. Raises TakenOverError, also where nothing is missing.
        """
        manifest = commits.newest_manifest(self.directory)
        if manifest is None or manifest.retired:
            return None
        try:
            data = commits.manifest_path(self.directory, manifest.sequence).read_bytes()
        except FileNotFoundError:  # A newer one has taken its place.
            return self.copy()
        if hashlib.sha256(data).hexdigest() != manifest.file_sha256:
            raise StoreAwayError(f"{self.directory}: its manifest changed while it was copied; tried again.")
        missing = [record for record in manifest.segments if record.name not in self.copied_names]
        with ThreadPoolExecutor(min(_AT_ONCE, len(missing) or 1), thread_name_prefix="copy") as pool:
            list(pool.map(self._put_segment, missing))
        if self.head is None or self.head.manifest != data:
            epoch = max(manifest.epoch, self.head.epoch if self.head is not None else 0)
            self._put_head(replace(self._new_head(epoch), manifest=data))
        elif self._store.head(self._name(HEAD)) != self._head_object:
            self._find_own()
        return manifest

    def copy_leftovers(self) -> bool:
        """Copy what a run of this machine had committed when it died. Returns whether anything was copied.

        Only where the head is still this machine's, and this disk has a newer manifest. Otherwise the next
        start here takes over what another machine did, or what this disk has lost. A run that starts
        meanwhile puts a head of its own, and then this changes nothing. A run that starts at the moment when
        this head is put is interrupted, and tried again. Raises HeadDamagedError, TakenOverError.
        """
        stored, local = self.read_manifest(), commits.newest_manifest(self.directory)
        if self.head is None or self.head.home != self._new_head(0).home or local is None:
            return False
        if stored is not None and (
            stored.retired or (local.epoch, local.sequence) <= (stored.epoch, stored.sequence)
        ):
            return False
        before = self.head
        self.copy()
        return self.head is not before

    def close(self, *, set_aside: str | None = None) -> None:
        """Note in the store that no row of this journal is needed any more, then remove all but its head.

        For rows that were published, or that a person gave up. Calling it again finishes what a kill cut
        short. set_aside: why no machine may use the rows; this machine keeps them in its quarantine. A
        damaged head is replaced by one that says no more than that. Raises TakenOverError.
        """
        events: tuple[Mapping[str, str], ...] = () if set_aside is None else ({_SET_ASIDE: set_aside},)
        if self._is_damaged:
            # Nobody knows what it listed, and nobody needs it.
            identity = {"key": self.key, "generation": self.generation}
            closed = Manifest(1, 1, identity, (), None, None, events=events, retired=True).encode()
            self._put_head(replace(self._new_head(1), manifest=closed))
        manifest = self._manifest()
        if self.head is not None and manifest is None:
            self.claim(self.head.epoch + 1)
        if self.head is None or manifest is None:
            for name in self._listed():
                self._store.delete(self._name(name))
            return
        if not manifest.retired:
            manifest = replace(
                manifest,
                sequence=manifest.sequence + 1,
                previous_sequence=manifest.sequence,
                previous_sha256=manifest.file_sha256,
                events=(*manifest.events, *events),
                retired=True,
            )
            self._put_head(replace(self._new_head(self.head.epoch + 1), manifest=manifest.encode()))
        # A machine that was cut off may have put segments that no head lists.
        for name in sorted({record.name for record in manifest.segments} | self._listed()):
            self._store.delete(self._name(name))
        if manifest.segments:
            manifest = replace(manifest, sequence=manifest.sequence + 1, segments=())
            self._put_head(replace(self._new_head(self.head.epoch), manifest=manifest.encode()))

    def _listed(self) -> set[str]:
        """The names of the objects that the store lists beside the head."""
        below = self._name("")
        return {name.removeprefix(below) for name, _ in self._store.names(below)} - {HEAD}

    def _take_over(self, epoch: int, stored: Manifest | None, mark: HighWaterMark | None) -> Iterator[str]:
        local = commits.newest_manifest(self.directory)
        head_names = {record.name for record in stored.segments} if stored else set()
        local_names = {record.name for record in local.segments} | {*local.given_up} if local else set()
        # A segment that only the listing lacks is put again: the put finds it, or puts it back.
        self.copied_names = head_names & self._listed()
        if local is None and mark is not None and mark.rows:
            yield f"{self.key}: the journal of {counted(mark.rows, 'rows')} that was here is gone."
        if stored is not None:
            yield from self._fetch_missing(stored)
        forked = bool(head_names - local_names and local_names - head_names)
        if forked and local is not None:
            yield (
                f"{self.key}: this machine (epoch {local.epoch}) and another one (epoch {epoch}) have both"
                f" committed rows, {counted(len(local_names - head_names), 'segments')} of them here alone."
                " The recovery that follows keeps each property once and names what it puts aside; nothing is"
                " deleted."
            )
        # Segments that a person gave up on another machine are no loss here either. Any other segment that is
        # gone here, and is nowhere else, is a loss that nobody accepted: this disk's manifest stays.
        gone = {
            record.name
            for record in (local.segments if local else ())
            if record.name not in head_names and not self._has(record.name, record.sha256)
        }
        is_accepted = stored is not None and gone <= set(stored.given_up)
        is_ahead = head_names - local_names and (local is None or not forked or epoch >= local.epoch)
        if stored is not None and is_accepted and (gone or is_ahead):
            newer = mark is not None and epoch > mark.epoch
            self._put_in_front(stored, forget_mark=forked or bool(gone) or newer)
        self._raise_epoch(epoch)

    def _raise_epoch(self, epoch: int) -> None:
        """Have the opening that follows get an epoch above this one."""
        mark = read_mark(self._mark, key=self.key, generation=self.generation).mark
        if mark is None or mark.epoch < epoch:
            before = mark or HighWaterMark(self.key, self.generation, 0, 0, 0, None)
            write_mark(self._mark, replace(before, epoch=epoch))

    def _take_over_listed(self, matches: Mapping[str, re.Match[str]], *, accept_missing: bool) -> str:
        """Fetch the segments that the store lists, where no head says which of them count.

        The recovery that follows adopts them, and keeps aside those whose rows exist twice.
        """
        _, troubles = self._fetch_all({name: match["sha256"] for name, match in matches.items()})
        if troubles and not accept_missing:
            raise self._refusal(
                f"{counted(len(troubles), 'segments')} cannot be fetched, such as {troubles[0]}"
            )
        self.copied_names = set(matches)
        self._raise_epoch(max(int(match["epoch"]) for match in matches.values()))
        return (
            f"{self.where} cannot be read. The work goes on from the"
            f" {counted(len(matches) - len(troubles), 'segments')} of"
            " committed rows that are there, each verified by its digest, and from those here."
        )

    def _doubt(self, listed: Collection[str], mark: HighWaterMark | None) -> str:
        """Say why rows may be missing without a head; empty where the segments' numbers have no gap."""
        local_names = [path.name for path in segment_paths(self.directory)]
        given_up = mark.given_up if mark is not None else ()
        numbers = {segment_number(name) for name in (*listed, *local_names, *given_up)}
        if not numbers:
            return "no segment is there or here"
        if missing := set(range(1, max(numbers) + 1)) - numbers:
            which = sample(f"{number:08d}" for number in missing)
            return f"segments are neither there nor here (of {max(numbers)} those with number {which})"
        return ""

    def _refusal(self, doubt: str) -> HeadDamagedError:
        return HeadDamagedError(
            f"{self.where} cannot be read, and {doubt}: nobody can tell how many rows were committed, so"
            " nothing is begun over it. Nothing was changed. Put it back from a version of the bucket, or"
            " start the partition on the machine that worked on it last. Or go on without what is missing,"
            f" which is computed again: {accept_loss_command(self.key)}"
        )

    @property
    def _is_damaged(self) -> bool:
        return self.head is None and (self._is_removed or self._head_object is not None)

    def _fetch_missing(self, stored: Manifest) -> Iterator[str]:
        digests = {
            record.name: record.sha256 for record in stored.segments if record.name not in stored.given_up
        }
        fetched, troubles = self._fetch_all(digests)
        if fetched:
            yield (
                f"{self.key}:"
                f" {counted(fetched, 'segments of committed rows were', 'segment of committed rows was')}"
                f" fetched from {self._store}, verified."
            )
        if troubles:
            yield (
                f"{self.key}: {counted(len(troubles), 'segments')} that {self.where} lists cannot be"
                " fetched, such as"
                f" {troubles[0]}. Did a lifecycle rule or a person remove them? A machine that computed them"
                " still has them and puts them back when the partition is started there; or put them back"
                " from a version of the bucket."
            )

    def _fetch_all(self, digests: Mapping[str, str]) -> tuple[int, list[str]]:
        """Fetch segments that are missing or damaged here. Returns how many came, and why others did not.

        digests: the SHA-256 of each segment in hex, or its beginning, by name.
        """
        missing = {name: sha256 for name, sha256 in digests.items() if not self._has(name, sha256)}
        with ThreadPoolExecutor(min(_AT_ONCE, len(missing) or 1), thread_name_prefix="fetch") as pool:
            outcomes = list(pool.map(self._fetch, missing, missing.values()))
        troubles = [outcome for outcome in outcomes if outcome is not None]
        return len(missing) - len(troubles), troubles

    def _has(self, name: str, sha256: str) -> bool:
        try:
            return files.sha256_of(self.directory / name).startswith(sha256)
        except FileNotFoundError:
            return False

    def _fetch(self, segment: str, sha256: str) -> str | None:
        """Fetch a segment that is missing or damaged here. Returns why it cannot be fetched, or None."""
        name, path = self._name(segment), self.directory / segment
        try:
            data = self._store.get(name, most=_HEAD_BYTES)
        except StoreAwayError:
            raise
        except StoreError as error:
            return str(error)
        if not hashlib.sha256(data).hexdigest().startswith(sha256):
            return f"{self._store.address(name)}, whose bytes are not those that were committed"
        if path.exists():
            files.set_aside(path, self._quarantine)
        files.write_new(path, data)
        return None

    def _put_in_front(self, stored: Manifest, *, forget_mark: bool) -> None:
        """Make the store's manifest the newest one here. Newer manifests here are set aside."""
        for number in commits.sequences(self.directory):
            if number >= stored.sequence:
                files.set_aside(commits.manifest_path(self.directory, number), self._quarantine)
        if forget_mark:
            for slot in slots(self._mark):
                if slot.exists():
                    files.set_aside(slot, slot.parent)
        assert self.head is not None
        path = commits.manifest_path(self.directory, stored.sequence)
        files.write_new(path, self.head.manifest)
        mark = read_mark(self._mark, key=self.key, generation=self.generation).mark
        if mark is None:
            write_mark(self._mark, stored.mark)

    def _put_segment(self, record: SegmentRecord) -> None:
        path, name = self.directory / record.name, self._name(record.name)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise OSError(f"{path} is not what was committed: it was not copied")
        try:
            self._store.put(name, data, over=None)
        except TakenError:
            # Its name is its digest: other bytes there are damage.
            self._store.put(name, data, over=self._store.head(name))
        self.copied_names.add(record.name)

    def _new_head(self, epoch: int) -> Head:
        return Head(self._writer, f"{socket.gethostname()}:{self._root}", epoch)

    def _put_head(self, head: Head) -> None:
        while True:
            try:
                self._head_object = self._store.put(self._name(HEAD), head.to_bytes(), over=self._head_object)
                break
            except TakenError:
                self._find_own()
        self.head = head

    def _find_own(self) -> None:
        """Return where this opening put the current head itself, and the answer was lost; else raise."""
        expected_object = self._head_object
        try:
            other = self._read_head()
        except HeadDamagedError:
            # It may be the head of a machine that took over: this opening must not replace it.
            self._head_object = expected_object
            raise
        if other is not None and other.writer == self._writer:
            self.head = other
        elif other is None and expected_object is not None:
            # The program never removes a head: everything is put again from this disk.
            self.head = None
            self.copied_names.clear()
            raise StoreAwayError(
                f"{self.where} was removed: did a lifecycle rule or a person empty {self._store}? What is"
                " committed here is put there again."
            )
        elif other is not None:
            self._head_object = expected_object
            raise TakenOverError(
                f"Interrupted: partition {self.key} was taken over by {other.home} (epoch {other.epoch})"
                f" while this machine was cut off or stopped. Nothing of {self._store} was changed, and this"
                f" run publishes nothing. Its committed rows stay in {self.directory}; the next start of the"
                " partition here takes over what the other one did."
            )

    def _read_head(self) -> Head | None:
        """Read the head, which the next put of a head replaces; None where the store has none."""
        name = self._name(HEAD)
        while True:
            self._head_object = self._store.head(name)
            if self._head_object is None:
                return None
            try:
                data = self._store.get(name, most=_HEAD_BYTES)
            except ObjectDamagedError as error:
                raise self._damaged(str(error), b"") from error
            if hashlib.sha256(data).hexdigest() != self._head_object.sha256:
                if self._store.head(name) != self._head_object:
                    continue  # It was replaced in between.
                raise self._damaged("its bytes are not those that its checksum stands for", data)
            try:
                head = Head.from_bytes(data, self.where)
                manifest = head.read(self.where)
            except (BrokenSealError, KeyError, AttributeError) as error:
                raise self._damaged(str(error), data) from error
            self.copied_names = {record.name for record in manifest.segments} if manifest else set()
            return head

    def _damaged(self, why: str, data: bytes) -> HeadDamagedError:
        self._damaged_bytes = data
        return HeadDamagedError(
            f"{self.where} cannot be read: {why}. Nothing was changed. The next start of the partition puts a"
            " new one, which lists the segments that are there; where some are missing it says what to do."
        )

    def _manifest(self) -> Manifest | None:
        return self.head.read(self.where) if self.head is not None else None

    def _name(self, name: str) -> str:
        return f"{self.directory.relative_to(self._root)}/{name}"


def pull_others(paths: PartitionPaths, generation: str, store: Mirror) -> Iterator[str]:
    """Have this machine's disk hold what the store has of a partition's other generations.

    Their rows are adopted where the inputs did not change. Says what was fetched. Raises as ``pull``.
    """
    for name in stored_generations(paths, store):
        if name != generation:
            other = StoredJournal(paths, name, store)
            try:
                # No work begins in that generation now: missing rows matter when its settings are back.
                yield from other.pull(accept_missing=True)
            except JournalLockedError:
                continue


def close_published(paths: PartitionPaths, generation: str, store: Mirror) -> None:
    """Remove what the store still has of a generation that is published. Raises StoreError."""
    journal = StoredJournal(paths, generation, store)
    try:
        manifest = journal.read_manifest()
    except HeadDamagedError:
        journal.close()
        return
    if manifest is not None and (manifest.segments or not manifest.retired):
        journal.close()


def close_set_aside(paths: PartitionPaths, generation: str, store: Mirror) -> None:
    """Let no machine take over the rows of a generation that was set aside here. Raises StoreError."""
    journal = StoredJournal(paths, generation, store)
    with contextlib.suppress(HeadDamagedError):
        journal.read_manifest()
    journal.close(set_aside=f"its rows may be wrong: {paths.quarantine}")


def pull_closed(paths: PartitionPaths, store: Mirror) -> None:
    """Learn which generations were published and closed elsewhere, or set aside: none is begun again."""
    for name in stored_generations(paths, store):
        mark = paths.high_water_mark(name)
        try:
            manifest = StoredJournal(paths, name, store).read_manifest()
        except HeadDamagedError:
            continue  # Without a segment it is not begun; with all of them it is not closed.
        if manifest is None or not manifest.retired:
            continue
        if why := next((str(event[_SET_ASIDE]) for event in manifest.events if _SET_ASIDE in event), None):
            # The journal here has the same rows in it: the next start moves it away.
            note_set_aside(paths, name, why)
        elif not paths.journal(name).exists() and not any(slot.exists() for slot in slots(mark)):
            files.make_directory(mark.parent)
            write_mark(mark, manifest.mark)


def stored_journals(asset: AssetFolders, store: Mirror) -> dict[tuple[str, str], dict[str, int]]:
    """The objects of each journal of an asset with their bytes, by partition and generation.

    Raises StoreError.
    """
    below = f"{asset.journals.relative_to(asset.home.root)}/"
    sizes: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, size in store.names(below):
        key, generation, rest = (*name.removeprefix(below).split("/", 2), "", "")[:3]
        if rest:
            sizes[key, generation][rest] = size
    return sizes


def stored_generations(paths: PartitionPaths, store: Mirror) -> list[str]:
    """The generations of a partition that the store has, sorted. Raises StoreAwayError."""
    below = f"{paths.journals.relative_to(paths.asset.home.root)}/"
    return sorted({name.removeprefix(below).partition("/")[0] for name, _ in store.names(below)})


class Copying:
    """Copies a journal to a store in a thread beside the work; a context around the opened journal.

    most_bytes: how much may wait for a store that is away. wall: gives unix seconds.
    """

    def __init__(
        self, stored: StoredJournal, *, most_bytes: int, wall: Callable[[], float] = time.time
    ) -> None:
        self._stored = stored
        self._most_bytes = most_bytes
        self._wall = wall
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[int, float]] = {}
        self._requested = self._attempted = 0
        self._trouble: StoreError | None = None
        self._error: Exception | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="journal-copies", daemon=True)
        self.on_lag: Callable[[CopyLag], None] = lambda lag: None
        """Called with the lag at each change of it, from any thread."""

    def begin(self, journal: Journal) -> None:
        """Claim the partition in the store, then copy each commit until the context ends.

        Raises TakenOverError, StoreAwayError.
        """
        if not self._stored.is_kept:
            return
        self._stored.claim(journal.recovery.epoch)
        journal.on_commit(lambda rows: self._note_records(journal.records))
        self._note_records(journal.records)
        self._thread.start()

    def lag(self) -> CopyLag:
        """The segments that wait now."""
        with self._changed:
            sizes = [size for size, _ in self._waiting.values()]
            since = min((since for _, since in self._waiting.values()), default=None)
            return CopyLag(len(sizes), sum(sizes), since)

    def check(self) -> None:
        """Raise TakenOverError or CopiesWaitError where this machine must stop working."""
        if self._error is not None:
            raise self._error
        lag = self.lag()
        if lag.bytes > self._most_bytes:
            raise CopiesWaitError(
                f"Interrupted: {counted(lag.segments, 'segments')} ({lag.bytes / 2**20:.0f} MiB) are"
                f" committed here and"
                f" wait for the store; at most {self._most_bytes / 2**20:.0f} MiB may. {self._trouble or ''}"
                " Nothing is lost; the work goes on by itself when the store is back."
            )

    def flush(self) -> None:
        """Return when all committed rows are in the store, and this machine still works on the partition.

        Raises StoreAwayError where they cannot be copied now, TakenOverError.
        """
        if not self._stored.is_kept:
            return
        with self._changed:
            self._requested = requested = self._requested + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._attempted >= requested or self._error is not None)
            if self._error is not None:
                raise self._error
            if self._trouble is not None:
                raise self._trouble

    def retire(self) -> None:
        """The rows are published: take them out of the journal in the store."""
        self._end()
        if not self._thread.is_alive():
            self._stored.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The last commit of a run that ends is copied too, unless the store is away.
        if self._thread.is_alive() and self._error is None and self._trouble is None:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._waiting or self._trouble is not None or self._error is not None,
                    _END_SECONDS,
                )
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _note_records(self, records: Iterable[SegmentRecord]) -> None:
        with self._changed:
            for record in records:
                if record.name not in self._stored.copied_names and record.name not in self._waiting:
                    self._waiting[record.name] = (record.size, self._wall())
            self._changed.notify_all()
        self.on_lag(self.lag())

    def _run(self) -> None:
        pause = 0.0
        while self._wait(pause):
            with self._changed:
                requested = self._requested
            try:
                self._stored.copy()
                trouble, pause = None, 0.0
            except Exception as error:
                if isinstance(error, TakenOverError) or not isinstance(error, StoreError):
                    with self._changed:
                        self._error = error
                        self._changed.notify_all()
                    return
                # Whatever the error is, the rows are safe here, and the copy is tried again.
                trouble, pause = error, min(_LONGEST_PAUSE, pause * 2 or _FIRST_PAUSE)
                if self._trouble is None:
                    _log.warning("Committed rows of %s wait on this disk: %s", self._stored.key, error)
            with self._changed:
                if trouble is None and self._trouble is not None:
                    _log.info("Committed rows of %s are in the store again.", self._stored.key)
                self._trouble, self._attempted = trouble, requested
                for name in self._stored.copied_names & self._waiting.keys():
                    del self._waiting[name]
                self._changed.notify_all()
            self.on_lag(self.lag())

    def _wait(self, pause: float) -> bool:
        """Wait until a segment is to be copied and the pause is over. False where the context ends."""
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._stopping or self._requested > self._attempted, pause)
            else:
                self._changed.wait_for(
                    lambda: self._stopping or self._waiting or self._requested > self._attempted
                )
            return not self._stopping
