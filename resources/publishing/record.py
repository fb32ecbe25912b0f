"""The record of a partition: what its published file, its second copy and its previous versions must be.

What lives here: the record's fields and its form on disk (sealed JSON). What does not:
when it is written, and what is done where the files disagree with it (``resources.publishing.published``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resources.publishing.publishing_errors import RecordDamagedError
from resources.storage.sealed_json import FormatVersionError, refuse_newer_format, seal, unseal

FORMAT = 1


@dataclass(frozen=True)
class PublishedRecord:
    """One published version of a partition.

    ``sequence`` counts publications of this partition from 1 and gives their order, whatever the clock
    says. ``sha256`` is over the whole file, ``key_set_digest`` over its ids
    (``resources.journal.identity``). ``published_at`` is UTC, ISO 8601. ``metadata`` is what the asset
    wanted remembered, as JSON values.
    """

    key: str
    sequence: int
    sha256: str
    bytes: int
    rows: int
    key_set_digest: str
    fingerprint: str
    published_at: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingPublication:
    """A publication under way: the version that is to be published and the versions to be kept before it."""

    record: PublishedRecord
    previous: tuple[PublishedRecord, ...]


@dataclass(frozen=True)
class PartitionVersions:
    """All that a partition's record says: the published version, those before it, and one under way."""

    key: str
    published: PublishedRecord | None = None
    previous: tuple[PublishedRecord, ...] = ()
    pending: PendingPublication | None = None

    @property
    def sequence(self) -> int:
        """The sequence number of the published version, 0 where there is none."""
        return self.published.sequence if self.published else 0

    def to_bytes(self) -> bytes:
        """The manifest as it stands on disk: JSON with the SHA-256 of its content."""
        return seal(json.dumps({"format": FORMAT, **asdict(self)}, indent=2).encode())

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> PartitionVersions:
        """Read a manifest. Raises RecordDamagedError where it is not, to the byte, what was written.

        A record of a newer version is not damaged and must not be moved away: it raises FormatVersionError.
        """
        try:
            content = unseal(data)
            refuse_newer_format(content["format"], FORMAT, Path(f"the record of partition {key}"))
            if content["key"] != key:
                raise ValueError(f"it is for partition {content['key']}")
            pending = content["pending"]
            return cls(
                key=key,
                published=PublishedRecord(**content["published"]) if content["published"] else None,
                previous=_records(content["previous"]),
                pending=PendingPublication(
                    PublishedRecord(**pending["record"]), _records(pending["previous"])
                )
                if pending
                else None,
            )
        except FormatVersionError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise RecordDamagedError(f"the record of partition {key} cannot be read: {error}") from error


def _records(contents: list[dict[str, Any]]) -> tuple[PublishedRecord, ...]:
    return tuple(PublishedRecord(**one) for one in contents)
