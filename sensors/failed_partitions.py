"""Scheduled re-materialization: which partitions are tried again at a tick, written down before they are.

What lives here: which partitions are not as they should be (failed materializations and checks, interrupted
work, missing files), and the tick, which brings them together with the ledger and a person's cancels. What
does not: what is decided about one (``retry_decision.py``, with the table of who owns which failure), when it
ticks (``retry_schedule.py``).
"""

from __future__ import annotations

import threading
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from sensors.cancels import Cancels
from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import UNFINISHED, RunState
from sensors.outlook import why_ended
from sensors.partition_history import PartitionHistory
from sensors.retry_decision import INTERRUPTIONS_TOLD, Action, Decision, Facts, Policy, decide
from sensors.retry_ledger import (
    Attempts,
    DoneAgain,
    Entry,
    Request,
    given_up,
    interrupted_again,
    left_to_person,
    note_done_again,
    subject,
)
from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import pause_of

_UNTOLD = "decided when the store answers again"

_LAUNCHING_SECONDS = 120.0
"""For which a launch that was written down may still be on its way, made by another process."""

_WHYS_READ = 20
"""Errors of runs that a tick reads from their logs, at most: each costs milliseconds."""

_SETTLED_SECONDS = 600.0
"""After which the tags of a run that has ended do not change any more."""

_FIRST_LOOK_SECONDS = 24 * 3600.0
_LOOK_BACK_SECONDS = 60.0
"""For which runs that succeeded are looked at, by the first tick of a process and again by each later one."""


@dataclass(frozen=True)
class Watched:
    """The assets that are watched, upstream first, and what is asked about them.

    keys: their partitions. interrupted: of an asset, the partitions with work on disk that is not published.
    missing: of an asset and the partitions that should be published, those without a file. rows: committed
    for a partition, ever; None where it cannot be told now. is_stale: whether what is published of an
    asset's partition was made under other settings. working: partitions that a living process works on.
    heaviest_first: in which order to try. decides_on_stale: whether a run config says what becomes of a stale
    partition, which its run and every retry of it hold to.
    """

    assets: tuple[str, ...]
    keys: frozenset[str]
    interrupted: Callable[[str], Collection[str]]
    missing: Callable[[str, Collection[str]], Collection[str]]
    rows: Callable[[str], int | None]
    is_stale: Callable[[str, str], bool]
    working: Callable[[], Collection[str]]
    heaviest_first: Callable[[Collection[str]], Sequence[str]]
    decides_on_stale: Callable[[Mapping[str, Any]], bool] = lambda run_config: False


@dataclass
class Candidate:
    """A partition that is not as it should be. first: the first of the assets that is not.

    runs: finished ones that were to put it right.
    only_file: nothing was launched for it since it was published; only its file is not what it should be.
    """

    first: int
    why: list[str] = field(default_factory=list)
    runs: list[RunState] = field(default_factory=list)
    only_file: bool = True


@dataclass(frozen=True)
class Launch:
    """One run to be launched: of these assets of a partition, and for people why.

    after: the run that it goes on with, which was cut short or refused; None where there is none.
    """

    key: str
    assets: tuple[str, ...]
    run_key: str
    why: str
    after: str | None = None


@dataclass(frozen=True)
class TickResult:
    """What a tick came to: the runs to launch, and a sentence for the page. is_void: it is to be repeated."""

    launches: tuple[Launch, ...]
    sentence: str
    is_void: bool = False


class FailedPartitions:
    """The re-materialization of one home; keeps what it has read between ticks.

    cap: runs of ours that are queued or running at once, at most. policy: attempts and back-off. no_device:
    why there is nothing to work on; None where there is.
    """

    def __init__(
        self,
        watched: Watched,
        state: ControlState,
        *,
        policy: Policy,
        cap: int,
        no_device: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.watched = watched
        self.state = state
        self.attempts = Attempts(state)
        self.cancels = Cancels(state)
        self.outbox = Outbox(state)
        self.history = PartitionHistory(watched.assets)
        self.policy = policy
        self.cap = cap
        self._no_device = no_device
        self._settled: dict[str, RunState] = {}
        self._guard = threading.Lock()
        self.succeeded_until: float | None = None

    def tick(self, dagster: DagsterFacts, *, tick: str, now: float, at_once: bool = False) -> TickResult:
        """Decide, write down, and say what to launch. ``tick`` names this tick, the same if it is repeated.

        at_once: a person asks: no back-off is waited for, and what was given up is tried again.
        """
        pause = pause_of(self.state)
        if pause is not None:
            return TickResult((), f"Nothing is started: {pause.sentence()}.")
        no_device = self._no_device()
        if no_device is not None:
            # Each run would wait for a device, and end.
            return TickResult((), f"Nothing is started, because every device is left out. {no_device}")
        # The schedule and the sensor of the button tick in threads of one process.
        with self._guard:
            return _Tick(self, dagster, tick, at_once, now).run()

    def states(
        self, dagster: DagsterFacts, run_ids: Collection[str], *, now: float
    ) -> Mapping[str, RunState]:
        """Runs by id; what has long ended is read once."""
        new_ids = [run_id for run_id in run_ids if run_id not in self._settled]
        states = dagster.run_states(new_ids) if new_ids else {}
        for run in states.values():
            if run.ended_at is not None and now - run.ended_at > _SETTLED_SECONDS:
                self._settled[run.run_id] = run
        return ChainMap(states, self._settled)

    def came_right(self, dagster: DagsterFacts, *, now: float) -> list[RunState]:
        """Runs that succeeded since ``succeeded_until``, and that Dagster's run retries had started again."""
        since = now - _FIRST_LOOK_SECONDS if self.succeeded_until is None else self.succeeded_until
        runs = dagster.runs_ended_since(since - _LOOK_BACK_SECONDS, [dg.DagsterRunStatus.SUCCESS])
        return [run for run in runs if run.retry_number]


class _Tick:
    """One tick: what it read, and what it decides."""

    def __init__(
        self, owner: FailedPartitions, dagster: DagsterFacts, tick: str, at_once: bool, now: float
    ) -> None:
        self.owner, self.watched, self.dagster = owner, owner.watched, dagster
        self.tick, self.at_once, self.now = tick, at_once, now
        self.alerts: list[Alert] = []
        self.counts: Counter[str] = Counter()
        self.candidates: dict[str, Candidate] = {}
        self.busy = set(owner.watched.working())
        self.entries: dict[str, Entry] = {}
        self.launched: dict[str, RunState] = {}
        self.cut_short: list[Launch] = []
        self.whys_read = 0

    def run(self) -> TickResult:
        owner = self.owner
        owner.history.look(self.dagster)
        cancelled = owner.cancels.look(self.dagster, self.now)
        before = owner.attempts.read()
        self.entries = dict(before)
        requests = {key: entry.requested for key, entry in before.items() if entry.requested is not None}
        self.launched = self.dagster.runs_with_key([request.run_key for request in requests.values()])
        for index, asset in enumerate(self.watched.assets):
            self._find(index, asset, requests)
        launchable: dict[str, Decision] = {}
        for key, candidate in self.candidates.items():
            if key in self.busy or key in cancelled:
                continue
            decision = self._decide(key, candidate)
            if decision is not None:
                launchable[key] = decision
        self.counts["cancelled by a person"] += len(self.watched.keys & cancelled.keys())
        launches = [*self.cut_short, *self._choose(launchable, cancelled)]
        unwell = {*self.candidates, *self.busy, *cancelled}
        unwell.update(key for of_asset in owner.history.open_attempts.values() for key in of_asset)
        done = self._done_again(self._forget_what_is_well(unwell), unwell)
        # Told before it is written down that it was: told twice is told once, by its id.
        owner.outbox.post_all(self.alerts)
        note_done_again(owner.state, done, now=self.now)
        owner.succeeded_until = self.now
        if self.entries != before and not owner.attempts.write(self.entries, read=before):
            sentence = "Another look was under way at the same time: the next tick looks again."
            return TickResult((), sentence, is_void=True)
        return TickResult(tuple(launches), self._sentence(len(launches)))

    def _find(self, index: int, asset: str, launching: Collection[str]) -> None:
        """Add the partitions of one asset that are not as they should be, and those that are worked on."""
        history, attempts = self.owner.history, self.owner.history.open_attempts[asset]
        run_ids = [attempt.run_id for attempt in attempts.values()]
        states = self.owner.states(self.dagster, run_ids, now=self.now)
        for key, attempt in list(attempts.items()):
            run = states.get(attempt.run_id)
            if run is None:
                # Deleted: forgotten here too, for what is on disk still tells.
                del attempts[key]
            elif run.status is dg.DagsterRunStatus.NOT_STARTED and key in launching:
                self._add(key, index, f"{asset}: its launch was cut short", only_file=False)
            elif not run.finished:
                self.busy.add(key)
            elif run.status is dg.DagsterRunStatus.FAILURE or run.interrupted_by is not None:
                how = "was interrupted" if run.interrupted_by else "failed"
                self._add(key, index, f"{asset}: run {run.run_id[:8]} {how}", run, only_file=False)
        for key, evaluations in history.failing(asset).items():
            checks = ", ".join(evaluation.check for evaluation in evaluations)
            self._add(key, index, f"{asset}: check failed: {checks}")
        for key in self.watched.interrupted(asset):
            if key not in attempts:
                self._add(key, index, f"{asset}: interrupted", only_file=False)
        published = [key for key in history.materialized[asset] if key not in attempts]
        for key in self.watched.missing(asset, published):
            self._add(key, index, f"{asset}: its file is missing")

    def _add(
        self, key: str, index: int, why: str, run: RunState | None = None, *, only_file: bool = True
    ) -> None:
        if key in self.watched.keys:
            candidate = self.candidates.setdefault(key, Candidate(index))
            candidate.why.append(why)
            candidate.only_file = candidate.only_file and only_file
            candidate.runs += [run] if run is not None else []

    def _decide(self, key: str, candidate: Candidate) -> Decision | None:
        """Decide about one partition; a decision to launch is returned, every other is carried out."""
        entry = self.entries.get(key, Entry(key))
        runs = list(candidate.runs)
        request = entry.requested
        if request is not None:
            launched = self.launched.get(request.run_key)
            if launched is not None and launched.status is not dg.DagsterRunStatus.NOT_STARTED:
                if not launched.finished:
                    return None
                runs.append(launched)
            elif all(run.created_at < request.at for run in runs):
                self._finish_launch(entry, request, launched, candidate)
                return None
        run = max(runs, key=lambda run: run.created_at, default=None)
        has_new_end = key in self.entries and run is not None and run.run_id != entry.reckoned
        rows = self._rows(key) if has_new_end else entry.rows
        if rows is None:
            return None
        facts = Facts(key, "; ".join(candidate.why), run, rows)
        decision = decide(entry, facts, self.owner.policy, now=self.now, at_once=self.at_once)
        if decision.action is Action.LAUNCH:
            return decision
        self._carry_out(decision)
        return None

    def _rows(self, key: str) -> int | None:
        """The partition's rows; where they could not be asked for once, no more is asked in this tick."""
        rows = None if self.counts[_UNTOLD] else self.watched.rows(key)
        self.counts[_UNTOLD] += rows is None
        return rows

    def _carry_out(self, decision: Decision) -> None:
        """Tell and note whatever is not a launch."""
        entry = decision.entry
        self.counts[decision.action.value] += 1
        if decision.action is Action.PERSON:
            told_of = f"person: {entry.reckoned}"
            if entry.told != told_of:
                self.alerts.append(left_to_person(entry, decision.why, self.now))
                self.entries[entry.key] = replace(self._with_why(entry), told=told_of, alerted=True)
        elif decision.action is Action.GIVE_UP:
            self.alerts.append(given_up(entry, decision.why, self.now))
            self.entries[entry.key] = replace(self._with_why(entry), alerted=True)
        elif entry.key in self.entries or decision.action is Action.WAIT:
            self.entries[entry.key] = self._told(self._with_why(entry))

    def _with_why(self, entry: Entry) -> Entry:
        """The entry with what its last run died of, read once a run."""
        before, candidate = self.entries.get(entry.key), self.candidates.get(entry.key)
        if candidate is None or (before is not None and before.reckoned == entry.reckoned):
            return entry
        why = "; ".join(candidate.why)
        run = next((run for run in candidate.runs if run.run_id == entry.reckoned), None)
        if run is not None and self.whys_read < _WHYS_READ:
            self.whys_read += 1
            why = why_ended(self.dagster, run)
        return replace(entry, why=why)

    def _told(self, entry: Entry) -> Entry:
        """The entry after a person was told, once, that it is interrupted again and again."""
        if entry.interruptions < INTERRUPTIONS_TOLD or entry.told == "interrupted":
            return entry
        self.alerts.append(interrupted_again(entry, self.now))
        return replace(entry, told="interrupted", alerted=True)

    def _finish_launch(
        self, entry: Entry, request: Request, launched: RunState | None, candidate: Candidate
    ) -> None:
        """A launch that was written down and did not come to be: make it now, under the same run key."""
        mine = request.tick == self.tick
        if not mine and self.now - request.at < _LAUNCHING_SECONDS:
            self.counts["being launched"] += 1
            return
        if launched is not None and not mine:
            # Created and never queued, by a tick that was killed in between: it has done nothing.
            self.dagster.delete_run(launched.run_id)
        self.entries[entry.key] = replace(entry, requested=replace(request, tick=self.tick, at=self.now))
        self.cut_short.append(self._launch(entry.key, candidate, request.run_key))

    def _choose(self, launchable: Mapping[str, Decision], cancelled: Collection[str]) -> list[Launch]:
        """As many as the cap leaves room for, the heaviest first; written into the entries."""
        under_way = sum(not run.finished for run in self.launched.values())
        # A cancelled run that was deleted too is none that is still to come.
        unborn = sum(
            entry.requested is not None and entry.requested.run_key not in self.launched
            for entry in self.entries.values()
            if entry.key not in cancelled
        )
        free = self.owner.cap - under_way - unborn
        chosen: list[Launch] = []
        if launchable and free > 0:
            queued = {run.partition for run in self.dagster.runs_in(UNFINISHED)}
            queued |= self.dagster.awaited_partitions(self.watched.assets)
            for key in self.watched.heaviest_first(launchable.keys()):
                if len(chosen) == free:
                    break
                candidate, entry = self.candidates[key], self._told(launchable[key].entry)
                if key in queued:
                    continue
                if self._is_for_a_person(key, candidate):
                    self.counts["made under other settings, left to a person"] += 1
                    continue
                rows = self._rows(key)
                if rows is None:
                    continue
                launches = entry.launches + 1
                # With the time in it no run key comes twice, even where the ledger was lost.
                request = Request(f"{key}:{launches}:{self.now:.0f}", self.tick, self.now)
                self.entries[key] = replace(
                    entry,
                    launches=launches,
                    rows=rows,
                    requested=request,
                    why="; ".join(candidate.why),
                )
                chosen.append(self._launch(key, candidate, request.run_key))
        self.counts["under way"] += under_way
        self.counts["waiting for their turn"] += len(launchable) - len(chosen)
        return chosen

    def _is_for_a_person(self, key: str, candidate: Candidate) -> bool:
        """Whether a run would make anew what is stale, and nobody has said that it should."""
        if not self.watched.is_stale(self.watched.assets[candidate.first], key):
            return False
        run = max(candidate.runs, key=lambda run: run.created_at, default=None)
        before = self.dagster.run_config(run.run_id) if run is not None else None
        return before is None or not self.watched.decides_on_stale(before[0])

    def _launch(self, key: str, candidate: Candidate, run_key: str) -> Launch:
        # What stands downstream of a new result is made again with it.
        assets = self.watched.assets[candidate.first :]
        run = max(candidate.runs, key=lambda run: run.created_at, default=None)
        after = run.run_id if run is not None else None
        return Launch(key, assets, run_key, "; ".join(candidate.why), after)

    def _forget_what_is_well(self, unwell: Collection[str]) -> list[Entry]:
        """Drop and return the entries of what is as it should be; an alert of theirs is over."""
        well = [self.entries.pop(key) for key in self.entries.keys() - unwell]
        for entry in well:
            if entry.alerted:
                self.owner.outbox.note_recovery(
                    subject(entry.key),
                    sentence=f"Partition {entry.key} is complete again.",
                    at=self.now,
                )
        return well

    def _done_again(self, well: Sequence[Entry], unwell: Collection[str]) -> list[DoneAgain]:
        """What was completed without a person since the last look."""
        done = []
        for run in self.owner.came_right(self.dagster, now=self.now):
            key, at = run.partition, run.ended_at or self.now
            if key is not None and key in self.watched.keys and key not in unwell:
                done.append(DoneAgain(key, at, run.retry_number, "its run crashed: Dagster's run retries"))
        materialized = self.owner.history.materialized.values()
        for entry in well:
            # Its runs may have been deleted instead.
            if entry.launches and all(entry.key in of_asset for of_asset in materialized):
                done.append(DoneAgain(entry.key, self.now, entry.launches, entry.why))
        return done

    def _sentence(self, launches: int) -> str:
        others = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()) if count)
        if launches:
            return f"{launches} tried again" + (f"; {others}" if others else "") + "."
        return f"Nothing to try again now: {others}." if others else "Every partition is as it should be."


def sentences(launches: Sequence[Launch]) -> list[str]:
    """Each launch as a person reads it."""
    return [f"{launch.key} ({', '.join(launch.assets)}): {launch.why}" for launch in launches]
