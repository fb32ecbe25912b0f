"""Manifests: the numbered lists of what is committed. Written once each, never replaced.

What lives here: their form, their names, writing, reading and pruning. What does not: choosing between
them after a crash (recovery.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resources.journal.journal_errors import FencedError
from resources.journal.segments import SegmentRecord
from resources.storage import files
from resources.storage.sealed_json import BrokenSealError, check_seal, refuse_newer_format, seal, unseal

FORMAT = 2
KEPT = 3
"""The current manifest and the two before it."""
_NAME = re.compile(r"manifest-(\d{12,})\.json")


@dataclass(frozen=True)
class Manifest:
    """One state of a journal. Sequence orders states, whatever the clock says; epoch numbers writers."""

    sequence: int
    epoch: int
    identity: Mapping[str, Any]
    segments: tuple[SegmentRecord, ...]
    previous_sequence: int | None
    previous_sha256: str | None
    events: tuple[Mapping[str, Any], ...] = ()
    """What recoveries adopted, quarantined and gave up, oldest first."""
    given_up: tuple[str, ...] = ()
    """Names of segments whose loss a person accepted: an older manifest that lists them is not held to it."""
    plan: Mapping[str, Any] | None = None
    """How the caller divides its work, once there are rows by it: a resume divides it alike."""
    retired: bool = False
    """True once the rows are published and read back: the segments may go."""
    file_sha256: str = ""
    """Digest of the whole file; empty for one that is not on disk yet."""

    @property
    def rows(self) -> int:
        """Rows that count: one for each id."""
        return sum(record.rows - record.superseding for record in self.segments)

    @property
    def rows_written(self) -> int:
        """Rows in all listed segments, superseded ones too."""
        return sum(record.rows for record in self.segments)

    def encode(self) -> bytes:
        """The file's bytes: sealed JSON."""
        head = {
            "format": FORMAT,
            "sequence": self.sequence,
            "epoch": self.epoch,
            "retired": self.retired,
            "rows": self.rows,
            "identity": dict(self.identity),
            "previous": {"sequence": self.previous_sequence, "sha256": self.previous_sha256},
            "given_up": list(self.given_up),
            "plan": None if self.plan is None else dict(self.plan),
            "events": [dict(event) for event in self.events],
        }
        opened = json.dumps(head, separators=(",", ":"))[:-1]
        return seal(f'{opened},"segments":[{",".join(r.json for r in self.segments)}]}}'.encode())


def manifest_path(directory: Path, sequence: int) -> Path:
    """Where the manifest of a sequence number stands."""
    return directory / f"manifest-{sequence:012d}.json"


def sequence_of(name: str) -> int | None:
    """The sequence number in a manifest's name; None where the name is none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def sequences(directory: Path) -> list[int]:
    """The sequence numbers on disk, newest first, readable or not."""
    found = (sequence_of(path.name) for path in directory.iterdir())
    return sorted((number for number in found if number is not None), reverse=True)


def read_manifest(directory: Path, sequence: int) -> Manifest:
    """Read and verify one manifest. Raises BrokenSealError, OSError, or FormatVersionError (newer)."""
    path = manifest_path(directory, sequence)
    found = decode(path.read_bytes(), path)
    if found.sequence != sequence:
        raise BrokenSealError(f"the manifest inside says sequence {found.sequence}")
    return found


def decode(data: bytes, where: Path) -> Manifest:
    """The manifest that a file's bytes are. Raises BrokenSealError, FormatVersionError."""
    found = unseal(data)
    refuse_newer_format(found.get("format"), FORMAT, where)
    try:
        return Manifest(
            sequence=found["sequence"],
            epoch=found["epoch"],
            identity=found["identity"],
            segments=tuple(SegmentRecord(**record) for record in found["segments"]),
            previous_sequence=found["previous"]["sequence"],
            previous_sha256=found["previous"]["sha256"],
            events=tuple(found["events"]),
            given_up=tuple(found["given_up"]),
            plan=found["plan"] if found["format"] > 1 else None,
            retired=found["retired"],
            file_sha256=hashlib.sha256(data).hexdigest(),
        )
    except (KeyError, TypeError) as error:
        raise BrokenSealError(f"the manifest lacks a part: {error}") from error


def newest_manifest(directory: Path) -> Manifest | None:
    """The newest manifest that reads, without verifying its segments; None where there is none.

    For a quick look (status): reads only, takes no lock.
    """
    if not directory.is_dir():
        return None
    for sequence in sequences(directory):
        try:
            return read_manifest(directory, sequence)
        except (BrokenSealError, OSError):
            continue
    return None


def publish(directory: Path, manifest: Manifest) -> str:
    """Write a manifest durably under its own number. Returns the file's SHA-256.

    Raises FencedError where that number, or a later one, exists: somebody else is the writer now.
    The look before the link catches the usual case; the link decides between two at the same number;
    the look after it catches a number that was taken and pruned while this writer was paused.
    """
    data = manifest.encode()
    path = manifest_path(directory, manifest.sequence)
    temporary = files.write_temporary(path, data)
    try:
        refuse_if_overtaken(directory, manifest.sequence - 1)
        files.publish_new(temporary, path)
    except FileExistsError as error:
        raise FencedError(f"{path} was written by another writer: this one was taken over") from error
    finally:
        temporary.unlink(missing_ok=True)
    refuse_if_overtaken(directory, manifest.sequence)
    return hashlib.sha256(data).hexdigest()


def refuse_if_overtaken(directory: Path, sequence: int) -> None:
    """Raise FencedError where a manifest newer than ``sequence`` is on disk."""
    newest = sequences(directory)
    if newest and newest[0] > sequence:
        raise FencedError(
            f"{directory} is at sequence {newest[0]} where this writer knows {sequence}: another writer took "
            "it over while this one was paused. Stop this process; the other one goes on."
        )


def prune(directory: Path, current: int) -> None:
    """Remove manifests older than the kept ones, but only while every kept one still verifies."""
    found = [number for number in sequences(directory) if number <= current]
    kept, old = found[:KEPT], found[KEPT:]
    if not old or not _all_verify(directory, kept):
        return
    for number in old:
        manifest_path(directory, number).unlink(missing_ok=True)


def _all_verify(directory: Path, numbers: Iterable[int]) -> bool:
    try:
        for number in numbers:
            check_seal(manifest_path(directory, number).read_bytes())
    except (BrokenSealError, OSError):
        return False
    return True
