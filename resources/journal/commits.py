"""The commit of one group of rows: segment, manifest, high-water mark, each durable before the next.

What lives here: the order of the steps. What does not: when a group is due (commit_thread.py) and what a
crash between two steps leaves (recovery.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from resources.journal import manifests
from resources.journal.errors import SegmentUnreadableError
from resources.journal.high_water_mark import write_mark
from resources.journal.identity import JournalIdentity
from resources.journal.manifests import Manifest
from resources.journal.recovery import mark_of
from resources.journal.segments import Segment, encode, segment_name, segment_number, verify_unlisted
from resources.journal.writer_lock import WriterLock
from resources.storage import files


class Committer:
    """Writes groups of rows into a journal's directory, one after the other. Used from one thread only."""

    def __init__(
        self,
        directory: Path,
        identity: JournalIdentity,
        manifest: Manifest,
        lock: WriterLock,
        high_water_mark: Path,
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._manifest = manifest
        self._lock = lock
        self._high_water_mark = high_water_mark
        self.plan = manifest.plan
        """How the caller divides its work; what is set here goes into the next manifest."""
        listed = [record.number for record in manifest.segments]
        standing = [segment_number(path.name) for path in directory.iterdir()]
        self._next_number = 1 + max([0, *listed, *standing])

    def commit(self, tables: Iterable[Any], *, superseding: int = 0) -> Segment:
        """Commit the rows of several pyarrow tables as one segment; durable when it returns.

        superseding: how many of the rows take the place of committed failed ones.

        Raises FencedError (taken over), SegmentUnreadableError (read back wrong) or OSError; then nothing
        of the group counts as committed, though a later recovery may find and adopt it whole.
        """
        table = pa.concat_tables(tables).sort_by(self._identity.order_column)
        segment = self._publish_segment(table).superseding(superseding)
        self._advance(segments=(*self._manifest.segments, segment.record))
        return segment

    def retire(self) -> None:
        """Write down that the rows are published, then remove segments and manifests, that one last."""
        self._advance(retired=True)
        remove_retired(self._directory, self._manifest)

    def _publish_segment(self, table: Any) -> Segment:
        data = encode(table, self._identity)
        sha256 = hashlib.sha256(data).hexdigest()
        name = segment_name(epoch=self._manifest.epoch, number=self._next_number, sha256=sha256)
        path = self._directory / name
        temporary = files.write_temporary(path, data)
        try:
            segment = verify_unlisted(temporary, self._identity, name=name)
            if segment.record.size != len(data) or segment.record.rows != table.num_rows:
                raise SegmentUnreadableError(f"{temporary} reads back other than it was written")
            self._lock.check()
            manifests.refuse_if_overtaken(self._directory, self._manifest.sequence)
            files.publish_new(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._next_number += 1
        return segment

    def _advance(self, **changes: Any) -> None:
        """Publish the next manifest and the mark; only then does the change count."""
        following = dataclasses.replace(
            self._manifest,
            sequence=self._manifest.sequence + 1,
            previous_sequence=self._manifest.sequence,
            previous_sha256=self._manifest.file_sha256,
            plan=self.plan,
            file_sha256="",
            **changes,
        )
        self._lock.check()
        sha256 = manifests.publish(self._directory, following)
        self._manifest = dataclasses.replace(following, file_sha256=sha256)
        write_mark(self._high_water_mark, mark_of(self._manifest))
        manifests.prune(self._directory, self._manifest.sequence)


def remove_retired(directory: Path, retired: Manifest) -> None:
    """Remove what a retired manifest lists, then the manifests, the retired one last; safe to repeat."""
    for record in retired.segments:
        (directory / record.name).unlink(missing_ok=True)
    for sequence in sorted(manifests.sequences(directory)):
        if sequence != retired.sequence:
            manifests.manifest_path(directory, sequence).unlink(missing_ok=True)
    files.sync_directory(directory)
    manifests.manifest_path(directory, retired.sequence).unlink(missing_ok=True)


def remove_temporaries(directory: Path) -> None:
    """Remove what killed writers left half written or half named. Only for the journal's one writer."""
    for left in directory.glob(f".*{files.TEMPORARY_SUFFIX}"):
        left.unlink(missing_ok=True)
