"""What would put a dataset right: restored in place where a whole copy is there, else computed again.

The plan is made from an audit. A person may also give up lost rows of a journal here;
``vlm_durable/journal/recovery.py`` notices and records such a loss.
"""

from __future__ import annotations

import getpass
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.assets.fingerprint import KEEP, TEXTS
from vlm_assets.assets.partition_state import Kind, Problem, State
from vlm_assets.assets.stored_settings import accept_settings as forget_settings
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.catalog_copies import quarantine
from vlm_assets.catalog.catalog_file import CatalogError
from vlm_assets.catalog.chosen_catalog import check_catalog, put_in_place
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.catalog.stored_catalog import pull_catalog, put_back_catalog
from vlm_assets.commands.audit import Audit, PartitionAudit, audit
from vlm_assets.commands.terminal import (
    AsJson,
    Deep,
    Home,
    Yes,
    agreed,
    app,
    chosen_settings,
    say,
    say_as_json,
    say_list,
)
from vlm_assets.config.resource_settings import (
    build_gpu,
    build_text_embedding_model,
    build_vision_language_model,
    control_state,
)
from vlm_assets.config.settings import Settings
from vlm_assets.services.progress import doing, doing_each
from vlm_assets.services.store_looks import store_looks
from vlm_assets.webserver.api import LAUNCHED_BY, DagsterApi
from vlm_assets.webserver.home import running_address
from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.journal.high_water_mark import read_marks
from vlm_durable.journal.journal_errors import JournalLossError, sample
from vlm_durable.mirror.bucket import S3Folder, StoreError
from vlm_durable.mirror.stored_journal import (
    Copying,
    HeadDamagedError,
    StoredJournal,
    stored_generations,
)
from vlm_durable.state.workers import Workers
from vlm_durable.versions.partition_files import (
    FindingKind,
    NotPublishedError,
    PartitionFiles,
    PublishedError,
    PublishedRecord,
)
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import OlderInStoreError, StoredPartitions
from vlm_durable.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from vlm_assets.assets.partition import Partition


class Way(StrEnum):
    """How a thing is put right."""

    RESTORE = "restore"
    """From the whole copy of the two; a publication that was interrupted is settled."""
    PUT_BACK = "put back into the store"
    """From a whole file of this machine."""
    SET_ASIDE = "set aside"
    """Moved into the quarantine: a file that readers must not read."""
    COMPUTE = "compute again"
    RETRY_FAILED = "try the failed properties again"
    RESUME = "compute what is missing"
    BY_HAND = "by hand"


COMPUTING = frozenset({Way.COMPUTE, Way.RETRY_FAILED, Way.RESUME})

_OF_THE_FILES = frozenset(
    {Kind.FILE, Kind.SECOND_COPY, Kind.RECORD_COPY, Kind.COLUMNS, Kind.IDS, Kind.MIXED, Kind.PENDING}
)
_WARNINGS_TO_REPAIR = (Kind.PENDING, Kind.PUT_BACK)
"""Warnings that a repair lists: it puts them right, or a person decides."""

_OF_THE_ROWS = frozenset({Kind.COLUMNS, Kind.IDS, Kind.MIXED})

_RUN_OPTIONS = {Way.COMPUTE: "recompute", Way.RETRY_FAILED: "retry_failed"}


@dataclass(frozen=True)
class Repair:
    """One thing to put right. why: what was found. key: None for a file that is no partition's.

    forgets: its files are moved into the quarantine first, since no record says what they must be.
    """

    asset: str
    key: str | None
    way: Way
    why: tuple[str, ...]
    path: Path | None = None
    forgets: bool = False

    def sentence(self) -> str:
        """What would be done, and why."""
        aside = " after moving its files into the quarantine" if self.forgets else ""
        return f"{self.asset} {self.key or ''}: {self.way.value}{aside}. {' '.join(self.why)}"


def plan_repairs(settings: Settings, found: Audit, *, failed: bool = False) -> list[Repair]:
    """What would put right what an audit found, first what needs no device; reads suspect files fully.

    failed: properties that ended as failed are tried again too.
    """
    descriptions, embeddings = found.assets
    by_partition: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    repairs: list[Repair] = []
    for problem in found.problems:
        if problem.key is not None:
            by_partition[problem.asset, problem.key].append(problem)
        elif problem.kind is Kind.STORE:
            repairs.append(Repair(problem.asset, None, Way.PUT_BACK, (problem.sentence,)))
        elif problem.kind is Kind.FOREIGN_FILE and problem.path:
            path = Path(problem.path)
            way = Way.SET_ASIDE if path.is_file() else Way.BY_HAND
            repairs.append(Repair(problem.asset, None, way, (problem.sentence,), path))
        elif problem.kind in (Kind.UNLISTED, Kind.WITHDRAWN):
            repairs.append(Repair(problem.asset, None, Way.BY_HAND, (problem.sentence,)))
    for (asset, key), problems in doing_each("reading the files of wrong partitions", by_partition.items()):
        folders = settings.layout.asset(asset)
        stored = StoredPartitions(folders, settings.store) if settings.store is not None else None
        repairs += _of_partition(PartitionFiles(folders, key), asset, problems, stored)
    repairs = _without_consequences(repairs, settings, descriptions, embeddings)
    repairs += _refused(found)
    if failed:
        taken = {one.key for one in repairs if one.asset == descriptions and one.way in COMPUTING}
        repairs += [
            _failed_again(one)
            for one in found.partitions
            if one.asset == descriptions and one.counts.failed and one.key not in taken
        ]
    return sorted(repairs, key=lambda one: (one.way in COMPUTING, one.asset, one.key or ""))


def _failed_again(one: PartitionAudit) -> Repair:
    """Try failed properties again. A stale partition would be described anew as a whole: a person asks."""
    why = f"{counted(one.counts.failed, 'properties')} failed."
    if one.state is State.STALE:
        anew = (
            f"{why} It is stale: a run would make it anew with the settings and the catalogue of now."
            f" {command('run', one.key)} does that for this partition, {command('run', '--stale')} for all"
            " that"
            " are stale."
        )
        return Repair(one.asset, one.key, Way.BY_HAND, (anew,))
    return Repair(one.asset, one.key, Way.RETRY_FAILED, (why,))


def _of_partition(
    files_: PartitionFiles, asset: str, problems: Sequence[Problem], stored: StoredPartitions | None
) -> Iterator[Repair]:
    kinds = {one.kind for one in problems}
    why = tuple(
        one.sentence
        for one in problems
        if (not one.kind.is_warning or one.kind in _WARNINGS_TO_REPAIR) and one.kind is not Kind.STORE
    )
    if Kind.JOURNAL in kinds:
        yield Repair(asset, files_.key, Way.BY_HAND, why)
    elif Kind.RECORD_BEHIND in kinds:
        yield Repair(asset, files_.key, Way.RESTORE, why)
    elif Kind.PUT_BACK in kinds:
        # A store may have the newest version still.
        yield Repair(asset, files_.key, Way.BY_HAND if stored is None else Way.RESTORE, why)
    elif Kind.RECORD in kinds:
        yield Repair(asset, files_.key, Way.COMPUTE, why, forgets=True)
    elif kinds & {Kind.VANISHED, Kind.UNRECORDED}:
        # A generation that was published once is closed: what is computed now is another one.
        closed = any(mark.retired for mark in read_marks(files_.paths.high_water_marks, files_.key))
        yield Repair(asset, files_.key, Way.COMPUTE if closed else Way.RESUME, why)
    elif kinds & _OF_THE_FILES:
        record = files_.peek()
        whole = files_.holds(files_.published, record)
        copy_whole = files_.holds(files_.slot(0), record)
        if Kind.PENDING in kinds or (copy_whole if not whole else not kinds & _OF_THE_ROWS):
            yield Repair(asset, files_.key, Way.RESTORE, why)
        elif not whole and record is not None and stored is not None and _may_have(stored, record):
            here = "Neither the file nor its second copy is whole; the store has it."
            yield Repair(asset, files_.key, Way.RESTORE, (*why, here))
        else:
            lost = () if whole else ("Neither the file nor its second copy is whole.",)
            yield Repair(asset, files_.key, Way.COMPUTE, (*why, *lost))
    elif Kind.DESCRIPTIONS_DIFFER in kinds:
        yield Repair(asset, files_.key, Way.COMPUTE, why)
    elif Kind.STORE_JOURNAL in kinds:
        yield Repair(asset, files_.key, Way.BY_HAND, why)
    if Kind.STORE in kinds:
        sentences = tuple(one.sentence for one in problems if one.kind is Kind.STORE)
        yield Repair(asset, files_.key, Way.PUT_BACK, sentences)


def _may_have(stored: StoredPartitions, record: PublishedRecord) -> bool:
    """Whether the store has a version's file. One that does not answer may have it."""
    try:
        return stored.has(record)
    except StoreError:
        return True


def _without_consequences(
    repairs: Sequence[Repair], settings: Settings, descriptions: str, embeddings: str
) -> list[Repair]:
    """Leave out sound embeddings that only look wrong beside descriptions that will be restored.

    Where descriptions are computed again, their embeddings follow in the same run anyway.
    """
    restored = {one.key for one in repairs if one.asset == descriptions and one.way is Way.RESTORE}
    kept = []
    for one in repairs:
        if one.asset == embeddings and one.way is Way.COMPUTE and one.key and one.key in restored:
            embedded = PartitionFiles(settings.embeddings, one.key)
            record = embedded.peek()
            described = PartitionFiles(settings.descriptions, one.key).peek()
            made_from = record.metadata.get("parts", {}).get(TEXTS) if record is not None else None
            descends = described is not None and made_from == described.metadata.get(TEXTS)
            if record is not None and descends and embedded.holds(embedded.published, record):
                continue
        kept.append(one)
    return kept


def _refused(found: Audit) -> Iterator[Repair]:
    """Partitions whose rows are all committed, and which a check kept from being published."""
    descriptions, _ = found.assets
    for one in found.partitions:
        if one.state is State.REFUSED:
            # The failed rows of descriptions are what can come out otherwise; of embeddings, any.
            way = Way.RETRY_FAILED if one.asset == descriptions else Way.COMPUTE
            why = f"Committed and not published: {counted(one.counts.expected, 'rows')}. A check refused."
            yield Repair(one.asset, one.key, way, (why,))


def put_right(settings: Settings, repair: Repair, *, newest_here: bool = False) -> list[str]:
    """Do the part of a repair that needs no device; says what was done.

    Nothing is deleted: what is damaged or foreign goes into the quarantine. newest_here: a person says that
    no other machine has anything newer than what a store lost. Raises PublishedError, OSError, CatalogError,
    StoreError.
    """
    asset = settings.layout.asset(repair.asset)
    if repair.way is Way.PUT_BACK and settings.store is not None:
        if repair.key is None:
            return put_back_catalog(settings.home, settings.store, newest_here=newest_here)
        done = StoredPartitions(asset, settings.store).put_back(repair.key, newest_here=newest_here)
        store_looks(settings)[repair.asset].forget(repair.key)
        return [*done] or [f"Partition {repair.key} of {repair.asset} is whole in {settings.store}."]
    if repair.way is Way.SET_ASIDE and repair.path is not None:
        return [f"{repair.path} was moved to {files.set_aside(repair.path, asset.quarantine)}."]
    if repair.key is None:
        return []
    published = PublishedPartitions(asset)
    if repair.forgets:
        return list(published.set_aside(repair.key))
    if repair.way is Way.RESTORE:
        store = settings.store
        fetch = StoredPartitions(asset, store).content_of if store is not None else None
        restoration = published.restore(repair.key, fetch)
        return [*restoration.notes] or [f"Partition {repair.key} of {repair.asset} is whole."]
    return []


@dataclass(frozen=True)
class Recomputation:
    """Partitions that are materialized alike. ways: by asset, upstream first."""

    ways: Mapping[str, Way]
    keys: tuple[str, ...]

    @property
    def assets(self) -> tuple[str, ...]:
        """The assets that are materialized together."""
        return tuple(self.ways)

    @property
    def run_config(self) -> dict[str, object]:
        """The run config of each partition's run; empty where finished work is kept as always."""
        options = {asset: _RUN_OPTIONS[way] for asset, way in self.ways.items() if way in _RUN_OPTIONS}
        if not options:
            return {}
        # Settings may change until the run begins: then its partition waits for a person.
        kept: dict[str, object] = {} if Way.COMPUTE in self.ways.values() else {"stale": KEEP}
        return {"ops": {asset: {"config": {option: True, **kept}} for asset, option in options.items()}}


def recomputations(repairs: Iterable[Repair], assets: Sequence[str]) -> list[Recomputation]:
    """Group repairs that compute by what is done to each partition.

    assets: those that runs make. New descriptions always take their embeddings with them.
    """
    of_key: dict[str, dict[str, Way]] = defaultdict(dict)
    for one in repairs:
        if one.way in COMPUTING and one.key is not None:
            of_key[one.key][one.asset] = one.way
    groups: dict[tuple[tuple[str, Way], ...], list[str]] = defaultdict(list)
    for key, ways in sorted(of_key.items()):
        if assets[0] in ways:
            ways = dict.fromkeys(assets, Way.RESUME) | ways
        if chosen := tuple((asset, ways[asset]) for asset in assets if asset in ways):
            groups[chosen].append(key)
    return [Recomputation(dict(ways), tuple(keys)) for ways, keys in groups.items()]


@dataclass(frozen=True)
class Loss:
    """A journal that cannot be opened without giving rows up; ``error`` says which, and where to look."""

    partition: Partition
    generation: str
    schema: pa.Schema
    error: JournalLossError | HeadDamagedError

    @property
    def lost_rows(self) -> int | None:
        """Committed rows that would have to be computed again; None where nobody can tell."""
        if isinstance(self.error, HeadDamagedError):
            return None
        return max(0, self.error.promised_rows - self.error.restorable_rows)


def find_losses(
    settings: Settings, catalog: Catalog, key: str, *, told: Callable[[str], None] = lambda said: None
) -> list[Loss]:
    """The losses of a partition, of either asset, under the settings of now; of the store too, if one is set.

    told: called with what was fetched from the store, and what is missing there.

    Raises CatalogError, InvalidRangeError, ModelLoadError, JournalError, StoreError.
    """
    store = settings.store
    if store is not None:
        for asset in (settings.descriptions, settings.embeddings):
            for said in StoredPartitions(asset, store).pull(key):
                told(said)
    losses: list[Loss] = []
    for partition, schema in _partitions(settings, catalog, PropertyRange.from_key(key)):
        record = PublishedPartitions(partition.paths.asset).record(key)
        damaged = dict(_damaged_heads(partition, record, store, told)) if store is not None else {}
        losses += [Loss(partition, generation, schema, error) for generation, error in damaged.items()]
        for generation in _generations(partition, record):
            if generation in damaged:
                continue
            try:
                partition.open_journal(generation, schema).close()
            except JournalLossError as error:
                losses.append(Loss(partition, generation, schema, error))
    return losses


def _damaged_heads(
    partition: Partition, record: PublishedRecord | None, store: S3Folder, told: Callable[[str], None]
) -> Iterator[tuple[str, HeadDamagedError]]:
    """Fetch what the store has of a partition's work; gives the generations of which nobody can tell."""
    published = record.metadata.get("generation") if record is not None else None
    for generation in stored_generations(partition.paths, store):
        if generation == published or not generation.startswith(partition.fingerprint.digest):
            continue
        try:
            for said in StoredJournal(partition.paths, generation, store).pull():
                told(said)
        except HeadDamagedError as error:
            yield generation, error


def accept_loss(loss: Loss, store: S3Folder | None) -> str:
    """Record that a person gives the rows up, and open the journal with what is left; says what that is.

    Returns when the store has it too: whichever machine starts the partition goes on with what is left.
    """
    rows = "rows that nobody can count" if loss.lost_rows is None else counted(loss.lost_rows, "rows")
    said = f"{getpass.getuser()} accepted the loss of {rows} in a repair"
    with ExitStack() as stack:
        copying = None
        if store is not None:
            stored = StoredJournal(loss.partition.paths, loss.generation, store)
            stored.pull(accept_missing=True)
            copying = stack.enter_context(Copying(stored, most_bytes=0))
        journal = stack.enter_context(
            loss.partition.open_journal(loss.generation, loss.schema, accept_loss=said)
        )
        if copying is not None:
            copying.begin(journal)
            copying.flush()
        return journal.recovery.sentence()


def _partitions(
    settings: Settings, catalog: Catalog, wanted: PropertyRange
) -> Iterator[tuple[Partition, pa.Schema]]:
    """The partition of each asset with the columns of its rows; embeddings only where they can be made."""
    from vlm_assets.assets.partition import Partition
    from vlm_assets.assets.property_descriptions import DescriptionWork
    from vlm_assets.assets.property_embeddings import EmbeddingWork

    described = DescriptionWork.for_range(settings, catalog, wanted, build_vision_language_model(settings))
    yield (
        Partition(settings, settings.descriptions.name, wanted.key, described.ids, described.fingerprint),
        described.rows_schema(),
    )
    try:
        rows = PublishedPartitions(settings.descriptions).read(wanted.key)
    except NotPublishedError:
        return
    if settings.embedding_model is None:
        return
    embedded = EmbeddingWork.for_range(catalog, wanted, rows, build_text_embedding_model(settings))
    yield (
        Partition(settings, settings.embeddings.name, wanted.key, embedded.ids, embedded.fingerprint),
        embedded.rows_schema(),
    )


def _generations(partition: Partition, record: PublishedRecord | None) -> Iterator[str]:
    """Generations of these settings that a start could open, from what is on disk."""
    digest = partition.fingerprint.digest
    marks = {mark.generation: mark for mark in read_marks(partition.paths.high_water_marks, partition.key)}
    journals = partition.paths.journals
    for generation in sorted({*marks, *(path.name for path in journals.glob("*") if path.is_dir())}):
        mark = marks.get(generation)
        # What was published and closed is never opened again while something is published.
        closed = record is not None and (
            record.metadata.get("generation") == generation or (mark is not None and mark.retired)
        )
        if generation.startswith(digest) and not closed:
            yield generation


_EXAMPLES = """\b
vlm-assets repair                   list what is wrong and what would be done
vlm-assets repair --deep --yes      read every byte, then do it
vlm-assets repair --failed --json   as JSON; nothing is changed without --yes"""


@app.command("repair", epilog=_EXAMPLES)
def repair_command(
    home: Home = None,
    deep: Deep = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Try the properties that ended as failed again, too.")
    ] = False,
    accept_loss: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Give up this partition's committed rows that cannot be restored."),
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Make this file, or object on S3, the catalogue. It is checked first.",
        ),
    ] = None,
    accept_version: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Let this partition's older version that was put back count as the newest."
        ),
    ] = None,
    newest_here: Annotated[
        bool,
        typer.Option(
            "--newest-here",
            help="Fill VLM_ASSETS_STORE, which lost files, from here: no other machine has newer ones.",
        ),
    ] = False,
    accept_settings: Annotated[
        bool,
        typer.Option(
            "--accept-settings",
            help="Let the next run over VLM_ASSETS_STORE say what all machines must have.",
        ),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """List what is wrong and what would put it right; then do it.

    A damaged file comes back from its second copy at once.
    What must be computed again is launched in the running Dagster; if none runs, it says what is not done.
    Nothing is deleted: what is damaged is kept in .quarantine.
    Exit code 1 if anything is wrong still.
    """
    current = chosen_settings(home)
    doing("looking at what is here")
    if catalog is not None:
        raise typer.Exit(_choose_catalog(current, catalog, yes))
    if accept_settings:
        if current.store is not None:
            forget_settings(current.store, (current.descriptions.name, current.embeddings.name))
        say("The next run says which settings, models and code all machines must have.")
        raise typer.Exit(0)
    if accept_version is not None:
        raise typer.Exit(_accept_version(current, accept_version, yes))
    if accept_loss is not None:
        if as_json:
            raise typer.BadParameter("--json and --accept-loss do not go together.")
        raise typer.Exit(_accept_loss(current, accept_loss, yes))

    found = audit(current, Catalog.open(current.home), deep=deep)
    repairs = plan_repairs(current, found, failed=failed)
    if as_json:
        said: list[str] = []
        right = (
            _repair(current, found, repairs, said.append, newest_here)
            if repairs and yes
            else found.ok and not repairs
        )
        planned = [
            {"asset": one.asset, "key": one.key, "way": one.way.name, "why": one.why, "path": one.path}
            for one in repairs
        ]
        say_as_json(
            {"right": right, "verdict": found.verdict(), "repairs": planned, "done": yes, "said": said}
        )
        raise typer.Exit(0 if right else 1)
    if not repairs:
        say(found.verdict() if found.ok else "Nothing here can be put right by itself.")
        if found.ok:
            say("Nothing to repair.")
        raise typer.Exit(0 if found.ok else 1)
    say_list([one.sentence() for one in repairs], "yellow")
    if not agreed(f"Do this ({counted(len(repairs), 'repairs')})?", yes):
        raise typer.Exit(1)
    raise typer.Exit(0 if _repair(current, found, repairs, say, newest_here) else 1)


def _repair(
    current: Settings,
    found: Audit,
    repairs: Sequence[Repair],
    tell: Callable[[str], None],
    newest_here: bool,
) -> bool:
    """Do the repairs; returns whether all are done."""
    holders = build_gpu(current).leases().holders()
    running = {held.record.holder.partition for held in holders if held.record}
    for key in sorted({one.key for one in repairs if one.key in running}):
        tell(f"{key} is left to the run that works on it now; look again when it has ended.")
    left = [one for one in repairs if one.key not in running]
    now = [one for one in left if one.way not in COMPUTING or one.forgets]
    done = _put_right(current, now, tell, newest_here)
    computed = _compute(current, found, [one for one in left if one.way in COMPUTING], tell)
    return done and computed and len(left) == len(repairs)


def _put_right(
    current: Settings, repairs: Sequence[Repair], tell: Callable[[str], None], newest_here: bool
) -> bool:
    done = True
    for one in doing_each("putting right", repairs):
        try:
            for sentence in put_right(current, one, newest_here=newest_here):
                tell(sentence)
        except (PublishedError, CatalogError, StoreError, OSError) as error:
            done = False
            tell(f"Not repaired: {one.asset} {one.key or one.path}: {error}")
        done = done and one.way is not Way.BY_HAND
    return done


def _compute(current: Settings, found: Audit, repairs: Sequence[Repair], tell: Callable[[str], None]) -> bool:
    if not repairs:
        return True
    wanted = recomputations(repairs, current.computed_assets)
    address = running_address(current.dagster_home)
    if address is None:
        keys = sample({key for one in wanted for key in one.keys})
        tell(
            f"Not computed, for no Dagster runs on this home: {keys}. {command('serve')}, then repair again."
        )
        return False
    for one in wanted:
        backfill = DagsterApi(address, current.dagster_home).launch_backfill(
            one.assets,
            one.keys,
            title=f"repair: {counted(len(one.keys), 'partitions')}",
            tags={LAUNCHED_BY: "repair"},
            run_config=one.run_config,
        )
        tell(
            f"Launched backfill {backfill} of {counted(len(one.keys), 'partitions')}"
            f" ({', '.join(one.assets)}):"
            f" {address}/runs/b/{backfill}"
        )
    return True


def _choose_catalog(current: Settings, place: str, yes: bool) -> int:
    doing(f"comparing {place} with what was published")
    chosen = check_catalog(current.home, place, current.store)
    for sentence in chosen.sentences():
        say(sentence)
    if not agreed(f"Make it the catalogue of {current.home}?", yes):
        return 1
    header = put_in_place(current.home, chosen, current.store)
    say(
        f"It is the catalogue now, as ingest {header.sequence}. What stood there is kept in"
        f" {quarantine(current.home)}."
    )
    return 0


def _accept_loss(current: Settings, key: str, yes: bool) -> int:
    working = [one for one in Workers(control_state(current)).living() if one.partition == key]
    if working:
        say(f"Run {working[0].run_id} works on {key} on {working[0].host}. Nothing was changed.")
        return 1
    pull_catalog(current.home, current.store)
    losses = find_losses(current, Catalog.open(current.home), key, told=say)
    if not losses:
        say(f"Nothing of {key} is lost under these settings: a start goes on with all that is committed.")
        return 0
    for loss in losses:
        error = loss.error
        if isinstance(error, HeadDamagedError):
            say(f"{loss.partition.asset} {key} (generation {loss.generation}): {error}", bold=True)
            continue
        say(
            f"{loss.partition.asset} {key} (generation {loss.generation}): {loss.lost_rows} of"
            f" {counted(error.promised_rows, 'committed rows')} cannot be restored; {error.restorable_rows}"
            " can.",
            bold=True,
        )
        say_list([f"missing: {reason}" for reason in error.reasons], "yellow")
        copies = ", ".join(map(str, error.copies)) or "none that the journal knows of"
        say(f"Copies to look at first: {copies}")
    if not agreed("Give these rows up? They are computed again at the next start.", yes):
        return 1
    for loss in losses:
        say(accept_loss(loss, current.store))
    return 0


def _accept_version(current: Settings, key: str, yes: bool) -> int:
    working = [one for one in Workers(control_state(current)).living() if one.partition == key]
    if working:
        say(f"Run {working[0].run_id} works on {key} on {working[0].host}. Nothing was changed.")
        return 1
    older = list(_older_versions(current, key))
    if not older:
        say(f"{key} was not put back to an older version: there is nothing to accept.")
        return 0
    say_list([sentence for _, sentence in older], "yellow")
    if not agreed("Let the older version count as the newest? What came after it is given up.", yes):
        return 1
    for one, _ in older:
        for sentence in one.accept_older(key):
            say(sentence)
    return 0


def _older_versions(
    current: Settings, key: str
) -> Iterator[tuple[PublishedPartitions | StoredPartitions, str]]:
    """Where an older version stands, here or in the store, in place of one that was here; a sentence each."""
    for asset in (current.descriptions, current.embeddings):
        published = PublishedPartitions(asset)
        if current.store is not None and not published.verify(key).ok:
            stored = StoredPartitions(asset, current.store)
            try:
                stored.pull(key)
            except OlderInStoreError as error:
                yield stored, str(error)
                continue
            except PublishedError:
                pass  # What stands here is the newer one, or all that there is.
        findings = {finding.kind: finding.sentence for finding in published.verify(key).findings}
        if FindingKind.PUT_BACK in findings:
            yield published, findings[FindingKind.PUT_BACK]
