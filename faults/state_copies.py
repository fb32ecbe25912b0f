"""The control state and its copies: killed while it changes or is restored, damaged, gone, or an older one.

A change that was copied at once (a pause, a cancel) must stand afterwards, or everything must be paused and a
restoration say so; any other change that is missing must be named by a restoration. Fault table row 33.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from faults.file_operations import strike_at
from faults.ledger import PromiseBrokenError
from faults.lives import Life, act_in_child, act_until_time
from faults.partition_life import Say
from vlm_durable.state import tables
from vlm_durable.state.database import NAME, ControlState, Copies
from vlm_durable.state.pause import pause_of, resume

_CHANGES = 6
_OPERATIONS = 40
_SECONDS = 0.4
_FATES = ("left", "left", "gone", "damaged")


def struck(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Three times: changes and a kill; then files are damaged, gone or an older one's; then a start."""
    home = place / f"state-{number}"
    state, older = home / ".state", place / f"state-{number}-older"
    # By its number: whether it was copied when it was acknowledged.
    acknowledged: dict[int, bool] = {}
    strikes, following, told = 0, 0, 0.0
    for _ in range(3):
        life, killed_at = _killed(chance, home, partial(_change, state, following))
        following += _CHANGES
        description = f"{killed_at}; "
        for report in life.reports:
            if "noted" in report:
                acknowledged[report["noted"]] = report["copied"]
        strikes += life.killed
        fates = _strike(chance, state, older)
        strikes += bool(fates)
        description += ", ".join(fates)
        if chance.random() < 0.3:  # The start that puts it back is killed too.
            strikes += _killed(chance, home, partial(_look, state))[0].killed
        report = _report(act_in_child(home, partial(_look, state)), description, home)
        numbers = report["numbers"]
        missing = acknowledged.keys() - set(numbers)
        is_told = report["told_at"] > told
        if foreign := [n for n in numbers if n >= following]:
            raise PromiseBrokenError(f"{description}: {foreign} were never noted (home: {home})")
        if missing and not is_told:
            raise PromiseBrokenError(f"{description}: {sorted(missing)} are missing, untold (home: {home})")
        if any(acknowledged[n] for n in missing) and not report["paused"]:
            raise PromiseBrokenError(
                f"{description}: cancels are missing: {missing}; nothing is paused ({home})"
            )
        if missing and not fates:
            raise PromiseBrokenError(
                f"{description}: {missing} are missing after a kill alone (home: {home})"
            )
        if "newest copy" not in " ".join(fates) and any(acknowledged[n] for n in missing):
            raise PromiseBrokenError(f"{description}: a whole copy has {missing} (home: {home})")
        acknowledged = {n: acknowledged.get(n, True) for n in numbers}
        told = report["told_at"]
        _report(act_in_child(home, partial(_go_on, state)), description, home)
        if older.exists():
            shutil.rmtree(older)
        older.mkdir()
        for path in state.glob(f"{NAME}*"):
            shutil.copyfile(path, older / path.name)
    for folder in place.glob(f"state-{number}*"):
        shutil.rmtree(folder)
    return Counter(strikes=strikes, cases=1)


def _killed(chance: random.Random, home: Path, act: partial[None]) -> tuple[Life, str]:
    """A child that is killed before a file operation or at any moment; or that ends by itself."""
    if chance.random() < 0.5:
        at = chance.randint(1, _OPERATIONS)
        return act_in_child(
            home, act, strike_at(at, torn=chance.random() < 0.5)
        ), f"killed before operation {at}"
    seconds = chance.uniform(0.0, _SECONDS)
    return act_until_time(home, act, seconds), f"killed after {seconds:.2f} s"


def _report(life: Life, description: str, home: Path) -> dict[str, Any]:
    if life.error is not None or not life.reports:
        raise PromiseBrokenError(f"{description}; the next start: {life.error} {life.message} (home: {home})")
    return life.reports[-1]


def _strike(chance: random.Random, state: Path, older: Path) -> list[str]:
    """Give the database and each copy a fate; says which are not left as they were.

    Nothing tells of a newest copy that is gone with the database, nor of a damaged one beside an older
    database: these fates are not given together.
    """
    copies = [copy.path for copy in Copies(state / "copies").listed()]
    fates: list[str] = []
    for name, path in zip(("database", "newest copy", "older copy"), (state / NAME, *copies), strict=False):
        fate = chance.choice((*_FATES, "older") if name == "database" and older.exists() else _FATES)
        if name != "database" and fates:
            fate = {"gone": "damaged"}.get(fate, fate) if fates[0] != "database older" else "left"
        if fate == "left" or not path.exists():
            continue
        if name == "database":
            for log in state.glob(f"{NAME}-*"):
                log.unlink()
        if fate == "older":
            for log in older.iterdir():
                shutil.copyfile(log, state / log.name)
        elif fate == "gone":
            path.unlink()
        else:
            data = path.read_bytes()
            at = chance.randrange(len(data) or 1)
            path.write_bytes(chance.choice((b"", data[:at], data[:100] + b"noise" * 30 + data[250:])))
        fates.append(f"{name} {fate}")
    return fates


def _change(state: Path, following: int, say: Say) -> None:
    logging.disable()
    control = ControlState(state)
    for number in range(following, following + _CHANGES):
        is_copied = number % 2 == 0
        cancel = tables.cancels.insert().values(partition=str(number), run_id="run", at=1.0)
        control.write(lambda connection, cancel=cancel: connection.execute(cancel), copy=is_copied)  # type: ignore[misc]
        say(noted=number, copied=is_copied)


def _look(state: Path, say: Say) -> None:
    logging.disable()
    control = ControlState(state)
    query = sa.select(tables.cancels.c.partition)
    numbers = control.read(lambda connection: [int(row[0]) for row in connection.execute(query)])
    is_paused = pause_of(control) is not None
    say(numbers=numbers, paused=is_paused, told_at=max((r.at for r in control.restorations()), default=0.0))


def _go_on(state: Path, say: Say) -> None:
    """What a person does who was told: look, and have the work go on."""
    resume(ControlState(state))
    say(resumed=True)
