"""What may be wrong with published files, their records and copies, committed rows and stored objects.

This is the one vocabulary: ``status``, ``audit``, ``repair``, the drift sensor, the asset check
``published_file`` and alerts say it in these words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from vlm_durable.commands import command


class FindingKind(StrEnum):
    """What is wrong, or worth knowing; the worst first."""

    MISSING = "missing"
    """The published file. The four that follow are about it too."""
    TRUNCATED = "truncated"
    UNREADABLE = "unreadable"
    ROWS_DIFFER = "rows_differ"
    DIGEST_DIFFERS = "digest_differs"
    RECORD = "record"
    """Neither copy of the partition's record can be read."""
    RECORD_BEHIND = "record_behind"
    """Its record is lost, or older than its newest version, of which a file is whole."""
    PUT_BACK = "put_back"
    """An older version stands, and the newest one that was here is in none of its files."""
    VANISHED = "vanished"
    """It was published once, and neither its record nor its file is there."""
    UNRECORDED = "unrecorded"
    """A file under a partition's name that was not published here."""
    JOURNAL = "journal"
    """Committed rows of unfinished work are missing."""
    COLUMNS = "columns"
    IDS = "ids"
    """The ids are not those of the catalogue, each once, each ok or failed."""
    MIXED = "mixed"
    """Rows of one file carry another fingerprint than its record."""
    SECOND_COPY = "second_copy"
    RECORD_COPY = "record_copy"
    """One of the two copies of the record is missing or damaged."""
    STORE = "store"
    """What is published is missing or damaged in the store."""
    STORE_JOURNAL = "store_journal"
    """What is committed is missing or damaged in the store."""
    FOREIGN_FILE = "foreign_file"
    """A parquet file among the published ones that is no partition of the catalogue and has no record."""
    UNLISTED = "unlisted"
    """A partition was published, and the catalogue does not list it: the catalogue is what is wrong."""
    WITHDRAWN = "withdrawn"
    """Withdrawn properties are back, or the list of them is lost."""
    DESCRIPTIONS_DIFFER = "descriptions_differ"
    """Embeddings that do not belong to the descriptions published now."""
    NOT_PUBLISHED = "not_published"
    PENDING = "pending"
    STALE = "stale"
    EARLIER_VERSION = "earlier_version"
    SETTINGS_DIFFER = "settings_differ"
    UNKNOWN_FILE = "unknown_file"
    REMOVED_SET = "removed_set"
    """Files of a question set that no settings name."""
    STORE_UNREAD = "store_unread"
    STORE_LEFTOVER = "store_leftover"

    @property
    def is_warning(self) -> bool:
        """Whether nothing has to be repaired."""
        return self in _WARNINGS

    @property
    def leaves_rows_sound(self) -> bool:
        """Whether what readers see was published here, whole."""
        return self in _ROWS_ARE_SOUND


OF_THE_FILE = frozenset(
    {
        FindingKind.MISSING,
        FindingKind.TRUNCATED,
        FindingKind.UNREADABLE,
        FindingKind.ROWS_DIFFER,
        FindingKind.DIGEST_DIFFERS,
    }
)
"""The published file is not, to the byte, what its record says."""

_WARNINGS = frozenset(
    {
        FindingKind.PUT_BACK,
        FindingKind.PENDING,
        FindingKind.STALE,
        FindingKind.EARLIER_VERSION,
        FindingKind.SETTINGS_DIFFER,
        FindingKind.UNKNOWN_FILE,
        FindingKind.REMOVED_SET,
        FindingKind.STORE_UNREAD,
        FindingKind.STORE_LEFTOVER,
    }
)
_ROWS_ARE_SOUND = _WARNINGS | {
    FindingKind.SECOND_COPY,
    FindingKind.RECORD_COPY,
    FindingKind.DESCRIPTIONS_DIFFER,
}
_ORDER = {kind: number for number, kind in enumerate(FindingKind)}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    sentence: what is wrong, and where. next_step: what to do, with the command; "" where nothing has to be
    done. key: the partition; None where it is about a folder or about several partitions.
    """

    kind: FindingKind
    asset: str
    key: str | None
    sentence: str
    next_step: str = ""
    path: str | None = None

    @property
    def text(self) -> str:
        """What is wrong and what to do."""
        return f"{self.sentence} {self.next_step}".rstrip()


def worst(findings: Iterable[Finding]) -> Finding | None:
    """The finding to name first; None where there is none."""
    return min(findings, key=lambda finding: _ORDER[finding.kind], default=None)


def restore_step() -> str:
    """What to do about a published file or a record that is not what was published."""
    return f"{command('repair')}, or materializing that partition, restores it from the copy, with no device."


def store_step() -> str:
    """What to do about an object that is missing or damaged in the store."""
    return f"A machine that has it puts it back: the sensor there does, or {command('repair')}."
