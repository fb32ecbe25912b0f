"""What a run watches while it works on a partition: its progress, a pause, and whether the images are there.

Percent, rate and time left are events (Dagster asset observations) and log lines of the run. The pause is
read at the start and at each batch; it is set in ``vlm_durable/state/pause.py``. A few images that are gone
are failed rows; a disk or a store that is away is waited for, because it would make a failed row of every
property.

A run that starts while paused waits. If it ended instead, a backfill's whole queue would go through the
devices in minutes and leave a failed run for each partition. No more runs wait than there are devices, each
with a process but without a device and a model. All others stay queued, and when the pause is lifted
everything goes on by itself. A run that is already at work commits and ends, so that its device is free:
Dagster retries it like an interrupted run, and the retry waits like any other start.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from resources.dagster_names import NO_ATTEMPT, is_tagged, tag_value
from sensors.dagster_internals.instance_needs import without_waiting
from vlm_assets.assets import markdown
from vlm_assets.assets.markdown import Markdown
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.commands import command
from vlm_durable.journal.journal import Journal
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import Pause, pause_of, paused_nodes
from vlm_durable.state.rate import rate_of
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.workers import Phase, WorkerBeat, Workers
from vlm_engine.describing import Spent
from vlm_engine.devices.leases import Clock
from vlm_engine.ladder import Described
from vlm_engine.protocol import Engine, WaitingEngine

INTERVAL_SECONDS = 30.0
"""The time between two events: short enough to watch, long enough that weeks of them fit the event log."""


_LOOK_SECONDS = 1.0
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_WAIT_LOOK_SECONDS = 5.0

PROBES = 2000
"""The most images of a range that are tried, evenly spread, until one can be read."""

WHOLE_RANGE = 40
"""A range with as many properties or more that lost every image: the disk is missing, not the images."""

_OTHER_RANGES = 16
_LOST = frozenset({"missing", "denied", "io_error"})
_LOST_FOR_NOW = frozenset({"missing", "denied"})
"""Kinds that end when the file can be opened again. A bad sector (``io_error``) does not."""

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_working: set[str] = set()
"""Runs that have begun to work in this process, and may hold a device."""


def wait_while_paused(context: dg.AssetExecutionContext, state: ControlState) -> None:
    """Return when nothing is paused. A run that has worked already ends instead, as ``end_if_paused`` does.

    There is no event to wait for: the pause may come from another machine. A control state that cannot be
    read is waited for too: it may hold a pause.
    """
    standing = _pause_or_trouble(state)
    if standing is None:
        return
    if isinstance(standing, Pause) and (standing.node is not None or context.run.run_id in _working):
        _end(context, standing)  # If the pause is of one node, another node takes the partition at once.
    reason = standing.sentence() if isinstance(standing, Pause) else str(standing)
    context.log.warning(f"Waiting, without a device: {reason}.")
    while _pause_or_trouble(state) is not None:
        time.sleep(_LOOK_SECONDS)
    context.log.info("Nothing is paused any more: going on.")


def wait_until_available(
    context: dg.AssetExecutionContext,
    settings: Settings,
    find: Callable[[], _T],
    *,
    unavailable: type[Exception],
    title: str,
    assets: Collection[str] = (),
    clock: Clock = time,
) -> _T:
    """Return what ``find`` gives, once nothing is paused and it no longer raises ``unavailable``.

    The run waits as it does for a device, and holds none meanwhile, so that a backfill's queue does not run
    through. After ``device_wait_seconds`` it raises ``unavailable``, with ``title`` before its sentence. That
    does not count as an attempt at the partition of these assets, or of all that the run has not made yet.
    """
    state = control_state(settings)
    wait_while_paused(context, state)
    deadline = clock.monotonic() + settings.device_wait_seconds
    wait = _FIRST_WAIT_SECONDS
    while True:
        try:
            return find()
        except unavailable as error:
            seconds_left = deadline - clock.monotonic()
            if seconds_left <= 0:
                note_run(context, NO_ATTEMPT, assets)
                raise unavailable(
                    f"{title}: waited {settings.device_wait_seconds:.0f} s, and {error}"
                ) from error
            if wait == _FIRST_WAIT_SECONDS:
                reason = str(error).rstrip(".")
                context.log.warning(f"Waiting, without a device, up to {seconds_left:.0f} s: {reason}.")
        clock.sleep(min(wait, seconds_left))
        wait = min(wait * 2, _LONGEST_WAIT_SECONDS)
        wait_while_paused(context, state)


def wait_for_store(
    context: dg.AssetExecutionContext,
    settings: Settings,
    find: Callable[[], _T],
    title: str = "No store to work from",
    assets: Collection[str] = (),
) -> _T:
    """Return what ``find`` gives, once the store answers. See ``wait_until_available``."""
    return wait_until_available(
        context, settings, find, unavailable=StoreAwayError, title=title, assets=assets
    )


def note_run(context: dg.AssetExecutionContext, tag: str, assets: Collection[str] = ()) -> None:
    """Tag the run. NO_ATTEMPT: it says nothing of the partition. NEEDS_PERSON: a new start ends alike.

    assets: those that it holds for; without any, all that the run has not made.
    """
    run_id = context.run.run_id
    value = tag_value(run_id, assets, before=_tag_of_run(context, tag))
    context.instance.add_run_tags(run_id, {tag: value})


def is_noted(context: dg.AssetExecutionContext, tag: str, assets: Collection[str]) -> bool:
    """Whether the run is tagged so for each of these assets."""
    return is_tagged(_tag_of_run(context, tag), context.run.run_id, assets)


def _tag_of_run(context: dg.AssetExecutionContext, tag: str) -> str | None:
    run = context.instance.get_run_by_id(context.run.run_id)
    return None if run is None else run.tags.get(tag)


def end_if_paused(context: dg.AssetExecutionContext, state: ControlState) -> None:
    """Raise DagsterExecutionInterruptedError where a pause stands: what is submitted will be committed.

    Work goes on where the control state cannot be read: rows are committed without it.
    """
    standing = _pause_or_trouble(state)
    if isinstance(standing, Pause):
        _end(context, standing)
    if standing is not None:
        # Not through Dagster: its database is the same one, and the run would wait for it with a device.
        _log.warning("A pause would not be noticed now: %s", standing)


def _pause_or_trouble(state: ControlState) -> Pause | ControlStateError | None:
    try:
        of_node = paused_nodes(state).get(socket.gethostname()) if state.is_shared else None
        return of_node or pause_of(state)
    except ControlStateError as error:
        return error


def _end(context: dg.AssetExecutionContext, pause: Pause) -> None:
    message = f"Interrupted, with all finished rows committed: {pause.sentence()}."
    context.log.warning(message)
    raise dg.DagsterExecutionInterruptedError(message)


class DeviceWait:
    """Waits for a device for as long as the runs that have them work, and no longer than until a pause.

    Every few seconds it says in the heartbeat that it waits: a process that hangs while it looks at a device
    stops saying so, and counts as stuck.
    """

    def __init__(self, context: dg.AssetExecutionContext, beat: WorkerBeat, state: ControlState) -> None:
        self._context, self._beat, self._state = context, beat, state
        self._next_look = -math.inf
        self._runs_at_work: set[str] = set()
        beat.enter(Phase.WAITING)

    def __call__(self, holders: Collection[str]) -> bool:
        """Whether one of the runs that hold a device works.

        Raises DagsterExecutionInterruptedError where a pause stands.
        """
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _WAIT_LOOK_SECONDS
            end_if_paused(self._context, self._state)
            self._beat.enter(Phase.WAITING)
            with suppress(ControlStateError):
                self._runs_at_work = {worker.run_id for worker in Workers(self._state).living()}
        return not self._runs_at_work.isdisjoint(holders)


class RunProgress:
    """Progress of one partition, which ends its work at the next batch where a pause stands.

    ``done`` starts at what was restored, so the percentage never restarts.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        *,
        asset: dg.AssetKey,
        expected: int,
        journal: Journal,
        beat: WorkerBeat,
        state: ControlState,
        may_go_on: Callable[[], None],
    ) -> None:
        """may_go_on: asked at each batch; what it raises ends the work, with all finished rows committed."""
        self._context = context
        self._asset = asset
        self._may_go_on = may_go_on
        self._expected = expected
        self._journal = journal
        self._beat = beat
        self._state = state
        self._started = self._last_report = time.monotonic()
        self.computed = 0
        self.load_seconds = 0.0
        self.rows_seconds = 0.0
        """Seconds of ``building_rows`` so far."""
        # Commits come from the journal's own thread, between two batches and during a long one.
        journal.on_commit(beat.commit)
        _working.add(beat.worker.run_id)

    @property
    def device_wait(self) -> DeviceWait:
        """Waiting for a device, with all else prepared."""
        return DeviceWait(self._context, self._beat, self._state)

    def load(self, device: str | None) -> None:
        """The device is leased and the model is next. None: the model computes elsewhere.

        Where a pause began while the device was waited for, it is not used.
        """
        end_if_paused(self._context, self._state)
        self._beat.enter(Phase.LOADING, device=device)

    def start(self) -> None:
        """The model is loaded and the first property is next, unless a pause began meanwhile."""
        end_if_paused(self._context, self._state)
        self._started = time.monotonic()
        self._beat.enter(Phase.WORKING)

    def watch(self, engine: object) -> None:
        """Note in the heartbeat when the engine waits for its server: nobody expects a commit meanwhile."""
        if isinstance(engine, WaitingEngine):
            engine.waiting = self._waiting

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._beat.enter(Phase.LOADING)
        try:
            yield
        finally:
            self._beat.enter(Phase.WORKING)

    def advance(self, rows: int) -> None:
        """Count rows that were computed in this run; report at most every INTERVAL_SECONDS.

        The rows are submitted already, so that a pause loses none of them.
        """
        self.computed += rows
        self._beat.beat(computed=self.computed, committed=self._journal.committed_rows)
        if time.monotonic() - self._last_report >= INTERVAL_SECONDS:
            self.report()
        end_if_paused(self._context, self._state)
        self._may_go_on()

    @contextmanager
    def loading_model(self) -> Iterator[None]:
        """Count the time inside as that of loading the model."""
        began = time.monotonic()
        yield
        self.load_seconds = time.monotonic() - began

    @contextmanager
    def building_rows(self) -> Iterator[None]:
        """Count the time inside as that of building rows."""
        began = time.monotonic()
        yield
        self.rows_seconds += time.monotonic() - began

    def work_time(self, spent: Spent, engine: Engine) -> WorkTime:
        """How long each part of the work took, up to its last commit."""
        waited = self._journal.commit_wait_seconds
        return WorkTime(spent, engine.seconds, self.rows_seconds, waited, self.seconds)

    def warn(self, advice: str) -> None:
        """Show on the run's page what a person should change."""
        self._context.log.warning(advice)

    @property
    def seconds(self) -> float:
        """Seconds since the model was loaded: the whole of which the table shows shares."""
        return time.monotonic() - self._started

    @property
    def rate(self) -> float:
        """Rows that this run committed per second of wall time since its launch; 0 before the first."""
        return rate_of([self._beat.worker.stretch(time.time())]).per_second or 0.0

    def report(self) -> None:
        """Report the progress as a log line and an observation; nothing where Dagster is away."""
        self._last_report = time.monotonic()
        done = self._journal.committed_rows
        percent = 100.0 * done / self._expected if self._expected else 100.0
        seconds_left = (self._expected - done) / self.rate if self.rate else None
        until = f", {timedelta(seconds=round(seconds_left))} left" if seconds_left is not None else ""
        message = f"{done} of {self._expected} properties ({percent:.0f}%), {self.rate:.1f} a second{until}"
        metadata: dict[str, dg.MetadataValue] = {
            "percent done": dg.MetadataValue.float(round(percent, 1)),
            "properties done": dg.MetadataValue.int(done),
            "properties/s": dg.MetadataValue.float(round(self.rate, 2)),
        }
        if seconds_left is not None:
            metadata["minutes left"] = dg.MetadataValue.float(round(seconds_left / 60, 1))
        observed = dg.AssetObservation(
            asset_key=self._asset, partition=self._context.partition_key, metadata=metadata
        )
        try:
            with without_waiting():
                self._context.log.info(message)
                self._context.log_event(observed)
        except Exception as error:  # Dagster's and the database's own: rows are committed without them
            _log.warning("Not told to Dagster: %s. %s", message, error)


@dataclass
class WorkTime:
    """Seconds of the work on one partition, after the model was loaded.

    spent: the model's and what it waited for. phases: of the model's seconds, what the engine can tell
    apart (see ``Engine.seconds``). rows: results to Arrow. commit: waiting for the journal, its last flush
    included. total: from the first property to the last commit.
    """

    spent: Spent = field(default_factory=Spent)
    phases: Mapping[str, float] = field(default_factory=dict)
    rows: float = 0.0
    commit: float = 0.0
    total: float = 0.0

    def metadata(self) -> dict[str, dg.MetadataValue]:
        """Each number by itself, and the table."""
        spent = self.spent
        seconds = {
            "in model": spent.model,
            **{f"in {name}": self.phases[name] for name in ("prefill", "generation") if name in self.phases},
            "validating": spent.validating,
            "building rows": self.rows,
            "waiting for images": spent.waiting,
            "waiting for commit": self.commit,
            "reading images": spent.reading,
            "decoding images": spent.decoding,
            "in processor": spent.preparing + self.phases.get("processor", 0.0),
        }
        numbers: dict[str, dg.MetadataValue] = {
            f"seconds {name}": dg.MetadataValue.float(round(value, 3)) for name, value in seconds.items()
        }
        return {**numbers, "where the time went": markdown.metadata(self.table())}

    def table(self) -> Markdown:
        """Shares of the whole: what the device did, what it waited for, and what went on beside it."""
        spent = self.spent
        phases = dict(self.phases)
        # Where the engine takes several batches at once, they are validated beside each other and the model.
        validating = spent.validating if phases else 0.0
        parts = {
            "images and prompt (prefill)": phases.pop("prefill", 0.0),
            "answers (generation)": phases.pop("generation", 0.0),
            "processor, not ahead": phases.pop("processor", 0.0),
            "validation": validating,
        }
        parts["model, else" if self.phases else "model"] = max(0.0, spent.model - sum(parts.values()))
        parts |= {
            "waiting for images": spent.waiting,
            "rows": self.rows,
            "waiting for commit": self.commit,
        }
        parts["else"] = max(0.0, self.total - sum(parts.values()))
        beside = {
            "reading images": spent.reading,
            "decoding images": spent.decoding,
            "processor": spent.preparing,
        }
        times = {**parts, **{f"beside it: {name}": seconds for name, seconds in beside.items()}}
        rows = [
            (name, f"{seconds:.1f}", f"{seconds / self.total:.1%}")
            for name, seconds in times.items()
            if seconds >= 0.0005 * self.total > 0
        ]
        return markdown.table(("", "s", "share"), rows, numbers=True)


class ImagesAwayError(RuntimeError):
    """The images are away, as those of a disk that is not mounted: no property has failed for that."""


@dataclass
class ImagesWatch:
    """Watches the images of one range. properties: the catalogue's rows of it, in order.

    range_may_be_gone: a person lets a partition of failed rows alone be published, so a range whose images
    are all gone counts as deleted while other ranges have theirs.
    """

    catalog: Catalog
    property_range: PropertyRange
    properties: pa.Table
    range_may_be_gone: bool
    _readable_uri: str | None = field(default=None, init=False)

    def raise_if_away(self) -> None:
        """Raise ImagesAwayError where no image of the range can be read that could be read at ingest."""
        try:
            if not self._are_away():
                return
        except StoreAwayError as error:
            raise ImagesAwayError(f"The images are away: {error}") from error
        uri = next(_spread(self.properties))
        raise ImagesAwayError(
            f"The images are away: none of those of {self.property_range.key} that could be read when they"
            f" were catalogued can be read now, such as {uri} ({self._read_error(uri)}). No property has"
            f" failed for that, and what is committed stays. {self.catalog.images.advice} Once they are back,"
            " the partition goes on by itself. If these images are gone for good, take them out of the"
            f" catalogue: {command('ingest', 'SOURCE', '--update')}."
        )

    def judge_batch(self, described: Sequence[Described]) -> None:
        """Raise ImagesAwayError where images of the batch are away: none of its rows may be taken then."""
        lost = [
            (failure.uri, failure.kind)
            for answer in described
            for failure in answer.images_failed
            if failure.kind in _LOST and self._was_readable(answer.ordinal, failure.uri)
        ]
        if not lost:
            return
        self.raise_if_away()
        back = next((uri for uri, kind in lost if kind in _LOST_FOR_NOW and not self._read_error(uri)), None)
        if back is not None:
            raise ImagesAwayError(
                f"The images were away for a moment: {back} could not be read, and can be now. Nothing of"
                " this batch was taken, no property has failed for that, and what is committed stays. The"
                f" partition goes on by itself. If that repeats, look at {self.catalog.image_root}."
            )

    def _are_away(self) -> bool:
        if self._readable_uri is not None and self._read_error(self._readable_uri) is None:
            return False
        lists_no_image = True
        for uri in _spread(self.properties):
            lists_no_image = False
            if self._read_error(uri) is None:
                self._readable_uri = uri
                return False
        if lists_no_image:
            return False
        had_images = pc.sum(pc.greater(pc.list_value_length(self.properties["image_uris"]), 0)).as_py()
        if had_images >= WHOLE_RANGE and not self.range_may_be_gone:
            return True
        return not any(self._read_error(uri) is None for uri in self._of_other_ranges())

    def _of_other_ranges(self) -> Iterator[str]:
        """One image of each of a few other ranges: a small range may well be deleted as a whole."""
        others = [
            property_range for property_range in self.catalog.ranges if property_range != self.property_range
        ]
        for at in _evenly(len(others), _OTHER_RANGES):
            uri = next(_spread(self.catalog.slice(others[at])), None)
            if uri is not None:
                yield uri

    def _was_readable(self, ordinal: int, uri: str) -> bool:
        row = ordinal - self.property_range.start
        uris, sizes = (self.properties[name][row].as_py() for name in ("image_uris", "image_bytes"))
        return any(
            listed_uri == uri and size is not None for listed_uri, size in zip(uris, sizes, strict=True)
        )

    def _read_error(self, uri: str) -> str | None:
        return self.catalog.images.read_error(uri)


def _spread(properties: pa.Table) -> Iterator[str]:
    """Up to PROBES images that could be read at ingest, evenly spread."""
    uris = pc.list_flatten(properties["image_uris"])
    readable = pc.indices_nonzero(pc.is_valid(pc.list_flatten(properties["image_bytes"])))
    for at in _evenly(len(readable), PROBES):
        yield uris[readable[at].as_py()].as_py()


def _evenly(count: int, most: int) -> Iterator[int]:
    picked = min(count, most)
    return (number * count // picked for number in range(picked))
