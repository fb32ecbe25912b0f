"""Published files that are not what was published any more: truncated, replaced, deleted, foreign, or stale.

A tick finds changed files, has them verified, and reports each verdict to Dagster as a result of the check
``published_file``. It repairs nothing: the scheduled re-materialization does. The check of the store, which
is handed in, puts back what is damaged only there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

import dagster as dg
import sqlalchemy as sa

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from resources.dagster_names import EXPECTED, FINDING, FOUND, WHAT_TO_DO
from sensors.dagster_internals.events import FOUND_AT
from sensors.partition_history import PartitionHistory
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_durable import markdown_text
from vlm_durable.files.layout import AssetFolders
from vlm_durable.files.seen_files import signature_of
from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import drift_snapshots, put_row, read_snapshot
from vlm_durable.state.workers import Workers
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.partition_files import PUBLISHED_FILE
from vlm_durable.versions.partition_findings import stray_files
from vlm_durable.versions.published import Verification
from vlm_durable.wording import counted

NAME = "published_file_drift"
INTERVAL_SECONDS = 60
_VERIFY_SECONDS = 15.0
"""How long a tick verifies partitions: the rest follows at the next ticks.

A tick verifies at least one, so that a lost snapshot is rebuilt even if ticks have no time.
"""
_REPORTED_AT_ONCE = 200
"""Verdicts between two writes of the snapshot."""

_SHOWN = 5
"""Sentences on the sensor's page; further ones are in the tick's log."""

_FOREIGN = FindingKind.FOREIGN_FILE
_FILE, _RECORD = ".parquet", ".json"

_SOUND = "sound"
"""The digest of a verdict without a finding."""


class Seen(NamedTuple):
    """One partition when it was last verified.

    signature: of its files. expectation: what its record was compared with. reported: digest of the verdict
    that Dagster has; "": none. owed: digest of the verdict to report; "": none. A tick that then died may
    have reported it already. at: when the owed verdict was found, in unix seconds.
    """

    signature: str
    expectation: str
    reported: str
    owed: str = ""
    at: float = 0.0


@dataclass
class Snapshot:
    """The last verdicts on an asset's partitions.

    is_lost: an earlier snapshot was lost, and not every partition was verified since.
    """

    state: ControlState
    asset: str
    partitions: dict[str, Seen] = field(default_factory=dict)
    is_lost: bool = False

    @classmethod
    def read(cls, state: ControlState, asset: str) -> Snapshot:
        """The last snapshot; a new one if there is none or it cannot be read: a power cut may tear it."""
        try:
            fields = state.read_beats(lambda connection: read_snapshot(connection, asset)) or {}
            partitions = {key: Seen(*seen) for key, seen in fields["partitions"].items()}
            return cls(state, asset, partitions, is_lost=bool(fields["is_lost"]))
        except (ValueError, KeyError, TypeError, AttributeError, sa.exc.DBAPIError):
            return cls(state, asset, is_lost=True)

    def write(self) -> None:
        """Replace the last snapshot; a power cut may lose it. Raises ControlStateError."""
        row = {
            "asset": self.asset,
            "snapshot": {"is_lost": self.is_lost, "partitions": self.partitions},
        }
        self.state.beat(lambda connection: put_row(connection, drift_snapshots, **row))


def _digest(verdict: Verification) -> str:
    """The same for the same verdict."""
    finding = verdict.worst
    return _SOUND if finding is None else _digest_of(f"{finding.kind}\n{verdict.expected}\n{finding.text}")


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class DriftWatched(Protocol):
    """An asset whose files are watched."""

    @property
    def asset(self) -> AssetFolders:
        """Its folders."""

    @property
    def keys(self) -> Sequence[str]:
        """All its partitions."""

    @property
    def made_from(self) -> Sequence[AssetFolders]:
        """The assets whose published rows it follows from."""

    def verifier(self) -> contextlib.AbstractContextManager[Callable[[str], Verification | None]]:
        """Gives the verdict on a partition by its key; None while a publication is under way.

        Every byte of a file is read that changed, or came into doubt, since it was last verified.
        """

    def check_store(self) -> tuple[Mapping[str, str], list[str]]:
        """Check the store. Returns a sentence for each partition that is damaged there, and what was done."""

    def doubtful(self) -> frozenset[str]:
        """Partitions whose file has to be read though it did not change, or that was found damaged."""

    def expectation(self) -> str:
        """A cheap digest of everything that a published file is compared with, except its record."""


@dataclass
class _TimeLeft:
    """Seconds of a tick that are left for verifying, whatever its other parts take."""

    seconds: float


Report = Callable[[str, str, Verification, float], None]
"""Reports a verdict on a partition: asset, key, verdict, and when it was found (unix seconds). If a tick dies
before it notes the report, the next tick repeats it with the same time."""


@dataclass(frozen=True)
class DriftWatcher:
    """Checks the published files of the watched assets, without Dagster's classes."""

    watched: Sequence[DriftWatched]
    workers: Workers
    outbox: Outbox
    monotonic: Callable[[], float] = time.monotonic

    def check(self, report: Report, failing: Callable[[str], Collection[str]], now: float) -> list[str]:
        """One tick. Returns sentences about what is wrong.

        failing: gives the partitions of an asset whose check fails now; called only if a snapshot was lost.
        now: unix seconds.
        """
        time_left = _TimeLeft(_VERIFY_SECONDS)
        sentences: list[str] = []
        for watched in self.watched:
            if not watched.keys:
                continue  # No catalogue yet.
            sentences += self._check_asset(watched, report, failing, time_left, now)
            sentences += self._alert_of_foreign(watched, now)
        return sentences

    def _check_asset(
        self,
        watched: DriftWatched,
        report: Report,
        failing: Callable[[str], Collection[str]],
        time_left: _TimeLeft,
        now: float,
    ) -> list[str]:
        snapshot = Snapshot.read(self.outbox.state, watched.asset.name)
        expectation = watched.expectation()
        standing = signatures(watched.asset, made_from=watched.made_from)
        troubles, sentences = watched.check_store()
        for key, sentence in troubles.items():
            standing[key] = f"{standing.get(key, '')} {_digest_of(sentence)}"
        for key in watched.doubtful():
            standing[key] = f"{standing.get(key, '')} in doubt"
        changed = [key for key in watched.keys if _is_changed(snapshot, key, standing, expectation)]
        if not changed:
            return sentences
        # A partition that a run works on is verified when the run has ended.
        busy = {worker.partition for worker in self.workers.living()}
        failed_before = failing(watched.asset.name) if snapshot.is_lost else ()
        owed: dict[str, Verification] = {}
        verified = 0
        is_incomplete = False
        began = self.monotonic()
        with watched.verifier() as verify:
            for number, key in enumerate(changed):
                if verified and self.monotonic() - began > time_left.seconds:
                    is_incomplete = True
                    rest = counted(len(changed) - number, "partitions")
                    sentences.insert(0, f"Looked at next time: {rest} of {watched.asset.name}.")
                    break
                signature = standing.get(key, "")
                before = snapshot.partitions.get(key)
                if key in busy:
                    is_incomplete |= before is None
                    continue
                verified += 1
                verdict = verify(key)
                if verdict is None:
                    is_incomplete |= before is None
                    continue
                digest, reported = _digest(verdict), before.reported if before is not None else ""
                seen = Seen(signature, expectation, reported)
                is_owed = before is not None and bool(before.owed)
                is_new = digest != (seen.reported or _SOUND)
                is_recovery = not seen.reported and key in failed_before
                if is_owed or is_new or is_recovery:
                    found_at = before.at if before is not None and before.owed == digest else now
                    owed[key], seen = verdict, seen._replace(owed=digest, at=found_at)
                snapshot.partitions[key] = seen
                if len(owed) >= _REPORTED_AT_ONCE:
                    sentences += _report_owed(watched.asset.name, owed, snapshot, report)
                    owed = {}
        time_left.seconds -= self.monotonic() - began
        sentences += _report_owed(watched.asset.name, owed, snapshot, report)
        # Until every partition was verified once, partitions without a file have to be verified too.
        snapshot.is_lost = snapshot.is_lost and is_incomplete
        snapshot.write()
        return sentences

    def _alert_of_foreign(self, watched: DriftWatched, now: float) -> list[str]:
        prefix = f"{watched.asset.name}/{_FOREIGN}/"
        standing: dict[str, Finding] = {
            prefix + Path(finding.path).stem: finding
            for finding in stray_files(watched.asset, watched.keys)
            if finding.kind is _FOREIGN and finding.path is not None
        }
        opened = self.outbox.open_subjects()
        for subject, finding in standing.items():
            if subject not in opened:
                name = f"{subject.removeprefix(prefix)}.parquet"
                self.outbox.post(
                    Alert(
                        kind=_FOREIGN,
                        subject=subject,
                        occurrence=f"{now:.0f}",
                        severity="error",
                        finding=finding.kind,
                        title=f"{name} is no partition of {watched.asset.name}",
                        next_step=finding.next_step,
                        expected="partitions of the catalogue and nothing else",
                        actual=finding.sentence,
                        at=now,
                    )
                )
        for subject in opened:
            if subject.startswith(prefix) and subject not in standing:
                name = subject.removeprefix(prefix)
                sentence = f"{name}.parquet is not among the published files any more."
                self.outbox.note_recovery(subject, sentence=sentence, at=now)
        return [finding.sentence for finding in standing.values()]


def _report_owed(asset: str, owed: dict[str, Verification], snapshot: Snapshot, report: Report) -> list[str]:
    if not owed:
        return []
    # The owed verdicts are written down first, with their times. If this tick dies, the next one repeats them
    # unchanged. If nothing can be written, nothing is reported: else every tick would report the same.
    snapshot.write()
    try:
        for key, verdict in owed.items():
            seen = snapshot.partitions[key]
            report(asset, key, verdict, seen.at)
            snapshot.partitions[key] = seen._replace(reported=seen.owed, owed="", at=0.0)
    finally:
        snapshot.write()
    return [f"{asset} {key}: {verdict.actual}" for key, verdict in owed.items()]


def _is_changed(snapshot: Snapshot, key: str, standing: dict[str, str], expectation: str) -> bool:
    seen = snapshot.partitions.get(key)
    signature = standing.get(key, "")
    if seen is None:
        # If the snapshot was lost, a partition without a file may have been published before.
        return bool(signature) or snapshot.is_lost
    if seen.owed or seen.signature != signature:
        return True
    return seen.expectation != expectation and bool(signature)


def evaluation(asset: str, key: str, verdict: Verification, at: float) -> dg.AssetCheckEvaluation:
    """The verdict as a result of the check, for its partition. at: when it was found, in unix seconds."""
    metadata = {
        EXPECTED: verdict.expected,
        FOUND: verdict.actual,
        FOUND_AT: datetime.fromtimestamp(at, UTC).isoformat(" ", "milliseconds"),
    }
    finding, step = verdict.worst, ""
    if finding is not None:
        metadata[FINDING] = finding.kind.value
        if finding.next_step:
            metadata[WHAT_TO_DO] = finding.next_step
            step = f" {finding.next_step}"
    warns = finding is not None and finding.kind.leaves_rows_sound
    return dg.AssetCheckEvaluation(
        asset_key=dg.AssetKey(asset),
        check_name=PUBLISHED_FILE,
        partition=key,
        passed=finding is None,
        severity=dg.AssetCheckSeverity.WARN if warns else dg.AssetCheckSeverity.ERROR,
        description=markdown_text.sentence(f"Expected {verdict.expected}; found {verdict.actual}{step}"),
        metadata={name: dg.MetadataValue.text(text) for name, text in metadata.items()},
    )


def build_published_file_drift_sensor(watcher: DriftWatcher, *, ticks: Ticks) -> dg.SensorDefinition:
    """The sensor. ticks: where each sensor notes that it ticked."""

    # Kept between ticks: after a lost snapshot several ticks ask what fails now.
    histories = {watched.asset.name: PartitionHistory([watched.asset.name]) for watched in watcher.watched}

    def decide(situation: Situation) -> Decided:
        def report(asset: str, key: str, verdict: Verification, found_at: float) -> None:
            situation.dagster.report_evaluation(evaluation(asset, key, verdict, found_at))

        def failing(asset: str) -> Collection[str]:
            histories[asset].update(situation.dagster)
            return histories[asset].failing(asset)

        sentences = watcher.check(report, failing, situation.now)
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


def signatures(asset: AssetFolders, *, made_from: Sequence[AssetFolders] = ()) -> dict[str, str]:
    """The signatures of each partition's file and record that exists, by its key.

    made_from: the assets that this one is made from; their records count too.
    """
    parts: dict[str, list[str]] = {}
    for folder, ending in ((asset.published, _FILE), (asset.versions, _RECORD)):
        for key, state in _entries(folder, ending):
            parts.setdefault(key, []).append(ending + state)
    for upstream in made_from:
        for key, state in _entries(upstream.versions, _RECORD):
            if key in parts:
                parts[key].append(state)
    return {key: " ".join(states) for key, states in parts.items()}


def _entries(folder: Path, ending: str) -> Iterator[tuple[str, str]]:
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            # A dot in the rest: the record's second copy, or a temporary file.
            if entry.name.endswith(ending) and "." not in entry.name.removesuffix(ending):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                yield entry.name.removesuffix(ending), signature_of(stat)
