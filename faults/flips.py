"""One flipped bit, anywhere: found every time, and never read as another value. Several files of a journal.

Fault table rows 10 to 13.
One home stands for all cases of a run: a journal of three segments, and a partition published twice. A case
flips one bit of one file, looks, and puts the byte right again.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from faults import partition_life
from faults.ledger import PromiseBrokenError
from faults.partition_life import BATCH, KEY, VERSIONS, open_journal, rows
from vlm_durable.files.sealed_json import seal, unseal
from vlm_durable.journal.high_water_mark import slots
from vlm_durable.journal.recovery import Survey, survey_journal
from vlm_durable.versions.partition_files import PartitionFiles
from vlm_durable.versions.published import PublishedPartitions

SEGMENTS = 3
_WORK_UNDER_WAY = VERSIONS + 1


@dataclass(frozen=True)
class _Home:
    """A home with every kind of file in it, none of them damaged."""

    root: Path

    @property
    def journal(self) -> Path:
        return partition_life.journal_directory(self.root, _WORK_UNDER_WAY)

    @property
    def partition(self) -> PartitionFiles:
        return PartitionFiles(partition_life.asset(self.root), KEY)

    @property
    def published(self) -> PublishedPartitions:
        return PublishedPartitions(partition_life.asset(self.root), lock_seconds=0)

    def survey(self) -> Survey:
        identity = partition_life.journal_identity(_WORK_UNDER_WAY)
        mark = partition_life.high_water_mark(self.root, _WORK_UNDER_WAY)
        return survey_journal(self.journal, identity, mark)


def anywhere(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Flip one bit of a file of each kind in turn, and require that it is found and does no harm."""
    home = _home(place)
    kind = list(_KINDS)[number % len(_KINDS)]
    paths, footer_only, unharmed = _KINDS[kind]
    path = chance.choice(sorted(paths(home)))
    whole = path.read_bytes()
    start = len(whole) - int.from_bytes(whole[-8:-4], "little") - 8 if footer_only else 0
    at, bit = chance.randrange(start, len(whole)), chance.randrange(8)
    damaged = bytearray(whole)
    damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        if not unharmed(home, path):
            raise PromiseBrokenError(f"bit {bit} of byte {at} of {path} was flipped and nothing noticed it")
    finally:
        path.write_bytes(whole)
    return Counter({"flips": 1, f"flips in {kind}": 1})


def several(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Remove, flip or replace several files of one journal: its rows are all restored, or the loss is named.

    What is promised is what the whole manifests and marks say that are left.
    """
    home = _home(place)
    marks = slots(partition_life.high_water_mark(home.root, _WORK_UNDER_WAY))
    before = {path: path.read_bytes() for path in (*home.journal.glob("*-*"), *marks)}
    older = sorted(home.journal.glob("manifest-*"))[:-1]
    struck = {
        path: chance.choice(("gone", "flipped", "another") if path in older else ("gone", "flipped"))
        for path in before
        if chance.random() < 0.4
    }
    try:
        for path, fate in struck.items():
            if fate == "gone":
                path.unlink()
            elif fate == "another":
                path.write_bytes(seal(json.dumps(unseal(before[path]) | {"epoch": 0}).encode()))
            else:
                path.write_bytes(_flipped(before[path], chance))
        _judge_losses(home, before, struck)
    finally:
        for path, data in before.items():
            path.write_bytes(data)
    return Counter({"strikes": len(struck), "cases": 1})


def _flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _judge_losses(home: _Home, before: Mapping[Path, bytes], struck: Mapping[Path, str]) -> None:
    """Compare a survey with what is left. Raises PromiseBrokenError."""
    survey, kept_paths = home.survey(), [path for path in before if path not in struck]
    segments = sum(path.name.startswith("segment") for path in kept_paths)
    manifests = [unseal(before[path]) for path in kept_paths if path.name.startswith("manifest")]
    marks = [survey.mark_reading.mark.rows_written] if survey.mark_reading.mark is not None else []
    promised = max(
        [*marks, *(sum(segment["rows"] for segment in manifest["segments"]) for manifest in manifests)],
        default=0,
    )
    description = ", ".join(f"{path.name} {fate}" for path, fate in struck.items())
    if not survey.losses and survey.rows != segments * BATCH:
        raise PromiseBrokenError(
            f"{description}: {survey.rows} rows of {segments} whole segments, and no loss named"
        )
    if not survey.losses and survey.rows < promised:
        raise PromiseBrokenError(
            f"{description}: {survey.rows} rows of {promised} promised, and no loss named"
        )
    flipped = any(path.name.startswith("manifest") for path, fate in struck.items() if fate == "flipped")
    if survey.losses and segments == SEGMENTS and (marks or (manifests and not flipped)):
        raise PromiseBrokenError(
            f"{description}: every segment is whole, and a loss is named: {survey.losses}"
        )


def _segment(home: _Home, path: Path) -> bool:
    """Damaged, its rows are not used, and the start is refused."""
    survey = home.survey()
    return path in survey.damaged and bool(survey.losses) and survey.rows == (SEGMENTS - 1) * BATCH


def _manifest(home: _Home, path: Path) -> bool:
    """Damaged or not the one that was followed; every row is restored all the same."""
    survey = home.survey()
    return path in survey.damaged and not survey.losses and survey.rows == SEGMENTS * BATCH


def _mark(home: _Home, path: Path) -> bool:
    """Damaged; the other slot serves."""
    survey = home.survey()
    return survey.mark_reading.damaged == (path,) and not survey.losses and survey.rows == SEGMENTS * BATCH


def _published(home: _Home, path: Path) -> bool:
    """One finding, by name; the bytes of the other copy stay as they were."""
    return len(home.published.verify(KEY).findings) == 1


def _record(home: _Home, path: Path) -> bool:
    """The other copy of the record speaks, and the damaged one is written anew from it."""
    before = home.published.record(KEY)
    verification = home.published.verify(KEY)
    shutil.rmtree(home.partition.quarantine, ignore_errors=True)
    return (
        before is not None
        and before.fingerprint == str(VERSIONS)
        and verification.ok
        and bool(verification.repairs)
    )


_KINDS: dict[str, tuple[Callable[[_Home], list[Path]], bool, Callable[[_Home, Path], bool]]] = {
    "segments": (lambda home: list(home.journal.glob("segment-*")), False, _segment),
    "segment footers": (lambda home: list(home.journal.glob("segment-*")), True, _segment),
    "manifests": (lambda home: list(home.journal.glob("manifest-*")), False, _manifest),
    "marks": (
        lambda home: list(slots(partition_life.high_water_mark(home.root, _WORK_UNDER_WAY))),
        False,
        _mark,
    ),
    "published files": (lambda home: [home.partition.published], False, _published),
    "published footers": (lambda home: [home.partition.published], True, _published),
    "backups": (lambda home: [home.partition.slot(0), home.partition.slot(1)], False, _published),
    "records": (lambda home: home.partition.record_paths, False, _record),
}

_homes: dict[Path, _Home] = {}


def _home(place: Path) -> _Home:
    if place not in _homes:
        home = _Home(place / "flips")
        partition_life.live(home.root, lambda **report: None)
        with open_journal(home.root, _WORK_UNDER_WAY) as journal:
            for number in range(SEGMENTS):
                first = number * BATCH
                journal.submit(rows(list(range(first, first + BATCH)), _WORK_UNDER_WAY))
                journal.flush()
        _homes[place] = home
    return _homes[place]
