"""Looks at an asset's published objects in the store: what is missing or damaged there, as far as is known.

A look lists the objects, and asks for the checksums of those that changed since the look before. It may also
read a few objects to the byte, different ones at each look. What it saw is kept in the control state beside
the drift sensor's snapshots, for all processes; without it every object is asked about anew.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import sqlalchemy as sa

from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_durable.files.layout import AssetFolders
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_durable.mirror.bucket import ObjectDeniedError, StoreError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.state.database import ControlState
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.tables import drift_snapshots, put_row, read_snapshot
from vlm_durable.state.workers import Workers
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError

READ_EACH_LOOK = 5
"""Published files that a look of the drift sensor reads to the byte: 7,200 a day of each asset."""

_FRESH_SECONDS = 90.0
"""The drift sensor looks every minute: while it does, nobody else needs to."""

_HASTY_SECONDS, _ANSWER_SECONDS = 2.0, 5.0
"""The times for a command that a person waits for: to look, and for the store to answer."""

_AT_ONCE = 16


class SeenObject(NamedTuple):
    """A published file at its last look. Both are "" where it was not there, or nothing was wrong."""

    signature: str
    trouble: str


@dataclass
class _Memory:
    """What the looks so far saw. at: of the last one, in unix seconds. cursor: the last partition read."""

    at: float = 0.0
    cursor: str = ""
    objects: dict[str, SeenObject] = field(default_factory=dict)


class StoreLooks:
    """The looks at one asset's partitions in the store."""

    def __init__(self, asset: AssetFolders, store: Mirror, state: ControlState) -> None:
        self._asset, self._store, self._state = asset, store, state
        self._partitions = StoredPartitions(asset, store)
        self._name = f"{asset.name} in {store}"

    def troubles(self) -> dict[str, str]:
        """What the last looks found wrong, in a sentence for each partition."""
        return {key: seen.trouble for key, seen in self._read().objects.items() if seen.trouble}

    def is_fresh(self) -> bool:
        """Whether another process looked a moment ago."""
        return time.time() - self._read().at < _FRESH_SECONDS

    def inspect(
        self,
        *,
        seconds: float = math.inf,
        read: int = 0,
        deep: bool = False,
        mend: bool = False,
        advance: Callable[[int, int], None] = lambda done, partitions: None,
    ) -> list[str]:
        """Look at what changed. seconds: after which the rest waits for the next look.

        read: so many partitions are read to the byte, beside those that were wrong; deep: all of them. mend:
        put back what was wrong at the look before. advance: told how many of the partitions were looked at.
        Returns what was put back. Raises StoreError.
        """
        until = time.monotonic() + seconds
        below = f"{self._asset.name}/"
        listed = {
            file.name.removeprefix(below).removesuffix(".parquet"): file.signature
            for file in self._store.listed(below)
            if file.name.endswith(".parquet")
        }
        memory = self._read()
        seen = memory.objects
        # What a run is about to publish is looked at when it has ended.
        busy = {worker.partition for worker in Workers(self._state).living()}
        keys = sorted((listed.keys() | seen.keys() | set(self._asset.published_keys())) - busy)
        wrong = [key for key in keys if key in seen and seen[key].trouble]
        changed = [key for key in keys if key not in seen or seen[key].signature != listed.get(key, "")]
        # What is not listed is gone: asked first.
        changed = sorted((key for key in changed if key not in wrong), key=lambda key: key in listed)
        in_turn = sorted(keys, key=lambda key: (key <= memory.cursor, key))[: None if deep else read]
        steps = ((wrong, True), (changed, deep), (in_turn, True))
        done, notes = 0, list[str]()
        try:
            if mend:
                notes = [note for key in wrong if time.monotonic() < until for note in self._put_back(key)]
            for step, to_the_byte in steps:
                for key, trouble in self._ask(step, until, deep=to_the_byte):
                    seen[key] = SeenObject(listed.get(key, ""), trouble)
                    memory.cursor = key if step is in_turn else memory.cursor
                    done += 1
                    advance(done, sum(len(step_keys) for step_keys, _ in steps))
        finally:
            memory.at = time.time()
            self._write(memory)
        return notes

    def forget(self, key: str) -> None:
        """Have the next look ask about a partition anew."""
        memory = self._read()
        memory.objects.pop(key, None)
        self._write(memory)

    def _put_back(self, key: str) -> tuple[str, ...]:
        try:
            return self._partitions.put_back(key)
        except (PublishedError, FormatVersionError, OSError):
            return ()  # The look that follows says what is wrong.

    def _ask(self, keys: Sequence[str], until: float, *, deep: bool) -> Iterator[tuple[str, str]]:
        """The trouble of each partition, "" where there is none, as far as the time allows."""

        def trouble(key: str) -> str:
            try:
                return self._partitions.trouble(key, deep=deep) or ""
            except (PublishedError, FormatVersionError, ObjectDeniedError) as error:
                return str(error)

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="look-at-store") as pool:
            for start in range(0, len(keys), _AT_ONCE):
                if time.monotonic() >= until:
                    return
                together = keys[start : start + _AT_ONCE]
                yield from zip(together, pool.map(trouble, together), strict=True)

    def _read(self) -> _Memory:
        try:
            content = self._state.read_beats(lambda connection: read_snapshot(connection, self._name))
            if content is None:
                return _Memory()
            objects = {key: SeenObject(*seen) for key, seen in content["objects"].items()}
            return _Memory(float(content["at"]), str(content["cursor"]), objects)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, sa.exc.DBAPIError):
            return _Memory()

    def _write(self, memory: _Memory) -> None:
        content = {"at": memory.at, "cursor": memory.cursor, "objects": memory.objects}
        row = {"asset": self._name, "snapshot": content}
        # Where it fails, the next look asks about all of it again.
        with contextlib.suppress(ControlStateError):
            self._state.beat(lambda connection: put_row(connection, drift_snapshots, **row))


@dataclass(frozen=True)
class StoreTroubles:
    """What is wrong in the store: a sentence for each asset and partition. unread: why nobody could look."""

    sentences: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unread: tuple[Finding, ...] = ()


def store_looks(settings: Settings, assets: Sequence[AssetFolders] | None = None) -> dict[str, StoreLooks]:
    """The looks of each asset; none without a store. assets: those of the settings unless given."""
    if not settings.mirror.keeps_copies:
        return {}
    assets = settings.partitioned_assets if assets is None else assets
    return {asset.name: StoreLooks(asset, settings.mirror, control_state(settings)) for asset in assets}


def store_troubles(settings: Settings) -> StoreTroubles:
    """What is known to be wrong in the store, after a quick look, unless another process looked just now.

    A store that does not answer holds up nobody for more than a few seconds.
    """
    looks = store_looks(settings)
    errors: list[str] = []

    def inspect() -> None:
        try:
            for of_asset in looks.values():
                if not of_asset.is_fresh():
                    of_asset.inspect(seconds=_HASTY_SECONDS)
        except StoreError as error:
            errors.append(str(error))

    asking = threading.Thread(target=inspect, daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    if asking.is_alive():
        errors.append(f"{settings.mirror} does not answer.")
    sentences = {
        (asset, key): sentence
        for asset, of_asset in looks.items()
        for key, sentence in of_asset.troubles().items()
    }
    as_of = "What the store holds is as of the last look at it:"
    return StoreTroubles(sentences, tuple(store_unread(settings, f"{as_of} {why}") for why in errors[:1]))


def store_unread(settings: Settings, sentence: str) -> Finding:
    """The finding that nobody could look into the store."""
    name, where = settings.descriptions.name, str(settings.mirror)
    return Finding(FindingKind.STORE_UNREAD, name, None, sentence, path=where)
