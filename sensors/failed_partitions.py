"""Scheduled re-materialization: chooses the partitions to try again, and writes them down before the launch.

The decision about one partition is in ``retry_decision.py``, with the table of who owns which failure, and
when it ticks in ``retry_schedule.py``.
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
from sensors.retry_decision import (
    INTERRUPTIONS_TOLD,
    Action,
    Decision,
    Facts,
    Policy,
    decide,
    why_for_person,
)
from sensors.retry_ledger import (
    Attempts,
    DoneAgain,
    Entry,
    Request,
    asked_again,
    given_up,
    interrupted_again,
    left_stale,
    left_to_person,
    note_done_again,
    subject,
    told_person,
    told_stale,
)
from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import pause_of

_UNTOLD = "decided when the store answers again"

_LAUNCHING_SECONDS = 120.0
"""How long a launch that another process wrote down may still be on its way."""

_ERRORS_READ = 20
"""Up to so many errors of runs are read from their logs in one tick: each costs milliseconds."""

_SETTLED_SECONDS = 600.0
"""This long after its end the tags of a run do not change any more."""

_FIRST_TICK_SECONDS = 24 * 3600.0
_LOOK_BACK_SECONDS = 60.0
"""How far back a process reads runs that succeeded: at its first tick, and before the last tick at others."""


@dataclass(frozen=True)
class Watched:
    """The watched assets, upstream first, and the questions about them.

    keys: their partitions. interrupted: an asset's partitions with work on disk that is not published.
    missing: of an asset and its published partitions, those without a file. rows: how many rows were ever
    committed for a partition; None if that cannot be read now. is_stale: whether an asset's published
    partition was made under other settings. working: partitions that a living process works on.
    heaviest_first: the order to try them in. decides_on_stale: whether a run config says what happens to a
    stale partition of an asset; its run and every retry of it follow that. with_downstream: adds to
    assets those that are made from them.
    """

    assets: tuple[str, ...]
    keys: frozenset[str]
    interrupted: Callable[[str], Collection[str]]
    missing: Callable[[str, Collection[str]], Collection[str]]
    rows: Callable[[str], int | None]
    is_stale: Callable[[str, str], bool]
    working: Callable[[], Collection[str]]
    heaviest_first: Callable[[Collection[str]], Sequence[str]]
    decides_on_stale: Callable[[str, Mapping[str, Any]], bool] = lambda asset, run_config: False
    with_downstream: Callable[[Collection[str]], Collection[str]] = frozenset


@dataclass
class Trouble:
    """What is wrong with one asset of a partition, and the finished run that should have put it right."""

    why: list[str] = field(default_factory=list)
    run: RunState | None = None


@dataclass
class Candidate:
    """A partition that is not as it should be. wrong: its assets that are not, upstream first."""

    wrong: dict[str, Trouble] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """What is wrong, for people."""
        return "; ".join(why for trouble in self.wrong.values() for why in trouble.why)

    @property
    def runs(self) -> list[RunState]:
        """The runs that should have put it right."""
        return [trouble.run for trouble in self.wrong.values() if trouble.run is not None]

    @property
    def latest_run(self) -> RunState | None:
        """The run that was created last."""
        return max(self.runs, key=lambda run: run.created_at, default=None)

    @property
    def for_person(self) -> Candidate:
        """The part of it that another run would only end with as the last one did."""
        return Candidate(
            {
                asset: trouble
                for asset, trouble in self.wrong.items()
                if trouble.run is not None and trouble.run.needs_person_for([asset])
            }
        )

    def assets_of(self, run: RunState | None) -> frozenset[str]:
        """The assets that this run should have put right."""
        run_id = run.run_id if run is not None else None
        return frozenset(
            asset for asset, trouble in self.wrong.items() if trouble.run and trouble.run.run_id == run_id
        )

    def without(self, assets: Collection[str]) -> Candidate:
        """The part of it in other assets than these."""
        return Candidate({asset: trouble for asset, trouble in self.wrong.items() if asset not in assets})


@dataclass(frozen=True)
class Launch:
    """One run to launch: of these assets of a partition. why: for people.

    after: the run before, which was cut short or refused; None if there is none.
    """

    key: str
    assets: tuple[str, ...]
    run_key: str
    why: str
    after: str | None = None


@dataclass(frozen=True)
class TickResult:
    """The outcome of a tick: the runs to launch, and a sentence for the page.

    is_void: nothing was decided, and a person's request for the tick stands.
    """

    launches: tuple[Launch, ...]
    sentence: str
    is_void: bool = False


class FailedPartitions:
    """The re-materialization of one home; keeps what it has read between ticks.

    cap: the most runs that it has queued or running at once. policy: attempts and back-off. no_device: why
    there is no device to work on; None if there is one.
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
        """Decide, write down, and return what to launch. tick: its name, the same if it is repeated.

        at_once: a person asks: no back-off is waited for, and given-up partitions are tried again.
        """
        pause = pause_of(self.state)
        if pause is not None:
            return TickResult((), f"Nothing is started: {pause.sentence()}.", is_void=True)
        no_device = self._no_device()
        if no_device is not None:
            # Each run would wait for a device, and end.
            sentence = f"Nothing is started, because every device is left out. {no_device}"
            return TickResult((), sentence, is_void=True)
        # The schedule and the sensor of the button tick in threads of one process.
        with self._guard:
            return _Tick(self, dagster, tick, at_once, now).run()

    def states(
        self, dagster: DagsterFacts, run_ids: Collection[str], *, now: float
    ) -> Mapping[str, RunState]:
        """Runs by id. A run that ended long ago is read only once."""
        new_ids = [run_id for run_id in run_ids if run_id not in self._settled]
        states = dagster.run_states(new_ids) if new_ids else {}
        for run in states.values():
            if run.ended_at is not None and now - run.ended_at > _SETTLED_SECONDS:
                self._settled[run.run_id] = run
        return ChainMap(states, self._settled)

    def completed_retries(self, dagster: DagsterFacts, *, now: float) -> list[RunState]:
        """Runs of Dagster's run retries that succeeded since ``succeeded_until``."""
        since = now - _FIRST_TICK_SECONDS if self.succeeded_until is None else self.succeeded_until
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
        self.errors_read = 0

    def run(self) -> TickResult:
        owner = self.owner
        owner.history.update(self.dagster)
        cancelled = owner.cancels.update(self.dagster, self.now)
        before = owner.attempts.read()
        self.entries = dict(before)
        requests = {key: entry.requested for key, entry in before.items() if entry.requested is not None}
        self.launched = self.dagster.runs_with_key([request.run_key for request in requests.values()])
        for asset in self.watched.assets:
            self._find(asset, requests)
        launchable: dict[str, Decision] = {}
        for key, candidate in self.candidates.items():
            if key in self.busy or key in cancelled:
                continue
            decision = self._decide(key, candidate)
            if decision is not None:
                launchable[key] = decision
        self.counts["cancelled by a person"] += len(self.watched.keys & cancelled.keys())
        launches = [*self.cut_short, *self._choose(launchable, cancelled)]
        unwell = {*self.candidates, *self.busy, *cancelled}.union(*owner.history.open_attempts.values())
        done = self._done_again(self._forget_well(unwell), unwell)
        # Alerts come before the entries that note them: an alert that is posted twice is told once.
        owner.outbox.post_all(self.alerts)
        note_done_again(owner.state, done, now=self.now)
        owner.succeeded_until = self.now
        if self.entries != before and not owner.attempts.write(self.entries, read=before):
            sentence = "Another look was under way at the same time: the next tick looks again."
            return TickResult((), sentence, is_void=True)
        return TickResult(tuple(launches), self._sentence(len(launches)))

    def _find(self, asset: str, launching: Collection[str]) -> None:
        """Add the partitions of one asset that are not as they should be, and those that are worked on."""
        history, attempts = self.owner.history, self.owner.history.open_attempts[asset]
        run_ids = [attempt.run_id for attempt in attempts.values()]
        states = self.owner.states(self.dagster, run_ids, now=self.now)
        for key, attempt in list(attempts.items()):
            run = states.get(attempt.run_id)
            if run is None:
                # A deleted run is forgotten here too: the partition's files still say how it stands.
                del attempts[key]
            elif run.status is dg.DagsterRunStatus.NOT_STARTED and key in launching:
                self._add(key, asset, "its launch was cut short")
            elif not run.finished:
                self.busy.add(key)
            elif run.ended_badly:
                how = "was interrupted" if run.interrupted_by else "failed"
                self._add(key, asset, f"run {run.run_id[:8]} {how}", run)
        for key, evaluations in history.failing(asset).items():
            checks = ", ".join(evaluation.check for evaluation in evaluations)
            self._add(key, asset, f"check failed: {checks}")
        for key in self.watched.interrupted(asset):
            if key not in attempts:
                self._add(key, asset, "interrupted")
        published = [key for key in history.materialized[asset] if key not in attempts]
        for key in self.watched.missing(asset, published):
            self._add(key, asset, "its file is missing")

    def _add(self, key: str, asset: str, why: str, run: RunState | None = None) -> None:
        if key in self.watched.keys:
            trouble = self.candidates.setdefault(key, Candidate()).wrong.setdefault(asset, Trouble())
            trouble.why.append(f"{asset}: {why}")
            trouble.run = trouble.run or run

    def _decide(self, key: str, candidate: Candidate) -> Decision | None:
        """Decide about one partition. Returns a decision to launch; carries out every other decision."""
        entry = self.entries.get(key, Entry(key))
        left, entry = self._left_to_person(candidate, entry)
        if to_make := candidate.without(self.watched.with_downstream(left.wrong)).wrong:
            candidate = self.candidates[key] = Candidate(to_make)
        runs = candidate.runs
        request = entry.requested
        if request is not None:
            launched = self.launched.get(request.run_key)
            if launched is not None and launched.status is not dg.DagsterRunStatus.NOT_STARTED:
                if not launched.finished:
                    return None
                runs.append(launched)
            elif to_make and all(run.created_at < request.at for run in runs):
                self._finish_launch(entry, request, launched, candidate)
                return None
        run = max(runs, key=lambda run: run.created_at, default=None)
        has_new_end = key in self.entries and run is not None and run.run_id != entry.reckoned
        rows = self._rows(key) if has_new_end else entry.rows
        if rows is None:
            return None
        facts = Facts(
            key,
            candidate.why,
            run,
            rows,
            candidate.assets_of(run),
            None if to_make else left.latest_run,
        )
        decision = decide(entry, facts, self.owner.policy, now=self.now, at_once=self.at_once)
        decision = replace(decision, entry=self._with_person_alert(decision.entry, left))
        if decision.action is Action.LAUNCH:
            if self.at_once:
                # If the cap leaves no room now, the next ticks launch it: they must not find it given up.
                self.entries[key] = self._with_why(decision.entry)
            return decision
        self._carry_out(decision)
        return None

    def _left_to_person(self, candidate: Candidate, entry: Entry) -> tuple[Candidate, Entry]:
        """The part that is left to a person, and the entry: a person's button is noted until the next run."""
        left = candidate.for_person
        if left.latest_run is None:
            return left, entry
        mark = asked_again(left.latest_run.run_id)
        if self.at_once:
            entry = replace(entry, told=mark)
        return (Candidate() if entry.told == mark else left), entry

    def _rows(self, key: str) -> int | None:
        """The partition's rows. After the first that cannot be read, no others are read in this tick."""
        rows = None if self.counts[_UNTOLD] else self.watched.rows(key)
        self.counts[_UNTOLD] += rows is None
        return rows

    def _carry_out(self, decision: Decision) -> None:
        """Alert of a decision that is no launch, and note it."""
        entry = decision.entry
        self.counts[decision.action.value] += 1
        if decision.action is Action.GIVE_UP:
            self.alerts.append(given_up(entry, decision.why, self.now))
            self.entries[entry.key] = replace(self._with_why(entry), alerted=True)
        elif entry.key in self.entries or decision.action is Action.WAIT:
            self.entries[entry.key] = self._with_interruption_alert(self._with_why(entry))

    def _with_person_alert(self, entry: Entry, left: Candidate) -> Entry:
        """The entry to keep. A person is alerted once about assets that wait for one."""
        run, assets = left.latest_run, tuple(left.wrong)
        if run is None:
            was_left = any(entry.needs_person(asset) for asset in self.watched.assets)
            return replace(entry, told=None) if was_left else entry
        if entry.told != (mark := told_person(run.run_id, assets)):
            of_run = replace(entry, reckoned=run.run_id)
            self.alerts.append(left_to_person(of_run, assets, why_for_person(run), self.now))
            entry = replace(self._with_why(entry), told=mark, alerted=True)
            self.entries[entry.key] = entry
        return entry

    def _with_why(self, entry: Entry) -> Entry:
        """The entry with the error of its last run, which is read once per run."""
        before, candidate = self.entries.get(entry.key), self.candidates.get(entry.key)
        if candidate is None or (before is not None and before.reckoned == entry.reckoned):
            return entry
        why = candidate.why
        run = next((run for run in candidate.runs if run.run_id == entry.reckoned), None)
        if run is not None and self.errors_read < _ERRORS_READ:
            self.errors_read += 1
            why = why_ended(self.dagster, run)
        return replace(entry, why=why)

    def _with_interruption_alert(self, entry: Entry) -> Entry:
        """The entry, after alerting once that its runs are interrupted again and again."""
        is_told = entry.told == "interrupted" or any(map(entry.needs_person, self.watched.assets))
        if entry.interruptions < INTERRUPTIONS_TOLD or is_told:
            return entry
        self.alerts.append(interrupted_again(entry, self.now))
        return replace(entry, told="interrupted", alerted=True)

    def _finish_launch(
        self, entry: Entry, request: Request, launched: RunState | None, candidate: Candidate
    ) -> None:
        """Make a launch that was written down and never made, under the same run key."""
        mine = request.tick == self.tick
        if not mine and self.now - request.at < _LAUNCHING_SECONDS:
            self.counts["being launched"] += 1
            return
        if launched is not None and not mine:
            # A tick that was killed had created this run and not queued it: it has done nothing.
            self.dagster.delete_run(launched.run_id)
        self.entries[entry.key] = replace(entry, requested=replace(request, tick=self.tick, at=self.now))
        self.cut_short.append(self._launch(entry.key, candidate, request.run_key))

    def _choose(self, launchable: Mapping[str, Decision], cancelled: Collection[str]) -> list[Launch]:
        """Launch as many as the cap leaves room for, the heaviest first; notes them in the entries."""
        under_way = sum(not run.finished for run in self.launched.values())
        # If a run was cancelled and then deleted, it is not still to come.
        not_launched_yet = sum(
            entry.requested is not None and entry.requested.run_key not in self.launched
            for entry in self.entries.values()
            if entry.key not in cancelled
        )
        free = self.owner.cap - under_way - not_launched_yet
        chosen: list[Launch] = []
        if launchable and free > 0:
            queued = {run.partition for run in self.dagster.runs_in(UNFINISHED)}
            queued |= self.dagster.awaited_partitions(self.watched.assets)
            for key in self.watched.heaviest_first(launchable.keys()):
                if len(chosen) == free:
                    break
                candidate, entry = self.candidates[key], self._with_interruption_alert(launchable[key].entry)
                if key in queued:
                    continue
                if self._is_for_a_person(key, candidate):
                    self.counts["made under other settings, left to a person"] += 1
                    self._alert_of_stale(entry, candidate)
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
                    why=candidate.why,
                )
                chosen.append(self._launch(key, candidate, request.run_key))
        self.counts["under way"] += under_way
        self.counts["waiting for their turn"] += len(launchable) - len(chosen)
        return chosen

    def _is_for_a_person(self, key: str, candidate: Candidate) -> bool:
        """Whether a run would recompute a stale partition without a person's decision."""
        asset = next(iter(candidate.wrong))
        if not self.watched.is_stale(asset, key):
            return False
        run = candidate.latest_run
        before = self.dagster.run_config(run.run_id) if run is not None else None
        return before is None or not self.watched.decides_on_stale(asset, before[0])

    def _alert_of_stale(self, entry: Entry, candidate: Candidate) -> None:
        """Alert a person once of a stale partition whose run was interrupted: no other alert is about it."""
        run = candidate.latest_run
        if run is None or run.interrupted_by is None or entry.told == (mark := told_stale(run.run_id)):
            return
        self.alerts.append(left_stale(entry, tuple(candidate.wrong), candidate.why, self.now))
        self.entries[entry.key] = replace(self._with_why(entry), told=mark, alerted=True)

    def _launch(self, key: str, candidate: Candidate, run_key: str) -> Launch:
        # The assets downstream of a new result are made again with it.
        made = self.watched.with_downstream(candidate.wrong)
        assets = tuple(asset for asset in self.watched.assets if asset in made)
        run = candidate.latest_run
        after = run.run_id if run is not None else None
        return Launch(key, assets, run_key, candidate.why, after)

    def _forget_well(self, unwell: Collection[str]) -> list[Entry]:
        """Drop and return the entries of partitions that are as they should be; close their alerts."""
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
        """The partitions that were completed without a person since the last tick."""
        done = []
        for run in self.owner.completed_retries(self.dagster, now=self.now):
            key, at = run.partition, run.ended_at or self.now
            if key is not None and key in self.watched.keys and key not in unwell:
                done.append(DoneAgain(key, at, run.retry_number, "its run crashed: Dagster's run retries"))
        materialized = self.owner.history.materialized.values()
        for entry in well:
            # An entry may also be well because its runs were deleted.
            if entry.launches and all(entry.key in of_asset for of_asset in materialized):
                done.append(DoneAgain(entry.key, self.now, entry.launches, entry.why))
        return done

    def _sentence(self, launches: int) -> str:
        others = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()) if count)
        if launches:
            return f"{launches} tried again" + (f"; {others}" if others else "") + "."
        return f"Nothing to try again now: {others}." if others else "Every partition is as it should be."


def sentences(launches: Sequence[Launch]) -> list[str]:
    """Each launch as a sentence for people."""
    return [f"{launch.key} ({', '.join(launch.assets)}): {launch.why}" for launch in launches]
