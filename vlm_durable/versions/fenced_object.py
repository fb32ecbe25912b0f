"""One versioned object in an S3 store: its record, and the files that the record stands for.

The record goes first, with the publication as pending, and on the condition that the record is still the one
that was read: that is the fence. Then the files, then the record again. A machine that was overtaken meets a
condition that no longer holds, and changes nothing more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vlm_durable.mirror.bucket import StoredObject, TakenError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.versions.partition_files import FileDamagedError
from vlm_durable.versions.versioned_object import PublishedError

_RECORD_BYTES = 64 << 20
FILE_BYTES = 5 << 30
"""The largest object that a store accepts in one put."""


class OvertakenError(PublishedError):
    """Another machine published this object after this machine read it. That publication stands."""


class HomeFile(NamedTuple):
    """A file of this home for the store, with its name there and its digest."""

    name: str
    path: Path
    sha256: str


class FencedObject:
    """One object for one change. Every method raises StoreError, above all StoreAwayError."""

    def __init__(self, store: Mirror, record_name: str) -> None:
        """record_name: the record's name in the store, as in the home."""
        self._store, self._record_name = store, record_name
        self.record: StoredObject | None = None
        """The record that was read or put last; None where there is none."""

    @property
    def address(self) -> str:
        """The place of the record, for people."""
        return self._store.address(self._record_name)

    def read(self, *, whole: bool = False) -> bytes | None:
        """The record; None where there is none. Raises OvertakenError where it is being replaced.

        whole: see ``S3Folder.get_whole``.
        """
        self.record = self._store.head(self._record_name)
        if self.record is None:
            return None
        if whole:
            return self._store.get_whole(self._record_name, self.record.sha256 or "", most=_RECORD_BYTES)
        content = self._store.get(self._record_name, most=_RECORD_BYTES)
        if hashlib.sha256(content).hexdigest() != self.record.sha256:
            raise OvertakenError(f"{self.address} was replaced while it was read. Start again.")
        return content

    def publish(self, pending: bytes, files: Iterable[HomeFile], settled: bytes) -> None:
        """Put the record as pending, the files, and the settled record. Raises OvertakenError."""
        self.put_record(pending)
        self.put_files(files)
        self.put_record(settled)

    def put_record(self, content: bytes) -> None:
        """Replace the record that was read or put last. Raises OvertakenError."""
        self.record = self.put(self._record_name, content, over=self.record)

    def put_files(self, files: Iterable[HomeFile]) -> None:
        """Put those that the store lacks. Raises OvertakenError, FileDamagedError."""
        for file in files:
            while not is_file(stored := self._store.head(file.name), file.sha256):
                content = verified_bytes(file.path, file.sha256)
                # A machine that had an earlier record may still be at a put, but it cannot begin another one.
                self.refuse_overtaken()
                try:
                    self._store.put(file.name, content, over=stored)
                except TakenError:
                    continue

    def put(self, name: str, content: bytes, *, over: StoredObject | None) -> StoredObject:
        """Put one object of it in place of ``over``. Raises OvertakenError."""
        try:
            return self._store.put(name, content, over=over)
        except TakenError as error:
            raise OvertakenError(
                f"{self._store.address(name)} was changed by another machine, so nothing was published there."
                " Materialize it again: that takes over what the other one published."
            ) from error

    @property
    def is_overtaken(self) -> bool:
        """Whether the record is no longer the one that was read or put last."""
        return self._store.head(self._record_name) != self.record

    def refuse_overtaken(self) -> None:
        """Raise OvertakenError where another machine has begun to publish."""
        if self.is_overtaken:
            raise OvertakenError(
                f"{self.address}: another machine publishes it, and has begun later. Nothing there was"
                " changed. Materialize it again."
            )

    def fetch(self, names: Iterable[str], sha256: str) -> bytes | None:
        """The bytes with this digest from the first object that has them; None where none has."""
        for name in names:
            if is_file(self._store.head(name), sha256):
                content = self._store.get(name, most=FILE_BYTES)
                if hashlib.sha256(content).hexdigest() == sha256:
                    return content
        return None


def is_file(stored: StoredObject | None, sha256: str) -> bool:
    """Whether an object is, by its checksum, the file with this digest."""
    return stored is not None and stored.sha256 == sha256


def verified_bytes(path: Path, sha256: str) -> bytes:
    """The bytes of a file of this home. Raises FileDamagedError where they have another digest."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise FileDamagedError(f"{path} is not what its record says: it was not copied.")
    return content
