"""What an audit can find: kinds for machines, sentences for people.

What lives here: the vocabulary that looking (``files.py``, ``rows.py``), the verdict
(``audit.py``) and putting right (``repair.py``) share. What does not: any of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is wrong or worth knowing."""

    FILE = "file"
    """The published file is missing, truncated, unreadable or not what was published."""
    SECOND_COPY = "second_copy"
    RECORD = "record"
    """Neither copy of the partition's record can be read."""
    RECORD_COPY = "record_copy"
    """One of the two copies of the record is missing or damaged."""
    VANISHED = "vanished"
    """It was published once, and neither its record nor its file is there."""
    UNRECORDED = "unrecorded"
    """A file under a partition's name that was not published here."""
    FOREIGN_FILE = "foreign_file"
    """A parquet file among the published ones that is no partition of the catalogue."""
    COLUMNS = "columns"
    IDS = "ids"
    """The ids are not those of the catalogue, each once, each ok or failed."""
    MIXED = "mixed"
    """Rows of one file carry another fingerprint than its record."""
    DESCRIPTIONS_DIFFER = "descriptions_differ"
    """Embeddings that do not belong to the descriptions published now."""
    EARLIER_VERSION = "earlier_version"
    PENDING = "pending"
    STALE = "stale"
    SETTINGS_DIFFER = "settings_differ"
    UNKNOWN_FILE = "unknown_file"

    @property
    def is_warning(self) -> bool:
        """Whether the published rows are sound all the same."""
        return self in _WARNINGS


_WARNINGS = frozenset(
    {Kind.EARLIER_VERSION, Kind.PENDING, Kind.STALE, Kind.SETTINGS_DIFFER, Kind.UNKNOWN_FILE}
)


@dataclass(frozen=True)
class Problem:
    """One thing found. key: the partition; None where it is about a folder or about several partitions."""

    kind: Kind
    asset: str
    key: str | None
    sentence: str
    path: str | None = None
