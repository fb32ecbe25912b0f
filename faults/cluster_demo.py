"""``make cluster-demo``: the example on several machines, some of which lose their power or their network.

What lives here: which machine, when, and what became of it; the last line is JSON. What does not: the
machines (``faults/machines.py``), what runs on them (``faults/cluster.py``, ``faults/machines_alone.py``).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from faults.cluster import ASSETS, PARTS, Beat, Cluster, ClusterError
from faults.machines import Machine, NoMachinesError, go_inside
from faults.machines_alone import MachinesAlone

KILL, CUT = "loses its power", "is cut off"
HEAD_KILL, HEAD_NODE = "loses its power, as the head", "loses Ray's part, as the head"
"""Befalls the first machine, where Ray's head and Dagster run too: it comes back whatever the others do."""

_OF_HEAD = (HEAD_KILL, HEAD_NODE)
_LOOK_SECONDS = 0.25
_ELSEWHERE_SECONDS = 300.0
_AWAY_SECONDS = 15.0
"""For which the store or Postgres is away: long enough to be met, and shorter than any patience."""

_FRESH_SECONDS = 3.0
"""A heartbeat that has not changed for longer is of a machine that stands, or is gone."""

_AT_WORK = ("working", "publishing")

_OFTEN, _SELDOM = 0.2, 0.02
"""How likely a machine is struck at a look, where it has committed something and where it has not."""

_RESULTS = Path(__file__).resolve().parent.parent / "data" / "faults"


@dataclass
class Campaign:
    """What all parts of a campaign have found so far. minutes: for which they went on.

    failed: parts that did not come to their end. The last four fields: the worst of one fault.
    """

    kills: int = 0
    cuts: int = 0
    lost: int = 0
    doubled: int = 0
    failed: int = 0
    recomputed: int = 0
    minutes: float = 0.0
    recomputed_at_most: int = 0
    seconds_lost_at_most: float = 0.0
    seconds_until_elsewhere: float = 0.0
    seconds_until_begun: float = 0.0

    @classmethod
    def at(cls, path: Path) -> Campaign:
        """The campaign that a file keeps; a new one where there is no file."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def add(self, faults: Sequence[Fault]) -> None:
        """Add the faults of a part."""
        self.kills += sum(fault.kind == KILL for fault in faults)
        self.cuts += sum(fault.kind == CUT for fault in faults)
        self.recomputed += sum(fault.recomputed for fault in faults)
        for fault in faults:
            self.recomputed_at_most = max(self.recomputed_at_most, fault.recomputed)
            self.seconds_lost_at_most = round(max(self.seconds_lost_at_most, fault.seconds_lost), 1)
            self.seconds_until_elsewhere = max(self.seconds_until_elsewhere, fault.seconds_until_elsewhere)
            self.seconds_until_begun = max(self.seconds_until_begun, fault.seconds_until_begun)

    def keep(self, path: Path) -> None:
        """Write it into a file, in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(path)

    @property
    def broken(self) -> bool:
        """Whether something was lost or doubled, or did not come to its end."""
        return bool(self.lost or self.doubled or self.failed)


@dataclass(frozen=True)
class Fault:
    """What a machine suffered, and what followed.

    recomputed: rows that it had and its successor had not. seconds_lost: its work since the last row that its
    successor had. seconds_until_begun: until its successor's first heartbeat, before it loads its model; 0
    where another fault stood too, so that perhaps no machine was free.
    """

    kind: str
    machine: str
    partition: str
    recomputed: int
    seconds_lost: float
    seconds_until_elsewhere: float
    seconds_until_begun: float


@dataclass
class Strike:
    """What was done to a machine, at which row of which partition, and when, by the monotonic clock.

    is_only: whether no other fault has stood beside it.
    """

    kind: str
    machine: Machine
    beat: Beat
    at: float
    is_only: bool


class Story:
    """Everything is described, with faults on the way. kinds: of the faults, in their order.

    A kind is what befalls a machine, or the name of a part that is killed and started again. at_once: a
    fault of a machine does not wait until the one before has come to its end. at_any_moment: a machine may be
    struck whatever it does, and not only between its first rows and its last. minutes: after which there are
    no more faults. patience: minutes after which the story counts as failed.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        kinds: Sequence[str],
        at_once: bool,
        at_any_moment: bool,
        chance: random.Random,
        minutes: float,
        patience: float,
    ) -> None:
        self.faults: list[Fault] = []
        self.restarts: list[str] = []
        """Parts after whose restart work went on."""
        self.doubled = 0
        """Rows that came twice, in all rounds."""
        self._cluster = cluster
        self._kinds = list(kinds)
        self._restarted: tuple[str, float, set[str]] | None = None
        self._at_once = at_once
        self._at_any_moment = at_any_moment
        self._chance = chance
        self._standing: list[Strike] = []
        self._began = time.monotonic()
        self._no_more = self._began + 60.0 * minutes
        self._deadline = self._began + 60.0 * patience

    @property
    def minutes(self) -> float:
        """Since it began."""
        return (time.monotonic() - self._began) / 60.0

    def say(self, sentence: str) -> None:
        """A line of the story."""
        print(f"{time.monotonic() - self._began:7.1f} s  {sentence}", flush=True)

    def live(self) -> None:
        """Describe everything, again and again while faults are left. Raises ClusterError."""
        self._describe_all({})
        while self._is_fault_due:
            self.say(f"All is published. {len(self._kinds)} faults are left, so all is computed again.")
            self._describe_all({"recompute": True})

    @property
    def _is_fault_due(self) -> bool:
        return bool(self._kinds) and time.monotonic() < self._no_more

    def _describe_all(self, config: dict[str, bool]) -> None:
        ended = self._cluster.backfill(config)
        while not (is_over := ended()) or self._standing or self._restarted:
            for strike in list(self._standing):
                self._follow(strike)
            self._follow_restart(is_over=is_over)
            # What is on the head is killed there, so the head must be whole.
            at_once = self._at_once and self._kinds[:1] in ([KILL], [CUT])
            free = at_once or not self._standing
            due = self._is_fault_due and free and self._restarted is None
            if due and (victim := self._victim(self._kinds[0])) is not None:
                if (kind := self._kinds.pop(0)) in PARTS:
                    self._restart(kind)
                else:
                    self._strike(kind, *victim)
            self._pass_time("the backfill ends")
        # A partition whose run was lost last of all is tried again by the schedule.
        while any(self._cluster.rows(asset)[0] for asset in ASSETS):
            self._pass_time("all rows are in the store")
        self.doubled += sum(self._cluster.rows(asset)[1] for asset in ASSETS)

    def _restart(self, part: str) -> None:
        self.say(f"{part} is killed, in the middle of the backfill.")
        self._cluster.kill(part)
        time.sleep(_AWAY_SECONDS)
        self._cluster.mend(part)
        before = {run_id for run_id, _, _ in list(self._cluster.beats)}
        self._restarted = part, time.monotonic(), before

    def _follow_restart(self, *, is_over: bool) -> None:
        """Say when somebody works again after a restart, or all is done. Raises ClusterError."""
        if self._restarted is None:
            return
        part, at, before = self._restarted
        took = time.monotonic() - at
        beats = list(self._cluster.beats.values())
        # A run that was not disturbed proves nothing of the part: another one has to be launched, and work.
        if is_over or any(beat.run_id not in before and beat.phase in _AT_WORK for beat in beats):
            self.say(f"Another run works {took:.0f} s after {part} was back.")
            self.restarts.append(part)
            self._restarted = None
        elif took > _ELSEWHERE_SECONDS:
            raise ClusterError(f"Nobody worked within {took:.0f} s after {part} was restarted")

    def _victim(self, kind: str) -> tuple[Machine, Beat] | None:
        """A machine at work on a partition, drawn among those that are."""
        now = time.monotonic()
        struck = {strike.machine.name for strike in self._standing}
        candidates = [
            (machine, beat)
            for machine in ([self._cluster.head] if kind in _OF_HEAD else self._cluster.at_risk)
            for beat in list(self._cluster.beats.values())
            if beat.host == machine.name
            and machine.name not in struck
            and now - beat.changed_at < _FRESH_SECONDS
            and self._cluster.is_current(beat)
            and self._may_be_struck(beat)
        ]
        return self._chance.choice(candidates) if candidates else None

    def _may_be_struck(self, beat: Beat) -> bool:
        if not self._at_any_moment:
            return beat.asset == ASSETS[0] and 0 < beat.committed < beat.expected * 0.7
        # Mostly where there is work to lose; starts and ends are struck now and then.
        has_worked = beat.committed > beat.restored
        return self._chance.random() < (_OFTEN if has_worked else _SELDOM)

    def _strike(self, kind: str, machine: Machine, beat: Beat) -> None:
        self.say(f"{machine.name} {kind}, with {beat.committed} of {beat.expected} rows of {beat.partition}.")
        if kind in (KILL, HEAD_KILL):
            machine.cut_power()
        elif kind == HEAD_NODE:
            self._cluster.kill_node_of_head()
        else:
            machine.cut_off()
        for strike in self._standing:
            strike.is_only = False
        self._standing.append(Strike(kind, machine, beat, time.monotonic(), is_only=not self._standing))

    def _follow(self, strike: Strike) -> None:
        """Where its partition is worked on elsewhere, say so and mend the machine. Raises ClusterError."""
        kind, machine, beat = strike.kind, strike.machine, strike.beat
        took = time.monotonic() - strike.at
        if kind == HEAD_KILL and not machine.is_reachable and took > _AWAY_SECONDS:
            self._cluster.switch_on(machine)
            self.say(f"{machine.name} is on again.")
        successor = next(
            (
                candidate
                for candidate in list(self._cluster.beats.values())
                if (candidate.asset, candidate.partition) == (beat.asset, beat.partition)
                and (candidate.host != machine.name or (kind in _OF_HEAD and candidate.run_id != beat.run_id))
                # Not one that was cut off before, is back, and is about to be refused.
                and self._cluster.rows_at[candidate.name][0][0] > strike.at
                and candidate.phase in _AT_WORK
            ),
            None,
        )
        if successor is None and not self._cluster.is_done(beat.partition):
            if took > _ELSEWHERE_SECONDS:
                raise ClusterError(f"Nobody went on with {beat.partition} within {took:.0f} s")
            return
        lost = self._lost(strike, successor) if successor is not None else (0, 0.0)
        begun = (
            self._cluster.rows_at[successor.name][0][0] - strike.at if successor and strike.is_only else 0.0
        )
        self.faults.append(Fault(kind, machine.name, beat.partition, *lost, round(took, 1), round(begun, 1)))
        self._standing.remove(strike)
        self.say(
            f"{successor.host} goes on with {beat.partition} after {took:.0f} s:"
            f" {successor.restored} rows restored, {lost[0]} computed again."
            if successor is not None
            else f"{beat.partition} had all of its rows in the store, and is published."
        )
        if kind == KILL:
            self._cluster.switch_on(machine)
            self.say(f"{machine.name} is on again.")
        elif kind == CUT:
            # Back while the other one works: what it still wants to write must be refused.
            machine.reconnect()
            self.say(f"{machine.name} is back, and its process may still work.")

    def _lost(self, strike: Strike, successor: Beat) -> tuple[int, float]:
        """Rows that are computed again, and for how long the machine had worked on them."""
        progress = self._cluster.rows_at[strike.beat.name]
        since = max((at for at, rows in progress if rows <= successor.restored), default=progress[0][0])
        return max(0, progress[-1][1] - successor.restored), max(0.0, strike.at - since)

    def _pass_time(self, until: str) -> None:
        if time.monotonic() > self._deadline:
            raise ClusterError(f"It took too long until {until}")
        time.sleep(_LOOK_SECONDS)


def main(arguments: list[str]) -> int:
    """0: no row was lost and none doubled. 1: some were, or it did not come to an end."""
    parser = argparse.ArgumentParser(prog="make cluster-demo", description=__doc__)
    parser.add_argument("--properties", type=int, help="example properties (default: 240; alone: 72)")
    parser.add_argument("--range-size", type=int, help="properties a partition (default: 30; alone: 12)")
    parser.add_argument("--machines", type=int, help="how many (default: 3; alone: 6)")
    parser.add_argument("--seed", type=int, default=7, help="of the example and of the faults (default: 7)")
    parser.add_argument("--kills", type=int, default=1, help="power cuts of a machine (default: 1)")
    parser.add_argument("--cuts", type=int, default=1, help="machines cut off and brought back (default: 1)")
    parser.add_argument(
        "--restarts",
        action="store_true",
        help=f"also kill and restart {', '.join(PARTS)}, Ray's part of the head's machine and that machine,"
        " one after the other, while machines work",
    )
    parser.add_argument(
        "--redis", action="store_true", help="have Ray's head remember its nodes in a Redis (redis-server)"
    )
    parser.add_argument("--at-once", action="store_true", help="do not wait between two faults")
    parser.add_argument(
        "--alone",
        action="store_true",
        help="machines without Ray and Dagster's daemon, struck at any moment: many faults a minute",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="a part of a campaign: no more faults after so many; the same command goes on with the rest",
    )
    parser.add_argument("--keep", action="store_true", help="keep all files and logs")
    options = parser.parse_args(arguments)
    kept = _RESULTS / f"machines-{'alone' if options.alone else 'on-ray'}.json"
    campaign = Campaign.at(kept) if options.minutes else Campaign()
    kinds = [KILL] * (options.kills - campaign.kills) + [CUT] * (options.cuts - campaign.cuts)
    chance = random.Random(f"{options.seed}/{campaign.kills + campaign.cuts}")
    if options.restarts:
        kinds += (*PARTS, *_OF_HEAD)
    if len(kinds) > 2:
        chance.shuffle(kinds)
    if kinds:
        try:
            go_inside()
        except NoMachinesError as error:
            print(error, file=sys.stderr)
            return 1
        _live(options, kinds, campaign, chance)
        if options.minutes:
            campaign.keep(kept)
    if options.minutes:
        a_minute = (campaign.kills + campaign.cuts) / max(1.0, campaign.minutes)
        print(
            f"{campaign.kills} of {options.kills} power cuts and {campaign.cuts} of {options.cuts} cut-offs"
            f" so far, {a_minute:.1f} a minute. Kept in {kept}; without that file all begins anew."
        )
    print(json.dumps(asdict(campaign)))
    return 1 if campaign.broken else 0


def _live(
    options: argparse.Namespace, kinds: Sequence[str], campaign: Campaign, chance: random.Random
) -> None:
    """Live through these faults, and add what became of them to the campaign."""
    folder = Path(tempfile.mkdtemp(prefix="machines-"))
    folder.chmod(0o755)
    patience = options.minutes + 15.0 if options.minutes else 10.0 + 4.0 * len(kinds)
    made: Cluster
    if options.alone:
        made = MachinesAlone(folder, machines=options.machines or 6, chance=chance)
    else:
        made = Cluster(folder, machines=options.machines or 3, redis=options.redis)
    properties = options.properties or (72 if options.alone else 240)
    range_size = options.range_size or (12 if options.alone else 30)
    trouble = False
    with made as cluster:
        story = Story(
            cluster,
            kinds=kinds,
            at_once=options.at_once or options.alone,
            at_any_moment=options.alone,
            chance=chance,
            minutes=options.minutes or patience,
            patience=patience,
        )
        try:
            cluster.begin(properties=properties, range_size=range_size, seed=options.seed)
            story.say(f"{len(cluster.machines)} machines work on {properties} properties.")
            story.live()
        except ClusterError as error:
            trouble = True
            story.say(f"{error}. Logs: {cluster.logs}")
        counted = [cluster.rows(asset) for asset in ASSETS]
        leaks = cluster.leaked_secrets()
    for path in leaks:
        print(f"A secret stands in {path}.")
    ended = len(story.faults) + len(story.restarts)
    lost, doubled = sum(lost for lost, _ in counted), sum(doubled for _, doubled in counted) + story.doubled
    campaign.add(story.faults)
    campaign.lost += lost
    campaign.doubled += doubled
    campaign.minutes = round(campaign.minutes + story.minutes, 1)
    failed = trouble or bool(leaks) or (ended != len(kinds) and not options.minutes)
    campaign.failed += failed
    if failed or lost or doubled or options.keep:
        print(f"All files are kept in {folder}.")
    else:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
