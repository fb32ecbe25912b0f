"""What can be refused or found wrong about a published partition: one named exception for each.

Each message says what, where and what to do. Findings that are listed rather than raised are in
``resources.publishing.verification``.
"""

from __future__ import annotations


class PublishedError(Exception):
    """Something about a partition's published file is wrong, or was refused. Nothing was lost by it."""


class InvalidPartitionKeyError(PublishedError):
    """A partition key cannot be a file name."""


class WrongSchemaError(PublishedError):
    """A batch does not have the columns that the partition's file has."""


class WrongIdSetError(PublishedError):
    """The ids of the staged file are not the expected ones: it must not be published."""


class DigestMismatchError(PublishedError):
    """The staged file is no longer what was read back when it was staged."""


class PublishedByAnotherError(PublishedError):
    """Another process published this partition after the file at hand was staged."""


class PartitionBusyError(PublishedError):
    """Another process is publishing or restoring this partition and has not finished in time."""


class WrongPartitionError(PublishedError):
    """A file was staged for another partition or asset than the one it is handed to."""


class NotPublishedError(PublishedError):
    """The partition has no published file."""


class PublishedFileDamagedError(PublishedError):
    """The published file is not what its record says."""


class RecordDamagedError(PublishedError):
    """Neither copy of a partition's record can be read."""


class CannotRestoreError(PublishedError):
    """Neither the published file nor its second copy is what the record says."""
