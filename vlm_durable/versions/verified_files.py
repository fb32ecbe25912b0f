"""Published files that were read whole and are what their record says: one note for all who ask."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from vlm_durable.files.seen_files import SeenFiles, signature_of
from vlm_durable.versions.findings import Finding
from vlm_durable.versions.partition_files import PartitionFiles, PublishedRecord, judge
from vlm_durable.versions.partition_findings import size_of

_READ_SECONDS = 5.0
"""How long one look of a command reads files that were not verified before; the next look goes on."""

TRUSTED_SECONDS = 7 * 86_400.0
"""A bit that rots changes no time of its file: each file is read whole at least so often."""

_DAMAGED = ""


class VerifiedFiles:
    """Published files that were read and are the newest version, by signature.

    The version mark counts as part of a file. A look reads only files that changed since, or that were read
    too long ago, for ``seconds`` at most; ``unread`` counts the rest.
    """

    def __init__(self, state_directory: Path, *, seconds: float = _READ_SECONDS) -> None:
        note = state_directory / "verified_files.json"
        self._seen = SeenFiles(note, trusted_seconds=TRUSTED_SECONDS)
        self._seconds_left = seconds
        self._marks: dict[str, dict[str, str]] = {}
        self.unread = 0

    def is_unchanged(self, files: PartitionFiles, record: PublishedRecord) -> bool:
        """Whether a file was verified as this version, and neither it nor its mark changed since."""
        signature = self._signature(files)
        return signature is not None and self._seen.outcome(_name(files), signature) == record.sha256

    def doubtful(self, asset: str) -> frozenset[str]:
        """The partitions whose file is to be read again though it did not change, or was found damaged."""
        names = (name.rpartition("/") for name in self._seen.doubtful(_DAMAGED))
        return frozenset(key for folder, _, key in names if folder == asset)

    def judge(self, files: PartitionFiles, record: PublishedRecord) -> Finding | None:
        """What is wrong with a published file, or None; reads its bytes while there is time, and notes it."""
        path = files.published
        if self._seconds_left <= 0 and size_of(path) == record.bytes:
            self.unread += 1
            return None
        began, signature = time.monotonic(), self._signature(files)
        finding = judge(path, record, deep=True, asset=files.asset)
        self._seconds_left -= time.monotonic() - began
        if signature is not None:
            outcome = record.sha256 if finding is None else _DAMAGED
            with contextlib.suppress(FileNotFoundError):
                self._seen.keep(_name(files), signature, outcome, path.stat())
        return finding

    def save(self) -> None:
        """Keep what was verified for the next look, of whichever process."""
        self._seen.save()

    def _signature(self, files: PartitionFiles) -> str | None:
        """Changes whenever a published file or its mark changes; None where there is no file."""
        try:
            file = files.published.stat()
        except OSError:
            return None
        if files.asset not in self._marks:
            # All at once: one listing for each partition made a status 20% slower.
            self._marks[files.asset] = _mark_signatures(files.paths.asset.version_marks)
        return f"{signature_of(file)} {self._marks[files.asset].get(files.key, '-')}"


def _name(files: PartitionFiles) -> str:
    return f"{files.asset}/{files.key}"


def _mark_signatures(version_marks: Path) -> dict[str, str]:
    """The signature of each version mark in a folder, by partition."""
    signatures = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(version_marks) as entries:
        for entry in entries:
            key, _, rest = entry.name.partition(".")
            if rest == "json":
                with contextlib.suppress(FileNotFoundError):
                    signatures[key] = signature_of(entry.stat())
    return signatures
