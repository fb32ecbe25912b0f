"""Published files that are no longer what was published: truncated, replaced, deleted, foreign, or stale.

What lives here: the tick that finds what changed on disk, asks what that means, and tells Dagster as a result
of the check ``published_file``. What does not: comparing a file with its record and the catalogue, which is
handed in, and putting anything right (the scheduled re-materialization, which verifies and restores; what
is wrong in the store alone is put back by the look at it, which is handed in too).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import dagster as dg
import sqlalchemy as sa

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import FOUND_AT
from sensors.partition_history import PartitionHistory
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_durable import markdown_text
from vlm_durable.files.layout import AssetFolders
from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import drift_snapshots
from vlm_durable.state.workers import Workers
from vlm_durable.versions.partition_files import PUBLISHED_FILE
from vlm_durable.wording import counted

NAME = "published_file_drift"
INTERVAL_SECONDS = 60
_LOOK_SECONDS = 15.0
"""Of a tick, for looking; what is left is looked at in the next ticks.

One partition is looked at in any case: where a tick starves, a lost snapshot is made anew all the same.
"""
_TOLD_AT_ONCE = 200
"""Verdicts between two writes of the snapshot."""

_SHOWN = 5
"""Sentences that the tick itself says; further ones are in its log."""

_FOREIGN = "foreign_file"
_FILE, _RECORD = ".parquet", ".json"

SOUND, STALE = "sound", "stale"


class Seen(NamedTuple):
    """One partition at its last look.

    expectation: what its record was compared with; kind: of the verdict; told: the verdict that Dagster was
    told, "" where none was. owed: the verdict that it is to be told, "" where none is; it may have been told
    already by a tick that then died. at: when the owed one was found, in unix seconds.
    """

    signature: str
    expectation: str
    kind: str
    told: str
    owed: str = ""
    at: float = 0.0


@dataclass
class Snapshot:
    """What was seen of one asset. is_lost: not every partition was looked at since nothing was known."""

    state: ControlState
    asset: str
    partitions: dict[str, Seen] = field(default_factory=dict)
    is_lost: bool = False

    @classmethod
    def read(cls, state: ControlState, asset: str) -> Snapshot:
        """The last one; a new one where there is none, or where it does not read: a power cut may tear it."""
        query = sa.select(drift_snapshots.c.snapshot).where(drift_snapshots.c.asset == asset)
        try:
            fields = state.read_beats(lambda connection: connection.execute(query).scalar()) or {}
            partitions = {key: Seen(*seen) for key, seen in fields["partitions"].items()}
            return cls(state, asset, partitions, is_lost=bool(fields["is_lost"]))
        except (ValueError, KeyError, TypeError, AttributeError, sa.exc.DBAPIError):
            return cls(state, asset, is_lost=True)

    def write(self) -> None:
        """Replace the last one; a power cut may lose it. Raises ControlStateError."""
        fields = {"is_lost": self.is_lost, "partitions": self.partitions}

        def write(connection: sa.Connection) -> None:
            connection.execute(drift_snapshots.delete().where(drift_snapshots.c.asset == self.asset))
            connection.execute(drift_snapshots.insert().values(asset=self.asset, snapshot=fields))

        self.state.beat(write)


@dataclass(frozen=True)
class Verdict:
    """What a look at one partition found, in words for people. severity: None where it is sound.

    kind: ``sound``, ``stale``, or what is wrong: ``truncated``, ``replaced``, ``deleted``, ``foreign``, ...
    """

    kind: str
    severity: Literal["ERROR", "WARN"] | None
    expected: str
    actual: str
    next_step: str = ""

    @property
    def passed(self) -> bool:
        """Whether the file is what it should be."""
        return self.severity is None

    @property
    def told(self) -> str:
        """What tells it from another verdict."""
        text = f"{self.kind}\n{self.severity}\n{self.expected}\n{self.actual}"
        return SOUND if self.passed else hashlib.sha256(text.encode()).hexdigest()[:16]


class DriftWatched(Protocol):
    """An asset whose files are watched."""

    @property
    def asset(self) -> AssetFolders:
        """Its folders."""

    @property
    def keys(self) -> Sequence[str]:
        """All its partitions."""

    @property
    def made_from(self) -> AssetFolders | None:
        """The asset that it is made from."""

    def look(self, key: str) -> Verdict | None:
        """The verdict on one partition, every byte read; None while a publication is under way."""

    def look_again(self, key: str) -> Verdict | None:
        """The verdict where only the expectation changed."""

    def look_at_store(self) -> tuple[Mapping[str, str], list[str]]:
        """What is wrong with it in the store, in a sentence for each partition, and what was done there."""

    def expectation(self) -> str:
        """A digest of all that a published file is compared with beside its record; cheap."""


@dataclass
class _Time:
    """Seconds of a tick that are left for looking, whatever its other parts take."""

    left: float


Tell = Callable[[str, str, Verdict, float], None]
"""Says the verdict on an asset's partition, and when it was found (unix seconds): the same where it is said
again because a tick died before it noted that it was said."""


@dataclass(frozen=True)
class DriftWatcher:
    """What a tick looks at. Plain Python: what Dagster lends is handed in."""

    watched: Sequence[DriftWatched]
    workers: Workers
    outbox: Outbox
    monotonic: Callable[[], float] = time.monotonic

    def look(self, tell: Tell, failing: Callable[[str], Collection[str]], now: float) -> list[str]:
        """One tick. failing: the partitions of an asset whose check fails now, asked where nothing is known.
        now: unix seconds.

        Returns what was found, in sentences.
        """
        time_for_looks = _Time(_LOOK_SECONDS)
        sentences: list[str] = []
        for watched in self.watched:
            if not watched.keys:
                continue  # No catalogue yet.
            sentences += self._look_at(watched, tell, failing, time_for_looks, now)
            sentences += self._tell_foreign(watched, now)
        return sentences

    def _look_at(
        self,
        watched: DriftWatched,
        tell: Tell,
        failing: Callable[[str], Collection[str]],
        time_for_looks: _Time,
        now: float,
    ) -> list[str]:
        snapshot = Snapshot.read(self.outbox.state, watched.asset.name)
        expectation = watched.expectation()
        standing = signatures(watched.asset, made_from=watched.made_from)
        troubles, sentences = watched.look_at_store()
        for key, sentence in troubles.items():
            digest = hashlib.sha256(sentence.encode()).hexdigest()[:16]
            standing[key] = f"{standing.get(key, '')} {digest}"
        changed = [key for key in watched.keys if _is_changed(snapshot, key, standing, expectation)]
        if not changed:
            return sentences
        # Whatever a run is about to publish is looked at when it has ended.
        busy = {worker.partition for worker in self.workers.living()}
        failed_before = failing(watched.asset.name) if snapshot.is_lost else ()
        owed: dict[str, Verdict] = {}
        looked = read = 0
        is_incomplete = False
        began = self.monotonic()
        for key in changed:
            if read and self.monotonic() - began > time_for_looks.left:
                is_incomplete = True
                rest = counted(len(changed) - looked, "partitions")
                sentences.insert(0, f"Looked at next time: {rest} of {watched.asset.name}.")
                break
            looked += 1
            signature = standing.get(key, "")
            before = snapshot.partitions.get(key)
            if key in busy:
                is_incomplete |= before is None
                continue
            read += 1
            if before is not None and before.signature == signature and not before.owed:
                verdict = watched.look_again(key) if before.kind in (SOUND, STALE) else None
            else:
                verdict = watched.look(key)
            if verdict is None:
                is_incomplete |= before is None
                continue
            seen = Seen(signature, expectation, verdict.kind, before.told if before is not None else "")
            if before is not None and before.owed:
                at = before.at if before.owed == verdict.told else now
                owed[key], seen = verdict, seen._replace(owed=verdict.told, at=at)
            elif verdict.told != (seen.told or SOUND) or (not seen.told and key in failed_before):
                owed[key], seen = verdict, seen._replace(owed=verdict.told, at=now)
            snapshot.partitions[key] = seen
            if len(owed) >= _TOLD_AT_ONCE:
                sentences += _tell_owed(watched.asset.name, owed, snapshot, tell)
                owed = {}
        time_for_looks.left -= self.monotonic() - began
        sentences += _tell_owed(watched.asset.name, owed, snapshot, tell)
        # Until all were looked at once, those that are not there still have to be asked about.
        snapshot.is_lost = snapshot.is_lost and is_incomplete
        snapshot.write()
        return sentences

    def _tell_foreign(self, watched: DriftWatched, now: float) -> list[str]:
        prefix = f"{watched.asset.name}/{_FOREIGN}/"
        names = foreign_names(watched.asset, frozenset(watched.keys))
        standing = {prefix + name: watched.asset.partition(name).published for name in names}
        opened = self.outbox.open_subjects()
        for subject, path in standing.items():
            if subject not in opened:
                self.outbox.post(
                    Alert(
                        kind=_FOREIGN,
                        subject=subject,
                        occurrence=f"{now:.0f}",
                        severity="error",
                        title=f"{path.name} is no partition of {watched.asset.name}",
                        next_step=f"Move {path} elsewhere: whoever reads *.parquet there reads it too.",
                        expected="partitions of the catalogue and nothing else",
                        actual=str(path),
                        at=now,
                    )
                )
        for subject in opened:
            if subject.startswith(prefix) and subject not in standing:
                name = subject.removeprefix(prefix)
                sentence = f"{name}.parquet lies no longer among the published files."
                self.outbox.note_recovery(subject, sentence=sentence, at=now)
        return [f"{path} is no partition." for path in standing.values()]


def _tell_owed(asset: str, owed: dict[str, Verdict], snapshot: Snapshot, tell: Tell) -> list[str]:
    if not owed:
        return []
    # Written down first, with their times: a tick that dies now says them again as the same ones, and where
    # nothing can be written nothing is said, rather than the same at each tick.
    snapshot.write()
    try:
        for key, verdict in owed.items():
            seen = snapshot.partitions[key]
            tell(asset, key, verdict, seen.at)
            snapshot.partitions[key] = seen._replace(told=seen.owed, owed="", at=0.0)
    finally:
        snapshot.write()
    return [f"{asset} {key}: {verdict.kind}. {verdict.actual}" for key, verdict in owed.items()]


def _is_changed(snapshot: Snapshot, key: str, standing: dict[str, str], expectation: str) -> bool:
    seen = snapshot.partitions.get(key)
    signature = standing.get(key, "")
    if seen is None:
        # With nothing known of an earlier look, one that is not there may have been published once.
        return bool(signature) or snapshot.is_lost
    if seen.owed or seen.signature != signature:
        return True
    return seen.expectation != expectation and bool(signature)


def evaluation(asset: str, key: str, verdict: Verdict, at: float) -> dg.AssetCheckEvaluation:
    """The verdict as a result of the check, for its partition. at: when it was found, in unix seconds."""
    metadata = {
        "expected": verdict.expected,
        "found": verdict.actual,
        FOUND_AT: datetime.fromtimestamp(at, UTC).isoformat(" ", "milliseconds"),
    }
    if verdict.next_step and not verdict.passed:
        metadata["what to do"] = verdict.next_step
    step = f" {verdict.next_step}" if verdict.next_step and not verdict.passed else ""
    return dg.AssetCheckEvaluation(
        asset_key=dg.AssetKey(asset),
        check_name=PUBLISHED_FILE,
        partition=key,
        passed=verdict.passed,
        severity=dg.AssetCheckSeverity.WARN if verdict.severity == "WARN" else dg.AssetCheckSeverity.ERROR,
        description=markdown_text.sentence(f"Expected {verdict.expected}; found {verdict.actual}{step}"),
        metadata={name: dg.MetadataValue.text(text) for name, text in metadata.items()},
    )


def build_published_file_drift_sensor(watcher: DriftWatcher, *, ticks: Ticks) -> dg.SensorDefinition:
    """The sensor. ticks: where each sensor notes that it ticked."""

    # Kept between ticks: a first look takes several, and each asks what fails now.
    histories = {watched.asset.name: PartitionHistory([watched.asset.name]) for watched in watcher.watched}

    def decide(at: Situation) -> Decided:
        def tell(asset: str, key: str, verdict: Verdict, found_at: float) -> None:
            at.dagster.report_evaluation(evaluation(asset, key, verdict, found_at))

        def failing(asset: str) -> Collection[str]:
            histories[asset].look(at.dagster)
            return histories[asset].failing(asset)

        sentences = watcher.look(tell, failing, at.now)
        first = " ".join(sentences[:_SHOWN]) or "Nothing has changed on disk since the last look."
        return Decided(first, logged=sentences[_SHOWN:])

    return build_sensor(
        NAME,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Looks at the published files themselves and fails the check published_file of a partition whose"
            " file is truncated, replaced, deleted, foreign or stale. It starts nothing."
        ),
        ticks=ticks,
    )


def signatures(asset: AssetFolders, *, made_from: AssetFolders | None = None) -> dict[str, str]:
    """Size, change time and inode of each partition's file and record, by key; of all files that are there.

    made_from: the asset that this one is made from; its records count as part of it. The change
    time (ctime) moves with every write, and with a rename; nothing but the kernel's clock can set it.
    """
    parts: dict[str, list[str]] = {}
    for folder, ending in ((asset.published, _FILE), (asset.versions, _RECORD)):
        for key, state in _entries(folder, ending):
            parts.setdefault(key, []).append(ending + state)
    if made_from is not None:
        for key, state in _entries(made_from.versions, _RECORD):
            if key in parts:
                parts[key].append(state)
    return {key: " ".join(states) for key, states in parts.items()}


def foreign_names(asset: AssetFolders, keys: Collection[str]) -> list[str]:
    """Names of parquet files that are no partition's but that whoever reads ``*.parquet`` reads too.

    What has a record was published: if no key is its own, the catalogue is what is wrong, not the file.
    """
    expected = asset.recorded_keys().union(keys)
    return [name for name in asset.published_keys() if name not in expected and not name.startswith(".")]


def _entries(folder: Path, ending: str) -> Iterator[tuple[str, str]]:
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            # No dot in the rest: not the record's second copy, nor a temporary file.
            if entry.name.endswith(ending) and "." not in entry.name.removesuffix(ending):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                yield entry.name.removesuffix(ending), f"{stat.st_size}.{stat.st_ctime_ns}.{stat.st_ino}"
