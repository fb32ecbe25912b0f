"""``make cluster-demo``: the example on three machines, one of which loses its power, and one its network.

What lives here: which machine, when, and what became of it; ends with one line of JSON. What does not: the
machines (``faults/machines.py``) and what runs on them (``faults/cluster.py``).
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
from dataclasses import dataclass
from pathlib import Path

from faults.cluster import ASSETS, PARTS, Beat, Cluster, ClusterError
from faults.machines import Machine, NoMachinesError, go_inside

KILL, CUT = "loses its power", "is cut off"
_LOOK_SECONDS = 0.25
_ELSEWHERE_SECONDS = 300.0
_AWAY_SECONDS = 15.0
"""For which the store or Postgres is away: long enough to be met, and shorter than any patience."""

_FRESH_SECONDS = 3.0
"""A heartbeat that has not changed for longer is of a machine that stands, or is gone."""

_AT_WORK = ("working", "publishing")


@dataclass(frozen=True)
class Fault:
    """What a machine suffered, and what followed. recomputed: rows that it had and its successor had not."""

    kind: str
    machine: str
    partition: str
    recomputed: int
    seconds_until_elsewhere: float


@dataclass(frozen=True)
class Strike:
    """What was done to a machine, at which row of which partition, and when, by the monotonic clock."""

    kind: str
    machine: Machine
    beat: Beat
    at: float


class Story:
    """Everything is described, with faults on the way. kinds: of the faults, in their order.

    A kind is what befalls a machine, or the name of a part that is killed and started again. at_once: a
    fault of a machine does not wait until the one before has come to its end.
    """

    def __init__(
        self, cluster: Cluster, *, kinds: Sequence[str], at_once: bool, chance: random.Random, minutes: float
    ) -> None:
        self.faults: list[Fault] = []
        self.restarts: list[str] = []
        """Parts after whose restart work went on."""
        self._cluster = cluster
        self._kinds = list(kinds)
        self._restarted: tuple[str, float, set[str]] | None = None
        self._at_once = at_once
        self._chance = chance
        self._standing: list[Strike] = []
        self._began = time.monotonic()
        self._deadline = self._began + 60.0 * minutes

    def say(self, sentence: str) -> None:
        """A line of the story."""
        print(f"{time.monotonic() - self._began:7.1f} s  {sentence}", flush=True)

    def live(self) -> None:
        """Describe everything, again and again while faults are left. Raises ClusterError."""
        self._describe_all({})
        while self._kinds:
            self.say(f"All is published. {len(self._kinds)} faults are left, so all is computed again.")
            self._describe_all({"recompute": True})
        # A partition whose run was lost last of all is tried again by the schedule.
        while any(self._cluster.rows(asset)[0] for asset in ASSETS):
            self._pass_time("all rows are in the store")

    def _describe_all(self, config: dict[str, bool]) -> None:
        ended = self._cluster.backfill(config)
        while not (is_over := ended()) or self._standing or self._restarted:
            for strike in list(self._standing):
                self._follow(strike)
            self._follow_restart(is_over=is_over)
            free = self._at_once or not self._standing
            if self._kinds and free and self._restarted is None and (victim := self._victim()) is not None:
                if (kind := self._kinds.pop(0)) in PARTS:
                    self._restart(kind)
                else:
                    self._strike(kind, *victim)
            self._pass_time("the backfill ends")

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
        if is_over or any(one.run_id not in before and one.phase in _AT_WORK for one in beats):
            self.say(f"Another run works {took:.0f} s after {part} was back.")
            self.restarts.append(part)
            self._restarted = None
        elif took > _ELSEWHERE_SECONDS:
            raise ClusterError(f"Nobody worked within {took:.0f} s after {part} was restarted")

    def _victim(self) -> tuple[Machine, Beat] | None:
        """A machine in the middle of a partition, never the head; drawn among those that are."""
        now = time.monotonic()
        struck = {strike.machine.name for strike in self._standing}
        found = [
            (machine, beat)
            for machine in self._cluster.machines[1:]
            for beat in list(self._cluster.beats.values())
            if beat.host == machine.name
            and machine.name not in struck
            and beat.asset == ASSETS[0]
            and now - beat.changed_at < _FRESH_SECONDS
            and 0 < beat.committed < beat.expected * 0.7
        ]
        return self._chance.choice(found) if found else None

    def _strike(self, kind: str, machine: Machine, beat: Beat) -> None:
        self.say(f"{machine.name} {kind}, with {beat.committed} of {beat.expected} rows of {beat.partition}.")
        if kind == KILL:
            machine.cut_power()
        else:
            machine.cut_off()
        self._standing.append(Strike(kind, machine, beat, time.monotonic()))

    def _follow(self, strike: Strike) -> None:
        """Where its partition is worked on elsewhere, say so and mend the machine. Raises ClusterError."""
        kind, machine, beat = strike.kind, strike.machine, strike.beat
        took = time.monotonic() - strike.at
        found = next(
            (
                one
                for one in list(self._cluster.beats.values())
                if (one.asset, one.partition) == (beat.asset, beat.partition)
                and one.host != machine.name
                and one.changed_at > strike.at
                and one.phase in _AT_WORK
            ),
            None,
        )
        if found is None:
            if took > _ELSEWHERE_SECONDS:
                raise ClusterError(f"Nobody went on with {beat.partition} within {took:.0f} s")
            return
        last = self._cluster.beats[beat.run_id, beat.asset, beat.host]
        recomputed = max(0, last.restored + last.computed - found.restored)
        self.faults.append(Fault(kind, machine.name, beat.partition, recomputed, round(took, 1)))
        self._standing.remove(strike)
        self.say(
            f"{found.host} goes on with {beat.partition} after {took:.0f} s:"
            f" {found.restored} rows restored, {recomputed} computed again."
        )
        if kind == KILL:
            self._cluster.switch_on(machine)
            self.say(f"{machine.name} is on again.")
        else:
            # Back while the other one works: what it still wants to write must be refused.
            machine.reconnect()
            self.say(f"{machine.name} is back, and its process may still work.")

    def _pass_time(self, until: str) -> None:
        if time.monotonic() > self._deadline:
            raise ClusterError(f"It took too long until {until}")
        time.sleep(_LOOK_SECONDS)


def main(arguments: list[str]) -> int:
    """0: no row was lost and none doubled. 1: some were, or it did not come to an end."""
    parser = argparse.ArgumentParser(prog="make cluster-demo", description=__doc__)
    parser.add_argument("--properties", type=int, default=240, help="example properties (default: 240)")
    parser.add_argument("--range-size", type=int, default=30, help="properties a partition (default: 30)")
    parser.add_argument("--seed", type=int, default=7, help="of the example and of the faults (default: 7)")
    parser.add_argument("--kills", type=int, default=1, help="power cuts of a machine (default: 1)")
    parser.add_argument("--cuts", type=int, default=1, help="machines cut off and brought back (default: 1)")
    parser.add_argument(
        "--restarts",
        action="store_true",
        help=f"also kill and restart {', '.join(PARTS)}, one after the other, while machines work",
    )
    parser.add_argument("--at-once", action="store_true", help="do not wait between two faults")
    parser.add_argument(
        "--minutes", type=float, help="give up after (default: 10, and 4 more for each fault)"
    )
    parser.add_argument("--keep", action="store_true", help="keep all files and logs")
    asked = parser.parse_args(arguments)
    try:
        go_inside()
    except NoMachinesError as error:
        print(error, file=sys.stderr)
        return 1
    kinds = [KILL] * asked.kills + [CUT] * asked.cuts
    chance = random.Random(asked.seed)
    if asked.restarts:
        kinds += PARTS
    if len(kinds) > 2:
        chance.shuffle(kinds)
    folder = Path(tempfile.mkdtemp(prefix="machines-"))
    folder.chmod(0o755)
    minutes = asked.minutes or 10.0 + 4.0 * len(kinds)
    with Cluster(folder) as cluster:
        story = Story(cluster, kinds=kinds, at_once=asked.at_once, chance=chance, minutes=minutes)
        try:
            cluster.begin(properties=asked.properties, range_size=asked.range_size, seed=asked.seed)
            story.say(f"{len(cluster.machines)} machines work on {asked.properties} properties.")
            story.live()
        except ClusterError as error:
            story.say(f"{error}. Logs: {cluster.logs}")
        counted = [cluster.rows(asset) for asset in ASSETS]
        told = cluster.told_secrets()
    result = {
        "lost": sum(lost for lost, _ in counted),
        "doubled": sum(doubled for _, doubled in counted),
        "recomputed": sum(fault.recomputed for fault in story.faults),
        "seconds_until_elsewhere": max((one.seconds_until_elsewhere for one in story.faults), default=0.0),
    }
    came_to_an_end = len(story.faults) + len(story.restarts) == len(kinds)
    failed = bool(result["lost"] or result["doubled"] or told or not came_to_an_end)
    for path in told:
        print(f"A secret stands in {path}.")
    if failed or asked.keep:
        print(f"All files are kept in {folder}.")
    else:
        shutil.rmtree(folder)
    print(json.dumps(result))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
