"""Prune, repair, withdraw, export and others, killed at each of their file operations, and done again.

A case is a home with something to do for the command. It is killed before one operation, half of a write's
bytes let through. Then what readers see must be whole, and the same command must come to the same end as one
that was never killed. Fault table row 28.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from faults.file_operations import strike_at
from faults.home_life import RANGE_SIZE, materialize, run_command, settings_of
from faults.ledger import PromiseBrokenError
from faults.lives import Life, act_in_child
from faults.old_data import ASSETS, Archive, Trial, archive_at
from faults.partition_life import Say
from faults.several_files import partition_family
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.files.layout import Home, PartitionPaths
from vlm_durable.journal.inspection import inspect_journals

_STEP = 10
_OTHER_SETTINGS = {"max_new_tokens": 50}
_DESCRIPTIONS = "property_descriptions"
_FIRST = PropertyRange(0, RANGE_SIZE).key
_LONG_AGO = time.time() - 86400.0


@dataclass(frozen=True)
class Care:
    """A command that is killed. prepare: gives a home something to do for it. words: of the command.

    start, step: the steps of the history that the home is as after, before and after the command.
    """

    prepare: Callable[[Archive, Path], None]
    words: tuple[str, ...]
    start: int = _STEP
    step: int = _STEP


def _for_prune(archive: Archive, home: Path) -> None:
    """A journal of other settings that nothing will go on with, and a file that was set aside."""
    settings = settings_of(home, **_OTHER_SETTINGS)
    materialize(settings, Catalog.open(home).ranges[1], lambda **report: None, limit=1)
    paths = _second_partition(home)
    for path in paths.journals.rglob("*"):
        os.utime(path, (_LONG_AGO, _LONG_AGO))
    paths.quarantine.mkdir(parents=True, exist_ok=True)
    (paths.quarantine / "damaged.parquet").write_bytes(b"damaged")


def _for_repair(archive: Archive, home: Path) -> None:
    """A published file that is cut off, a second copy that is gone, and a file that is none of ours."""
    paths = _second_partition(home)
    paths.published.write_bytes(paths.published.read_bytes()[:-30])
    Home(home).asset("property_embeddings").partition(paths.key).version(0).unlink()
    paths.published.with_name("mine.parquet").write_bytes(b"mine")


def _for_withdraw(archive: Archive, home: Path) -> None:
    """The list of what is to be withdrawn."""
    (home.parent / f"{home.name}.ids").write_text("p4\n")


def _for_export(archive: Archive, home: Path) -> None:
    """Nothing: what is published is exported."""


def _for_accept(archive: Archive, home: Path) -> None:
    """A partition that was put back to its version before, as it was in all its files."""
    now, then = (
        partition_family(home_path, asset=_DESCRIPTIONS, key=_FIRST) for home_path in (home, archive.home(5))
    )
    for label, path in now.items():
        if "mark" in label:
            continue
        path.unlink(missing_ok=True)
        if then[label].exists():
            shutil.copy2(then[label], path)


def _for_ingest(archive: Archive, home: Path) -> None:
    """A listing with two properties more."""
    archive.history.write_listing(home, archive.history.listed_after(_STEP))


CARES = {
    "prune": Care(_for_prune, ("prune", "--yes")),
    "repair": Care(_for_repair, ("repair", "--deep", "--yes")),
    "withdraw": Care(_for_withdraw, ("withdraw", "--ids", "IDS", "--yes")),
    "export": Care(_for_export, ("export", "EXPORT")),
    "accept": Care(_for_accept, ("repair", "--accept-version", _FIRST, "--yes")),
    "ingest": Care(_for_ingest, ("ingest", "LISTING", "--image-root", os.sep), start=8, step=9),
}


def killed(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """One of the commands, killed at each of its operations in turn, and done again."""
    name = list(CARES)[number % len(CARES)]
    archive, care = archive_at(place), CARES[name]
    prepared, finished, operations = _prepared(archive, name)
    home = place / f"care-{number}"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(prepared, home)
    if name in _LISTED:
        care.prepare(archive, home)
    at = 1 + number // len(CARES) % operations
    life = _command(home, care, at)
    if not life.killed:
        shutil.rmtree(home)
        return Counter(cases=1)
    description = f"{name} killed before its operation {at} of {operations}"
    try:
        readers_see_whole_files(home, archive, name)
        journals_are_believed_whole_or_not_at_all(home)
        _command(home, care)
        if name == "prune":
            # Settling an interrupted change of a record keeps its older copy aside, which goes next.
            _command(home, care)
        if (state := _result(home)) != finished:
            different = sorted(
                name_ for name_ in {*state, *finished} if state.get(name_) != finished.get(name_)
            )
            raise PromiseBrokenError(f"done again, it ended otherwise: {', '.join(different)}")
        Trial(home, archive, care.step, undisturbed=_finished_home(archive, name)).finish()
    except PromiseBrokenError as broken:
        raise PromiseBrokenError(f"{description}: {broken} (home: {home})") from broken
    shutil.rmtree(home)
    return Counter({"kills": 1, "cases": 1})


def readers_see_whole_files(home: Path, archive: Archive, name: str) -> None:
    """Each published file is the one before or the one after, whole. Raises PromiseBrokenError."""
    after, before = _finished_home(archive, name), archive.folder / f"{name}-prepared"
    for asset in ASSETS:
        for path in sorted((before / asset).glob("*.parquet")):
            now = _digest(home / asset / path.name)
            if now not in (_digest(path), _digest(after / asset / path.name)) and name != "withdraw":
                raise PromiseBrokenError(f"readers see neither the old file nor the new one at {path.name}")
            if now is None and path.name != "mine.parquet":
                raise PromiseBrokenError(f"readers see no file at {path.name}")


def journals_are_believed_whole_or_not_at_all(home: Path) -> None:
    """No journal lacks rows that its mark promises. Raises PromiseBrokenError."""
    for asset in map(Home(home).asset, ASSETS):
        for key in sorted(asset.touched_keys()):
            paths = asset.partition(key)
            for journal in inspect_journals(paths.journals, paths.high_water_marks, key, deep=True):
                if journal.lost_rows or journal.troubles:
                    raise PromiseBrokenError(f"a journal of {asset.name} {key} is half believed: {journal}")


def _prepared(archive: Archive, name: str) -> tuple[Path, dict[str, str], int]:
    """A home with something to do for a command, what that ends with, and in how many operations."""
    prepared, done = archive.folder / f"{name}-prepared", _finished_home(archive, name)
    if name not in _operations:
        shutil.copytree(archive.home(CARES[name].start), prepared)
        _act(prepared, lambda say: CARES[name].prepare(archive, prepared))
        shutil.copytree(prepared, done)
        if name in _LISTED:
            CARES[name].prepare(archive, done)
        _operations[name] = _command(done, CARES[name]).operations
    return prepared, _result(done), _operations[name]


_operations: dict[str, int] = {}
_LISTED = ("withdraw", "ingest")
"""Commands with a list that lies beside the home."""


def _finished_home(archive: Archive, name: str) -> Path:
    return archive.folder / f"{name}-finished"


def _command(home: Path, care: Care, at: int = 0) -> Life:
    """Run the command; killed before its ``at``-th operation (0: not). Raises PromiseBrokenError."""
    names = {"IDS": f"{home}.ids", "EXPORT": f"{home}/export", "LISTING": f"{home}.listing.jsonl"}
    words = [names.get(word, word) for word in care.words]
    life = act_in_child(home, partial(_run, home, words=words), strike_at(at, torn=True))
    codes = [report for report in life.reports if report.get("code")]
    if not life.killed and (life.error is not None or codes):
        raise PromiseBrokenError(f"vlm-assets {' '.join(words)} failed: {codes} {life.message}")
    return life


def _run(home: Path, say: Say, *, words: list[str]) -> None:
    run_command(home, say, words)


def _act(home: Path, act: Callable[[Say], None]) -> None:
    life = act_in_child(home, act)
    if life.error is not None:
        raise PromiseBrokenError(f"{life.error}: {life.message}")


def _result(home: Path) -> dict[str, str]:
    """What a command leaves that people look for: exported files, and the names of what was set aside."""
    state = {}
    for path in sorted((home / "export").glob("*.parquet")):
        state[path.name] = str(_digest(path))
    for path in sorted((home / ".quarantine").rglob("*")):
        # An ingest that was killed half way leaves the catalogue before it there.
        if path.is_file() and "property_catalog" not in path.parts:
            state[str(_digest(path))] = "set aside"
    state["journals"] = str(sorted(path.name for path in _second_partition(home).journals.glob("*")))
    return state


def _second_partition(home: Path) -> PartitionPaths:
    asset = Home(home).asset(_DESCRIPTIONS)
    return asset.partition(asset.published_keys()[1])


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
