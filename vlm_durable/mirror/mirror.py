"""The mirror of a home: the S3 folder that also has all that is finished and committed, or none.

Without a store nothing is there, and nothing is copied. Callers need not ask which of the two they have;
``keeps_copies`` says it to those that would work for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Final

from vlm_durable.mirror.bucket import ListedObject, NoObjectError, S3Folder, StoredObject


@dataclass(frozen=True)
class NoMirror:
    """Stands for the S3Folder of a home without a store: nothing is in it, and it keeps nothing."""

    keeps_copies: ClassVar[bool] = False

    def __str__(self) -> str:
        return "no store"

    def address(self, name: str) -> str:
        """The name itself."""
        return name

    def uri_of(self, path: Path, home: Path) -> str:
        """The address at which others read a file of a home: in the home alone."""
        return path.as_uri()

    def below(self, name: str) -> NoMirror:
        """There is no folder in it either."""
        return self

    def prove(self) -> None:
        """Nothing depends on it."""

    def head(self, name: str) -> StoredObject | None:
        """None: there is no object."""
        return None

    def get(self, name: str, *, most: int) -> bytes:
        """Raise NoObjectError."""
        raise NoObjectError(f"{name} is not there: no store is set")

    def get_whole(self, name: str, sha256: str, *, most: int) -> bytes:
        """Raise NoObjectError."""
        return self.get(name, most=most)

    def put(self, name: str, content: bytes, *, over: StoredObject | None) -> StoredObject:
        """Keep nothing."""
        return StoredObject(len(content), "", None, datetime.now(UTC))

    def delete(self, name: str) -> None:
        """Do nothing: it is not there."""

    def folders(self, beginning: str = "") -> Iterator[str]:
        """No folder."""
        return iter(())

    def names(self, below: str = "") -> Iterator[tuple[str, int]]:
        """No object."""
        return iter(())

    def listed(self, below: str = "") -> Iterator[ListedObject]:
        """No object."""
        return iter(())


Mirror = S3Folder | NoMirror

NO_MIRROR: Final = NoMirror()
