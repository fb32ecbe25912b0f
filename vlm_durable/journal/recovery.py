"""Recovery: from the files that a crash left to one verified state, or to a refusal that says why.

``survey_journal`` only reads and decides; ``settle`` then quarantines, adopts and writes the state down.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlm_durable.files import files
from vlm_durable.files.sealed_json import BrokenSealError
from vlm_durable.journal import commits
from vlm_durable.journal.commits import Manifest
from vlm_durable.journal.high_water_mark import (
    MarkReading,
    clear_temporaries,
    read_mark,
    write_mark,
)
from vlm_durable.journal.journal_errors import JournalLossError, SegmentUnreadableError
from vlm_durable.journal.segments import (
    SEGMENT_NAME,
    JournalIdentity,
    Segment,
    SegmentRecord,
    may_supersede,
    verify_listed,
    verify_unlisted,
)
from vlm_durable.wording import counted

_THREADS = 2


@dataclass(frozen=True)
class Survey:
    """What lies in a journal's directory, before anything is changed.

    Paths are absolute or relative, as the directory is.
    """

    head: Manifest | None
    segments: tuple[Segment, ...]
    """Every segment that counts, in the order of their names: listed and verified, then adopted ones."""
    adopted: tuple[str, ...]
    damaged: Mapping[Path, str]
    """Files to quarantine, each with the reason."""
    temporaries: tuple[Path, ...]
    mark_reading: MarkReading
    newest_sequence: int
    """The highest sequence number seen anywhere, readable or not."""
    losses: tuple[str, ...]
    """Why committed rows cannot be restored; empty where all can."""
    lost_segments: tuple[str, ...]
    given_up: tuple[str, ...]
    """Segments whose loss a person accepted before."""
    promised_rows: int

    @property
    def rows(self) -> int:
        """Rows that can be restored, one for each id."""
        return sum(segment.record.rows - segment.record.superseding for segment in self.segments)


@dataclass(frozen=True)
class Recovery:
    """The outcome of an open: what was restored, for the log and for people."""

    key: str
    generation: str
    rows: int
    segments: int
    expected_rows: int
    manifest_rows: int | None
    """Rows by the newest readable manifest; None at the first start."""
    high_water_mark: int | None
    """Rows by the high-water mark; None where there was no readable one."""
    sequence: int
    epoch: int
    adopted: tuple[str, ...]
    quarantined: tuple[tuple[str, str], ...]
    """The new path of each quarantined file, and why it was quarantined."""
    accepted_loss: str | None

    def sentence(self) -> str:
        """One line for people."""
        manifest = "no manifest yet" if self.manifest_rows is None else f"manifest: {self.manifest_rows}"
        mark = "none yet" if self.high_water_mark is None else str(self.high_water_mark)
        parts = [
            f"{self.key}: {self.rows} of {self.expected_rows} rows restored from"
            f" {counted(self.segments, 'segments')} "
            f"({manifest}, high-water mark: {mark}), {self.expected_rows - self.rows} to do",
            f"{counted(len(self.adopted), 'segments')} adopted",
            f"{counted(len(self.quarantined), 'files')} quarantined"
            + (
                ": " + "; ".join(f"{path} ({why})" for path, why in self.quarantined)
                if self.quarantined
                else ""
            ),
        ]
        if self.accepted_loss is not None:
            parts.append(f"loss accepted: {self.accepted_loss}")
        return ". ".join(parts) + "."


def survey_journal(directory: Path, identity: JournalIdentity, high_water_mark: Path) -> Survey:
    """Read everything and decide what counts. Changes nothing.

    Raises JournalError (other work), FormatVersionError (newer program).
    """
    names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False))
    numbers = sorted(
        (number for number in map(commits.sequence_of, names) if number is not None), reverse=True
    )
    head, damaged = _read_manifests(directory, numbers)
    if head is not None:
        identity.check(head.identity, str(commits.manifest_path(directory, head.sequence)))
    reading = read_mark(high_water_mark, key=identity.key, generation=identity.generation)

    given_up = sorted({*(head.given_up if head else ()), *(reading.mark.given_up if reading.mark else ())})
    records = {record.name: record for record in head.segments} if head else {}
    present = {name for name in names if SEGMENT_NAME.fullmatch(name)}
    kept, broken = _choose(_verify(directory, present, records, identity), records)
    damaged |= {directory / name: why for name, why in broken.items()}

    gone = {name: "is not there" for name in records if name not in present}
    unverified = {name: f"does not verify: {why}" for name, why in broken.items() if name in records}
    lost = {name: why for name, why in (unverified | gone).items() if name not in given_up}
    losses = [f"segment {name} ({counted(records[name].rows, 'rows')}) {why}" for name, why in lost.items()]
    unreadable = [number for number in numbers if commits.manifest_path(directory, number) in damaged]
    losses += _against_mark(head, reading, kept, unreadable)
    promised = max(reading.mark.rows if reading.mark else 0, head.rows if head else 0)
    return Survey(
        head=head,
        segments=tuple(kept),
        adopted=tuple(segment.record.name for segment in kept if segment.record.name not in records),
        damaged=damaged,
        temporaries=tuple(directory / name for name in names if name.endswith(files.TEMPORARY_SUFFIX)),
        mark_reading=reading,
        newest_sequence=max([0, *numbers, *([reading.mark.sequence] if reading.mark else [])]),
        losses=tuple(losses),
        lost_segments=tuple(lost),
        given_up=tuple(given_up),
        promised_rows=promised,
    )


def _read_manifests(directory: Path, numbers: Iterable[int]) -> tuple[Manifest | None, dict[Path, str]]:
    """The newest readable manifest, and the unreadable ones with the reason. Newest first."""
    head: Manifest | None = None
    newer: Manifest | None = None
    damaged: dict[Path, str] = {}
    for number in numbers:
        path = commits.manifest_path(directory, number)
        try:
            manifest = commits.read_manifest(directory, number)
        except (BrokenSealError, OSError) as error:
            damaged[path] = f"the manifest does not verify: {error}"
            continue
        if (
            newer is not None
            and newer.previous_sequence == number
            and newer.previous_sha256 != manifest.file_sha256
        ):
            damaged[path] = f"the manifest is not the one that sequence {newer.sequence} followed"
            continue
        head = head or manifest
        newer = manifest
    return head, damaged


def _verify(
    directory: Path, present: set[str], records: Mapping[str, SegmentRecord], identity: JournalIdentity
) -> dict[str, Segment | SegmentUnreadableError]:
    """Verify every segment on disk, several at once: hashing and decoding release the GIL."""

    def verify(name: str) -> Segment | SegmentUnreadableError:
        path = directory / name
        try:
            record = records.get(name)
            return verify_listed(path, record, identity) if record else verify_unlisted(path, identity)
        except SegmentUnreadableError as error:
            return error

    ordered = sorted(present)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify-segments") as pool:
        return dict(zip(ordered, pool.map(verify, ordered), strict=True))


def _choose(
    checked: Mapping[str, Segment | SegmentUnreadableError], records: Mapping[str, SegmentRecord]
) -> tuple[list[Segment], dict[str, str]]:
    """The segments that count, listed ones before those to adopt, and why the others do not count.

    A row may take the place of a failed row of an earlier try alone.
    """
    kept: list[Segment] = []
    broken: dict[str, str] = {}
    committed_tries: dict[str, int] = {}
    for name in sorted(checked, key=lambda name: (name not in records, name)):
        segment = checked[name]
        if isinstance(segment, SegmentUnreadableError):
            broken[name] = str(segment)
            continue
        tries = dict(zip(segment.ids, segment.failed_tries, strict=True))
        repeated_ids = committed_tries.keys() & tries.keys()
        if not all(may_supersede(tries[id_], committed_tries[id_]) for id_ in repeated_ids):
            broken[name] = "holds ids that are committed already"
        else:
            committed_tries |= tries
            kept.append(segment.superseding(len(repeated_ids)))
    return kept, broken


def _against_mark(
    head: Manifest | None, reading: MarkReading, kept: list[Segment], unreadable: list[int]
) -> list[str]:
    """Say why the restorable rows are fewer than the high-water mark promises; empty where they are not."""
    mark = reading.mark
    rows = sum(segment.record.rows for segment in kept)  # Superseded rows too: none is deleted.
    if mark is None:
        newest_is_readable = head is not None and all(number < head.sequence for number in unreadable)
        if newest_is_readable or (head is None and not unreadable and not kept and not reading.damaged):
            return []
        return [
            "neither the newest manifest nor the high-water mark can be read: how much there was is unknown"
        ]
    if mark.retired:
        return [
            f"{counted(mark.rows, 'rows were', 'row was')} published and this journal retired; it is"
            f" asked to begin again"
        ]
    if mark.rows_written > rows:
        return [
            f"{counted(mark.rows_written - rows, 'rows')} of {mark.rows_written} that the high-water"
            f" mark promises"
        ]
    behind = head is None or head.sequence < mark.sequence
    names = {segment.record.name for segment in kept}
    if behind and mark.last_segment is not None and mark.last_segment not in names:
        return [f"segment {mark.last_segment}, the last one that the high-water mark knows"]
    return []


def refuse_loss(survey: Survey, directory: Path, quarantine: Path, identity: JournalIdentity) -> None:
    """Raise JournalLossError where committed rows cannot be restored."""
    if not survey.losses:
        return
    raise JournalLossError(
        key=identity.key,
        generation=identity.generation,
        directory=directory,
        promised_rows=survey.promised_rows,
        restorable_rows=survey.rows,
        reasons=survey.losses,
        copies=[*survey.damaged, *([quarantine] if quarantine.is_dir() else [])],
    )


def settle(
    survey: Survey,
    *,
    directory: Path,
    quarantine: Path,
    high_water_mark: Path,
    identity: JournalIdentity,
    accept_loss: str | None,
) -> tuple[Manifest, Recovery]:
    """Make what the survey found the journal's state, under a new epoch: quarantine, adopt, write it down.

    A kill anywhere in here leaves files that the next survey reads to the same state. The new manifest
    takes the sequence number that a paused older writer would need, so that writer can commit no more.
    """
    for temporary in survey.temporaries:
        temporary.unlink(missing_ok=True)
    clear_temporaries(high_water_mark)
    moved = [(str(files.set_aside(path, quarantine)), why) for path, why in survey.damaged.items()]
    for slot in survey.mark_reading.damaged:
        why = "the high-water mark does not verify, or is another journal's"
        moved.append((str(files.set_aside(slot, slot.parent)), why))
    lost = accept_loss if survey.losses else None
    mark = survey.mark_reading.mark
    epoch = 1 + max(survey.head.epoch if survey.head else 0, mark.epoch if mark else 0)
    event: dict[str, Any] = {"epoch": epoch, "at": _now()}
    event |= {"adopted": list(survey.adopted)} if survey.adopted else {}
    event |= {"quarantined": [list(pair) for pair in moved]} if moved else {}
    event |= {"accepted_loss": lost, "losses": list(survey.losses)} if lost is not None else {}
    manifest = Manifest(
        sequence=survey.newest_sequence + 1,
        epoch=epoch,
        identity=identity.described,
        segments=tuple(segment.record for segment in survey.segments),
        previous_sequence=survey.head.sequence if survey.head else None,
        previous_sha256=survey.head.file_sha256 if survey.head else None,
        plan=survey.head.plan if survey.head else None,
        given_up=(*survey.given_up, *(survey.lost_segments if lost is not None else ())),
        events=(*(survey.head.events if survey.head else ()), *([event] if len(event) > 2 else [])),
    )
    sha256 = commits.publish_manifest(directory, manifest)
    write_mark(high_water_mark, manifest.mark)
    commits.prune(directory, manifest.sequence)
    recovery = Recovery(
        key=identity.key,
        generation=identity.generation,
        rows=survey.rows,
        segments=len(survey.segments),
        expected_rows=len(identity.expected_ids),
        manifest_rows=survey.head.rows if survey.head else None,
        high_water_mark=mark.rows if mark else None,
        sequence=manifest.sequence,
        epoch=epoch,
        adopted=survey.adopted,
        quarantined=tuple(moved),
        accepted_loss=lost,
    )
    return replace(manifest, file_sha256=sha256), recovery


def _now() -> str:
    """The time, for people; nothing is ordered by it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
