"""The triage: where each partition stands, what is left of it, in which order it runs, what happens next.

Put together from what the disk says: Dagster need not run. ``status_view.py`` shows it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime

from resources.alerts.outbox import Outbox
from sensors.cancels import Cancel, Cancels
from sensors.retry_ledger import Attempts, DoneAgain, Entry, done_again_since
from vlm_assets.assets.partition_state import PartitionState, PartitionStates, State
from vlm_assets.assets.published_rows import FailedRow, PublishedRows, first_failed, unpublished_failures
from vlm_assets.config.extensions import KnownDevice, StatusTable, installed, launcher_of
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.expected_cost import ExpectedCost, SetProgress, measure, share_asked
from vlm_assets.services.kept_assets import kept_assets, removed_set_finding
from vlm_assets.services.stale_work import StaleWork, stale_work
from vlm_assets.services.store_looks import store_troubles
from vlm_assets.webserver.home import running_address
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import withdrawal_note
from vlm_catalog.ranges import DESCRIPTIONS, EMBEDDINGS
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import pause_of
from vlm_durable.state.rate import Rate
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.workers import Phase, Worker, Workers
from vlm_durable.versions.findings import Finding
from vlm_durable.versions.partition_findings import stray_files
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_durable.wording import counted
from vlm_engine.devices.find import DeviceError, is_cpu_slot
from vlm_engine.devices.left_out import LeftOutDevices
from vlm_engine.model_source import NO_EMBEDDER

WAITING = frozenset({State.INTERRUPTED, State.FAILED, State.REFUSED, State.DAMAGED, State.NOT_STARTED})
"""States of partitions that still have to run, and need no person first."""

_NOTHING_LEFT = frozenset({State.DONE, State.STALE, State.LOST, State.DAMAGED})
"""No image is to be described: a damaged partition is restored from its second copy, without a device."""

DAY_SECONDS = 24 * 3600.0

_UNFINISHED = frozenset({State.INTERRUPTED, State.NOT_STARTED, State.REFUSED, State.DAMAGED})
"""States in which a partition's retries and cancels count."""


@dataclass(frozen=True)
class RetryNotes:
    """What the retries know: attempts, cancels, what came right. unread: why that cannot be read."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    cancelled: Mapping[str, Cancel] = field(default_factory=dict)
    done_again: tuple[DoneAgain, ...] = ()
    unread: tuple[str, ...] = ()

    @classmethod
    def read(cls, state: ControlState, *, since: float) -> RetryNotes:
        """What stands in the control state. since: unix seconds, from which on it tells what came right."""
        try:
            return cls(Attempts(state).read(), Cancels(state).read(), tuple(done_again_since(state, since)))
        except ControlStateError as error:
            return cls(unread=(str(error),))

    def beside(self, partition: PartitionState) -> PartitionState:
        """The state of an unfinished partition with what the retries know of it."""
        entry = self.entries.get(partition.key, Entry(partition.key))
        if partition.state not in _UNFINISHED:
            return partition
        if partition.key in self.cancelled:
            note = "a person cancelled it: it is launched by hand only"
            return replace(partition, state=State.CANCELLED, note=note)
        times = "once" if entry.attempts == 1 else counted(entry.attempts, "times")
        failed = f"failed {times} in a row without progress" if entry.attempts else "its last run failed"
        because = f", because {entry.why}" if entry.why else ""
        if entry.given_up or entry.needs_person(partition.asset):
            next_step = (
                f"It is not tried again by itself: put that right, then {command('run', partition.key)}"
            )
            note = f"{failed}{because}. {next_step}"
            if partition.state is State.REFUSED:
                note = str(partition.note)  # It says more than the run's error does, and what to do.
            return replace(partition, state=State.GIVEN_UP, note=f"needs you: {note}")
        if not entry.attempts and (entry.reckoned is None or entry.requested is not None):
            return partition
        if entry.not_before:
            again = datetime.fromtimestamp(entry.not_before).astimezone().isoformat(" ", "minutes")
            failed = f"{failed}; tried again after {again}"
            if entry.interruptions and not entry.attempts:
                # No failure of the partition: its state stays.
                return replace(
                    partition, note=f"its last run was interrupted; tried again after {again}{because}"
                )
        return replace(partition, state=State.FAILED, note=f"{failed}{because}")


@dataclass(frozen=True)
class PartitionStatus:
    """One partition of one asset. rows: published, or else committed; expected: of the catalogue.

    images_left: of a question set; None of embeddings, which cost next to nothing. turn: 1 runs first, None
    if it does not wait. is_complete: as in PartitionState.
    """

    asset: str
    key: str
    state: State
    rows: int
    expected: int
    images_left: int | None = None
    turn: int | None = None
    note: str | None = None
    is_complete: bool = False

    @property
    def percent(self) -> float:
        """How much of it is computed."""
        return 100.0 * self.rows / self.expected

    @property
    def usable_rows(self) -> int:
        """Rows that count as done: published or on the way there, not those that a check keeps back."""
        is_going_on = self.is_complete or self.state in (State.RUNNING, State.INTERRUPTED)
        return 0 if self.rows == self.expected and not is_going_on else self.rows


@dataclass(frozen=True)
class DeviceStatus:
    """One device. is_here: of the devices of these settings on this machine, a CPU slot of it, or at work.

    partition: what it works on now. rows: published descriptions that it made. properties_per_second: its
    share of the data set's rate; None if it made none in that time. left_out: the sentence that says why;
    None if it is used. node: of a cluster, where it is, and trouble: what speaks against it or its node;
    temperature: degrees Celsius.
    """

    id: str
    is_here: bool
    partition: str | None
    rows: int
    properties_per_second: float | None
    left_out: str | None
    node: str | None = None
    temperature: int | None = None
    trouble: str = ""


@dataclass(frozen=True)
class SetStatus:
    """What is published of one question set, and its pace. The fields are as in ``Status``.

    not_asked: properties that the set's condition leaves out. Where it has one, seconds_left takes the share
    that was asked until now.
    """

    asset: str
    ok: int
    failed_by_kind: Mapping[str, int]
    first_failed: tuple[FailedRow, ...]
    properties_per_second: float | None
    seconds_left: float | None
    not_asked: int = 0


@dataclass(frozen=True)
class Status:
    """The whole dataset at one moment (``at``, unix seconds).

    waiting_in_tail: properties that are in no partition yet, for they are too few to fill one.
    assets: those that runs make, in their order. failed_by_kind, first_failed: published rows of properties
    that could not be described. properties_per_second: of all devices together, as in ``state/rate.py``;
    all three are of the first question set, and ``further`` has the others. seconds_left: until all sets
    are done, of which the slowest counts: sets of one model are asked together. done_again: what was tried
    again by itself and came right since ``done_again_since`` (unix seconds), oldest first. open_alerts:
    titles of what was told and is not right again, oldest first. paused, dagster: since when and why it is
    paused, and where Dagster runs; None where not. warnings: what could not be read. stale_unknown: the
    sentences among them that say why nobody knows which partitions of an asset are stale. stale: what is,
    why, and what making it anew takes. findings: what of it is wrong, or worth knowing, on disk and in the
    store, as the audit lists it; notes, warnings and next steps say the same for people. extensions: what
    each that is installed tells. uncopied: committed segments that wait for the store; uncopied_seconds: how
    long the oldest of them does.
    """

    home: str
    at: float
    properties: int
    waiting_in_tail: int
    assets: tuple[str, ...]
    partitions: tuple[PartitionStatus, ...]
    ok: int
    failed_by_kind: Mapping[str, int]
    first_failed: tuple[FailedRow, ...]
    devices: tuple[DeviceStatus, ...]
    properties_per_second: float | None
    seconds_left: float | None
    done_again_since: float
    done_again: tuple[DoneAgain, ...]
    open_alerts: tuple[str, ...]
    paused: str | None
    dagster: str | None
    warnings: tuple[str, ...]
    next_steps: tuple[str, ...]
    published: Mapping[str, PublishedRows] = field(repr=False)
    stale: StaleWork
    findings: tuple[Finding, ...] = ()
    further: tuple[SetStatus, ...] = ()
    stale_unknown: tuple[str, ...] = ()
    extensions: tuple[StatusTable, ...] = ()
    uncopied: int = 0
    uncopied_seconds: float = 0.0

    def counts(self, asset: str) -> Counter[State]:
        """Partitions of an asset in each state."""
        return Counter(partition.state for partition in self.partitions if partition.asset == asset)

    def keys_left(self, *, stale_too: bool = False) -> frozenset[str]:
        """Partitions that are not complete in each asset. stale_too: or that would come out otherwise now."""
        stale = self.stale_keys if stale_too else frozenset[str]()
        return stale.union(partition.key for partition in self.partitions if not partition.is_complete)

    @property
    def stale_keys(self) -> frozenset[str]:
        """Partitions that are stale in either asset."""
        stale = (partition for partition in self.partitions if partition.state is State.STALE)
        return frozenset(partition.key for partition in stale)

    @property
    def order(self) -> list[PartitionStatus]:
        """What waits, in the order in which it will run."""
        waiting = [partition for partition in self.partitions if partition.turn is not None]
        return sorted(waiting, key=lambda partition: partition.turn or 0)

    def as_json(self) -> dict[str, object]:
        """Everything, for machines."""
        content = asdict(replace(self, published={}))
        del content["published"]
        partitions = [
            asdict(partition) | {"percent": round(partition.percent, 2)} for partition in self.partitions
        ]
        return content | {"partitions": partitions}


def read_status(
    settings: Settings,
    catalog: Catalog,
    *,
    since: float | None = None,
    advance: Callable[[int, int], None] = lambda done, partitions: None,
) -> Status:
    """Read the status of a home; which files it has verified is noted. Raises CatalogError, OSError.

    since: unix seconds, from which on it tells what was tried again and came right; a day ago unless given.
    advance: told how many of the partitions were looked at.
    """
    state = control_state(settings)
    now = time.time()
    since = now - DAY_SECONDS if since is None else since
    workers = [worker for worker in Workers(state).living() if worker.partition]
    notes = RetryNotes.read(state, since=since)
    verified = VerifiedFiles(settings.state_directory)
    stored = store_troubles(settings)
    reader = PartitionStates(settings, catalog, verified=verified, stored=stored.sentences)
    computed = settings.computed_assets
    states = [
        notes.beside(_with_failures(settings, state))
        for state in reader.all(advance)
        if state.asset in computed
    ]
    verified.save()
    cost = ExpectedCost.from_catalog(settings, catalog)
    sets = [
        _Asked.from_states(settings, asked.asset, states, workers, cost, now)
        for asked in question_sets(settings)
    ]
    first = sets[0]
    partitions = (
        *_with_turns([partition for asked in sets for partition in asked.partitions], cost),
        *(_status_of(state) for state in states if state.asset == settings.embeddings.name),
    )
    devices, unread = _devices(settings, workers, first.published, first.progress.rate)
    open_alerts, untold = tuple[str, ...](), []
    try:
        open_alerts = tuple(alert.title for alert in Outbox(state).open_subjects().values())
    except OSError as error:
        untold.append(f"The alerts cannot be read: {error}")
    pause = pause_of(state)
    paused = pause.sentence() if pause else None
    dagster = running_address(settings.dagster_home)
    keys = frozenset(range_.key for range_ in catalog.ranges)
    strays = [finding for asset in settings.partitioned_assets for finding in stray_files(asset, keys)]
    removed = [
        removed_set_finding(asset)
        for asset in kept_assets(settings)
        if asset not in settings.partitioned_assets
    ]
    stale_unknown = tuple(
        f"Whether {name} are stale is unknown: {trouble}"
        for name in computed
        if (trouble := reader.meanings.of_asset(name).trouble)
    )
    if verified.unread:
        untold.append(
            f"{counted(verified.unread, 'published files are', 'published file is')} not read yet: look"
            " again."
        )
    if withdrawal_note(settings.state_directory).exists():
        untold.append(
            f"A withdrawal was cut short, so what it should remove is not all gone: {command('withdraw')}."
        )
    apart = (*strays, *stored.unread)
    sentences = (finding.text for finding in apart)
    warnings = (*unread, *untold, *notes.unread, *sentences, *stale_unknown)
    return Status(
        home=str(settings.home),
        at=now,
        properties=catalog.rows,
        waiting_in_tail=catalog.waiting,
        assets=computed,
        partitions=partitions,
        ok=first.status.ok,
        failed_by_kind=first.status.failed_by_kind,
        first_failed=first.status.first_failed,
        devices=devices,
        properties_per_second=first.status.properties_per_second,
        seconds_left=_longest(asked.status.seconds_left for asked in sets),
        further=tuple(asked.status for asked in sets[1:]),
        uncopied=sum(worker.uncopied for worker in workers),
        uncopied_seconds=max((worker.uncopied_seconds for worker in workers), default=0.0),
        done_again_since=since,
        done_again=notes.done_again,
        open_alerts=open_alerts,
        paused=paused,
        dagster=dagster,
        warnings=warnings,
        stale_unknown=stale_unknown,
        next_steps=_next_steps(
            partitions,
            catalog.waiting,
            open_alerts,
            paused,
            # It is not known whether that of somebody else's project runs.
            dagster or settings.names.prefix or None,
            is_well=not warnings,
        )
        + tuple(finding.text for finding in removed)
        + (() if settings.embedding_model is not None else (NO_EMBEDDER,)),
        published=first.published,
        findings=(*(finding for state in states for finding in state.findings), *apart, *removed),
        stale=stale_work(
            settings, states, {asked.status.asset: asked.progress for asked in sets}, reader.meanings
        ),
        extensions=tuple(
            table for extension in installed() if (table := extension.status(settings)) is not None
        ),
    )


@dataclass(frozen=True)
class _Asked:
    """One question set of a home: its partitions, and what stands in its published files."""

    status: SetStatus
    partitions: Sequence[PartitionStatus]
    published: Mapping[str, PublishedRows]
    progress: SetProgress

    @classmethod
    def from_states(
        cls,
        settings: Settings,
        asset: AssetFolders,
        states: Sequence[PartitionState],
        workers: Sequence[Worker],
        cost: ExpectedCost,
        now: float,
    ) -> _Asked:
        own = [state for state in states if state.asset == asset.name]
        # A damaged file's rows are not counted: its state says so, and the audit says what is wrong.
        records = {
            state.key: state.record for state in own if state.record and state.state is not State.DAMAGED
        }
        published = {
            key: rows for key, record in records.items() if (rows := PublishedRows.from_record(record))
        }
        working = [worker for worker in workers if worker.asset == asset.name]
        rows_of = published.values()
        progress = SetProgress(measure(rows_of, working, now), {}, share_asked(rows_of))
        partitions = _with_cost([_status_of(state) for state in own], working, cost)
        failed = Counter[str]()
        for rows in published.values():
            failed.update(rows.failed)
        status = SetStatus(
            asset=asset.name,
            ok=sum(rows.ok for rows in published.values()),
            not_asked=sum(rows.not_asked for rows in published.values()),
            failed_by_kind=dict(failed.most_common()),
            first_failed=first_failed(asset, published),
            properties_per_second=progress.rate.per_second,
            seconds_left=progress.seconds_left(
                {
                    partition.key: partition.expected - partition.usable_rows
                    for partition in partitions
                    if not partition.is_complete
                }
            ),
        )
        return cls(status, partitions, published, progress)


def _longest(seconds: Iterable[float | None]) -> float | None:
    """None where one of them is unknown."""
    durations = list(seconds)
    return None if None in durations else max(each for each in durations if each is not None)


def _with_failures(settings: Settings, state: PartitionState) -> PartitionState:
    """A refused partition with its failed rows named."""
    if state.state is not State.REFUSED or state.asset == settings.embeddings.name:
        return state
    failures = unpublished_failures(settings.layout.asset(state.asset).partition(state.key))
    if not failures.failed:
        return state
    return replace(state, note=f"{str(state.note).rstrip('.')}. {failures.sentence()}")


def _with_cost(
    described: Sequence[PartitionStatus], describing: Sequence[Worker], cost: ExpectedCost
) -> list[PartitionStatus]:
    """The partitions of a question set with the images that are left of each."""
    at_work = {worker.partition: worker for worker in describing}
    partitions = []
    for partition in described:
        worker = at_work.get(partition.key)
        note, rows = partition.note, partition.rows
        if worker is not None:
            note, rows = f"{worker.phase} on {worker.device or 'no device yet'}", worker.committed
        images_left = 0 if partition.state in _NOTHING_LEFT else cost.left_after(partition.key, rows)
        partitions.append(replace(partition, rows=rows, note=note, images_left=images_left))
    return partitions


def _with_turns(partitions: Sequence[PartitionStatus], cost: ExpectedCost) -> list[PartitionStatus]:
    """The partitions of all question sets with their turns: a run is of all sets of a key."""
    images_left: dict[str, int] = {}
    for partition in partitions:
        if partition.state in WAITING:
            images_left[partition.key] = max(images_left.get(partition.key, 0), partition.images_left or 0)
    order = sorted(images_left, key=lambda key: (-images_left[key], -cost.whole[key], key))
    turns = {key: number for number, key in enumerate(order, start=1)}
    return [
        replace(partition, turn=turns[partition.key]) if partition.state in WAITING else partition
        for partition in partitions
    ]


def _status_of(state: PartitionState) -> PartitionStatus:
    return PartitionStatus(
        state.asset,
        state.key,
        state.state,
        state.rows,
        state.expected,
        note=state.note,
        is_complete=state.is_complete,
    )


def _devices(
    settings: Settings, workers: Sequence[Worker], published: Mapping[str, PublishedRows], rate: Rate
) -> tuple[tuple[DeviceStatus, ...], tuple[str, ...]]:
    """Every device that is here, works, or has worked; and what could not be read."""
    state = control_state(settings)
    known: Sequence[KnownDevice] = ()
    try:
        known, warnings = launcher_of(settings).devices(settings)
    except (DeviceError, ControlStateError) as error:
        warnings = (f"The devices cannot be read: {error}",)
    by_id: dict[str, KnownDevice] = {}
    for device in known:
        by_id.setdefault(device.id, device)
    left_out = LeftOutDevices(state).left_out()
    # Who publishes may have given its device back: another that names it works on it.
    by_phase = sorted(workers, key=lambda worker: worker.phase is not Phase.PUBLISHING)
    at_work = {worker.device: worker for worker in by_phase if worker.device}
    rows: Counter[str] = Counter()
    for of_file in published.values():
        for stretch in of_file.stretches:
            rows[stretch.device] += stretch.rows
    devices = []
    for id_ in dict.fromkeys((*by_id, *at_work, *left_out, *sorted(rows))):
        worker = at_work.get(id_)
        device = by_id.get(id_, KnownDevice(id_, is_here=False))
        devices.append(
            DeviceStatus(
                id=id_,
                is_here=device.is_here or worker is not None or is_cpu_slot(id_),
                partition=worker.partition if worker else None,
                rows=rows[id_],
                properties_per_second=rate.of_device(id_),
                left_out=left_out[id_].sentence(id_) if id_ in left_out else None,
                node=device.node,
                temperature=device.temperature,
                trouble=device.trouble,
            )
        )
    return tuple(devices), warnings


def _next_steps(
    partitions: Sequence[PartitionStatus],
    waiting_in_tail: int,
    open_alerts: Sequence[str],
    paused: str | None,
    dagster: str | None,
    *,
    is_well: bool,
) -> tuple[str, ...]:
    """What happens by itself, and what a person has to do. is_well: whether nothing else is wrong."""
    # A partition that is stale in both assets is one.
    of_state = Counter(
        state
        for state, _ in {
            (partition.state, (partition.key, partition.state is not State.STALE and partition.asset))
            for partition in partitions
        }
    )
    steps = [f"{of_state[state]} {step}" for state in State if of_state[state] and (step := _step(state))]
    if waiting_in_tail:
        steps.append(
            f"In no partition yet: {waiting_in_tail}, too few to fill one;"
            f" {command('run', '--missing')} does not wait."
        )
    if open_alerts:
        latest = f"Open alerts: {len(open_alerts)}, the latest: {open_alerts[-1]}. {command('alerts')}."
        steps.insert(0, latest)
    if paused:
        steps.insert(0, f"Nothing is started: {paused}.")
    waiting = [partition for partition in partitions if partition.turn]
    if waiting:
        first = min(waiting, key=lambda partition: partition.turn or 0)
        keys = {partition.key for partition in waiting}
        steps.append(f"To be described, the heaviest first: {len(keys)}, beginning with {first.key}.")
    described = {
        partition.key for partition in partitions if partition.asset == DESCRIPTIONS and partition.is_complete
    }
    to_embed = [
        partition
        for partition in partitions
        if partition.asset == EMBEDDINGS and partition.key in described and not partition.is_complete
    ]
    if to_embed:
        steps.append(
            f"{len(to_embed)} described and not embedded yet, or embedded from earlier texts: little work,"
            " whenever they are launched."
        )
    if partitions and not waiting_in_tail and all(partition.state is State.DONE for partition in partitions):
        if is_well and not open_alerts:
            steps.append(f"Everything is published; {command('audit', '--deep')} proves it.")
    elif dagster is None and not all(partition.is_complete for partition in partitions):
        steps.append(f"No Dagster of `vlm-assets` runs on this home: {command('run')} goes on with it.")
    return tuple(steps)


def _step(state: State) -> str | None:
    """What happens to partitions in a state, or what a person does about them."""
    steps = {
        State.INTERRUPTED: "interrupted: the next run of each goes on from what is committed.",
        State.FAILED: "failed: the schedule tries them again by itself.",
        State.GIVEN_UP: f"given up: put right what each says above, then {command('run', '--failed')}.",
        State.CANCELLED: "cancelled by a person: they wait until they are launched by hand.",
        State.REFUSED: "refused by a check: failures that may pass are tried again; of others, put right what"
        f" each says above, then {command('run', '--failed')}.",
        State.DAMAGED: f"damaged: {command('repair')} puts them back.",
        State.LOST: f"lack committed rows: put their files back, or give the rows up: {command('repair')}.",
        State.STALE: "stale: made with another catalogue, settings or texts than now. They stay readable;"
        f" {command('run', '--stale')} makes them anew, {command('run', 'KEY')} one of them.",
    }
    return steps.get(state)
