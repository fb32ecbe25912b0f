"""What takes space and is needed no more: earlier versions, superseded journals, quarantine, leftovers.

It is removed only beside a published file and a second copy that are both whole to the byte, read again right
before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain
from pathlib import Path

from vlm_assets.assets.partition_state import read_record
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ranges import InvalidRangeError, PropertyRange
from vlm_assets.commands.terminal import (
    AsJson,
    Home,
    Yes,
    agreed,
    app,
    chosen_settings,
    say,
    say_as_json,
    say_list,
)
from vlm_assets.config.extensions import StoredLeftover, installed
from vlm_assets.config.settings import Settings
from vlm_assets.services.progress import doing, doing_each
from vlm_assets.services.store_contents import remove_leftovers, store_leftovers
from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.files.layout import AssetFolders
from vlm_durable.journal.discarding import discard
from vlm_durable.journal.high_water_mark import read_mark
from vlm_durable.versions.partition_files import PartitionFiles, PublishedError, PublishedRecord
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.wording import counted

_AFTER = re.compile(r".*-after-([0-9]+)")

EARLIER_SLOTS = (1, 2)
LOCK_SECONDS = 10.0


class What(StrEnum):
    """Kinds of what may go."""

    EARLIER_VERSION = "earlier version"
    JOURNAL = "superseded journal"
    QUARANTINED = "quarantined file"
    TEMPORARY = "abandoned temporary file"


@dataclass(frozen=True)
class Removal:
    """One thing that may go, and why. needs: partitions that must be whole for it to be removed."""

    asset: str
    what: What
    path: Path
    bytes: int
    why: str
    needs: tuple[str, ...]


@dataclass
class PrunePlan:
    """What may go, and what stays for a reason that a person should know."""

    removals: list[Removal] = field(default_factory=list)
    in_store: list[StoredLeftover] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """How much it would free."""
        return sum(one.bytes for one in self.removals) + sum(one.bytes for one in self.in_store)


def plan_prune(settings: Settings, catalog: Catalog, keys: Sequence[str] | None = None) -> PrunePlan:
    """Find what may go; changes nothing. Reads every byte of the partitions that have something to go.

    keys: partitions to look at; all, and what extensions keep in the store, unless given.
    """
    plan = PrunePlan()
    is_whole = keys is None
    keys = [one.key for one in catalog.ranges] if keys is None else keys
    for asset in (settings.descriptions, settings.embeddings):
        verdicts: dict[str, str | None] = {}
        for one in _candidates(asset, keys):
            unread = [key for key in one.needs if key not in verdicts]
            for number, key in enumerate(unread):
                if len(unread) > 1:
                    doing(f"reading every byte of {asset.name}, partitions", number, len(unread))
                verdicts[key] = _not_whole(PartitionFiles(asset, key))
            reason = next((why for key in one.needs if (why := verdicts[key]) is not None), None)
            if reason is None:
                plan.removals.append(one)
            else:
                plan.kept.append(f"{one.path} stays: {reason}")
    doing("looking at what the store holds")
    plan.in_store = [one for one in store_leftovers(settings) if one.key in keys]
    if is_whole:
        for extension in installed():
            plan.in_store += extension.stored_leftovers(settings)
    return plan


def _candidates(asset: AssetFolders, keys: Sequence[str]) -> Iterator[Removal]:
    temporary = defaultdict(list)
    for path in sorted(asset.staging.glob(f".*{files.TEMPORARY_SUFFIX}")):
        temporary[path.name.split(".")[1]].append(path)
    for key in doing_each(f"looking at the partitions of {asset.name}", keys):
        paths = asset.partition(key)
        partition = PartitionFiles(asset, key)
        manifest = read_record(partition).newest
        record = manifest.published if manifest else None
        for number in EARLIER_SLOTS:
            path = partition.slot(number)
            if path.is_file():
                known = manifest.previous[number - 1 : number] if manifest else ()
                why = (
                    f"version {known[0].sequence} of {key}" if known else f"no version of {key} that is known"
                )
                yield Removal(asset.name, What.EARLIER_VERSION, path, _size(path), why, (key,))
        if record is not None:
            for journal in sorted(paths.journals.glob("*")):
                mark = paths.high_water_mark(journal.name)
                if journal.is_dir() and is_superseded(journal, record, mark):
                    why = (
                        f"{key} was published after it, as version {record.sequence} of generation"
                        f" {record.metadata.get('generation')}"
                    )
                    yield Removal(asset.name, What.JOURNAL, journal, _size(journal), why, (key,))
        for path in temporary[key]:
            why = f"left by a process that was killed at {key}, unless one is at it now"
            yield Removal(asset.name, What.TEMPORARY, path, _size(path), why, (key,))
    for path in sorted(asset.quarantine.rglob("*")):
        if path.is_file():
            owner = _owner(asset, path)
            why = f"set aside from {owner}" if owner else "set aside; all partitions are whole"
            needs = (owner,) if owner else tuple(keys)
            yield Removal(asset.name, What.QUARANTINED, path, _size(path), why, needs)


def _owner(asset: AssetFolders, path: Path) -> str | None:
    """The partition that a file was set aside from, whether the catalogue lists it or not; None: nobody's."""
    with suppress(InvalidRangeError):
        return PropertyRange.from_key(path.relative_to(asset.quarantine).parts[0]).key
    return None


def is_superseded(journal: Path, record: PublishedRecord, high_water_mark: Path) -> bool:
    """Whether a published version came after everything in a journal, so that no start goes on with it.

    Work under way on a next version is never that. Where it cannot be told, the journal stays.
    """
    generation = journal.name
    if generation == record.metadata.get("generation"):
        return True
    mark = read_mark(high_water_mark, key=record.key, generation=generation).mark
    if mark is not None and mark.retired:
        return True
    after = _AFTER.fullmatch(generation)
    if after and int(after[1]) >= record.sequence:
        return False
    published = datetime.fromisoformat(record.published_at)
    newest = max(
        (path.stat().st_mtime for path in (journal, *journal.rglob("*")) if path.name != "writer.lock"),
        default=0.0,
    )
    # A clock that was ahead when it was published says nothing about what came first.
    return published <= datetime.now(UTC) and datetime.fromtimestamp(newest, UTC) < published


def remove(settings: Settings, removals: list[Removal]) -> Iterator[str]:
    """Remove what a plan listed, a partition at a time, each verified again under its lock; says what went.

    Earlier versions go from the store too. Raises PublishedError, JournalError, StoreError or OSError, with
    everything not yet said still there.
    """
    whole: dict[tuple[str, str], bool] = {}
    for one in removals:
        asset = settings.layout.asset(one.asset)
        if one.what is What.QUARANTINED:
            for number, key in enumerate(one.needs):
                if (one.asset, key) not in whole:
                    doing(f"reading every byte of {asset.name}, partitions", number, len(one.needs))
                    whole[one.asset, key] = _not_whole(PartitionFiles(asset, key)) is None
            if all(whole[one.asset, key] for key in one.needs):
                one.path.unlink(missing_ok=True)
                yield f"Removed {one.path}."
            else:
                yield f"Kept {one.path}: a partition that it may belong to is no longer whole."
    by_partition: dict[tuple[str, str], list[Removal]] = {}
    for one in removals:
        if one.what is not What.QUARANTINED:
            by_partition.setdefault((one.asset, one.needs[0]), []).append(one)
    for (name, key), some in doing_each("removing what is beside partitions", by_partition.items()):
        asset = settings.layout.asset(name)
        stored = None
        if settings.store is not None and any(one.what is What.EARLIER_VERSION for one in some):
            # First: by its earlier versions the store's version is known as one that came before.
            stored = StoredPartitions(asset, settings.store)
            stored.push(key)
        yield from _remove_of_partition(PartitionFiles(asset, key), some)
        if stored is not None:
            stored.forget_earlier(key)
            yield f"Removed the earlier versions of {key} of {name} from {settings.store} too."


def _remove_of_partition(partition: PartitionFiles, removals: list[Removal]) -> Iterator[str]:
    with partition.locked(LOCK_SECONDS):
        try:
            # This also removes what killed processes left, and finishes an interrupted publication.
            manifest, notes = partition.settle()
        except PublishedError as error:
            yield f"Kept all of {partition.key}: {error}"
            return
        yield from notes
        record = manifest.published
        reason = _not_whole(partition, record)
        if record is None or reason is not None:
            yield f"Kept all of {partition.key}: {reason}"
            return
        versions = [one.path for one in removals if one.what is What.EARLIER_VERSION]
        if versions:
            # The record never names what is not there.
            settled = replace(manifest, previous=()).to_bytes(partition.asset)
            files.write_replacing(partition.record_copy, settled, partition.staging)
            files.write_replacing(partition.record_path, settled, partition.staging)
        for path in versions:
            path.unlink(missing_ok=True)
            yield f"Removed {path}."
        if versions:
            files.sync_directory(versions[0].parent)
        for one in removals:
            mark = partition.paths.high_water_mark(one.path.name)
            if one.what is What.JOURNAL and is_superseded(one.path, record, mark):
                gone = discard(one.path, key=partition.key, generation=one.path.name, high_water_mark=mark)
                yield f"Removed {one.path}." if gone else f"Kept {one.path}: no manifest in it reads."
            elif one.what is What.TEMPORARY:
                yield f"Kept {one.path}: a process needs it." if one.path.exists() else f"Removed {one.path}."


def _not_whole(partition: PartitionFiles, record: PublishedRecord | None = None) -> str | None:
    """Why nothing beside a partition may go, reading both copies to the last byte; None where it may."""
    if record is None:
        reading = read_record(partition)
        manifest = reading.newest
        if manifest is None or manifest.published is None:
            return f"partition {partition.key} is not published."
        if manifest.pending is not None:
            return f"a publication of partition {partition.key} is under way or was interrupted."
        try:
            newest, _ = partition.put_back(reading.records)
        except PublishedError as error:
            return str(error)
        if newest is not None:
            return (
                f"version {newest.sequence} of partition {partition.key} (published {newest.published_at})"
                f" was here, and an older one stands: {command('repair')} first."
            )
        record = manifest.published
    for path in (partition.published, partition.slot(0)):
        if not partition.holds(path, record):
            return f"{path} is not what was published: {command('repair')} first."
    return None


def remove_stored(settings: Settings, leftovers: Sequence[StoredLeftover]) -> Iterator[str]:
    """Remove them from the store, each by whoever its asset belongs to. Raises StoreError."""
    theirs = {asset: extension for extension in installed() for asset in extension.assets}
    for leftover in leftovers:
        if leftover.asset in theirs:
            yield theirs[leftover.asset].remove_leftover(settings, leftover)
    yield from remove_leftovers(settings, [one for one in leftovers if one.asset not in theirs])


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    return path.stat().st_size


_EXAMPLES = """\b
vlm-assets prune            list it, then ask
vlm-assets prune --yes      remove it
vlm-assets prune --json     list it as JSON; nothing is removed without --yes"""


@app.command("prune", epilog=_EXAMPLES)
def prune_command(home: Home = None, yes: Yes = False, as_json: AsJson = False) -> None:
    """List what takes space and is needed no more; then remove it.

    Earlier versions, journals that a publication superseded, quarantined files, abandoned temporaries.
    Only where the published file and its second copy are whole to the byte.
    """
    current = chosen_settings(home)
    doing("looking for what is needed no more")
    plan = plan_prune(current, Catalog.open(current.home))
    if as_json:
        said = [*remove(current, plan.removals), *remove_stored(current, plan.in_store)] if yes else []
        removals = [
            {"asset": one.asset, "what": one.what, "path": one.path, "bytes": one.bytes, "why": one.why}
            for one in plan.removals
        ]
        removals += [{**vars(one), "what": "journal in the store"} for one in plan.in_store]
        say_as_json({"removals": removals, "kept": plan.kept, "bytes": plan.bytes, "done": yes, "said": said})
        return
    say_list(plan.kept, "yellow")
    if not plan.removals and not plan.in_store:
        say("Nothing to prune.")
        return
    say_list(
        [
            f"journal in the store: {one.key} of {one.asset}, generation {one.generation}"
            f" ({counted(one.objects, 'objects')}, {one.bytes:,} bytes; its work is published, or was given"
            " up)"
            for one in plan.in_store
        ]
    )
    say_list([f"{one.what.value}: {one.path} ({one.bytes:,} bytes; {one.why})" for one in plan.removals])
    for what in What:
        if sizes := [one.bytes for one in plan.removals if one.what is what]:
            say(f"{len(sizes)} x {what.value}: {sum(sizes) / 1e6:,.1f} MB")
    if agreed(f"Remove these for good ({plan.bytes / 1e6:,.1f} MB)?", yes):
        for sentence in chain(remove(current, plan.removals), remove_stored(current, plan.in_store)):
            say(sentence)
