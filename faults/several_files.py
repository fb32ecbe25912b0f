"""Several files that vouch for each other, struck at once: gone, damaged, older, or of another home.

A family is the catalogue with its copies and its mark, or one partition's file with its versions, its record
and its mark. Rare combinations come in their turn, others are drawn. A home must then end as an undisturbed
one, or stop with a sentence and a command that works (old_data.py). A record or a mark of the newest version
is always left where older files are put back: without one nobody could know. Fault table rows 29 and 30.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from faults.failing_calls import CODES, fail_to_read
from faults.file_operations import fail_at
from faults.home_life import compare_catalog, open_catalog
from faults.ledger import PromiseBrokenError
from faults.lives import act_in_child
from faults.old_data import ASSETS, Archive, archive_at, ended, trial_at
from faults.partition_life import Say
from vlm_catalog.catalog import CatalogMissingError
from vlm_catalog.catalog_copies import backup_paths, catalog_path, mark_path, quarantine
from vlm_durable.files.layout import Home
from vlm_durable.versions.version_mark import mark_copies

Family = Callable[[Path], dict[str, Path]]
"""Names the files of a family in a home."""
Fates = dict[str, str]
"""What becomes of files, by their name in the family; the others are left."""

INGESTS = (1, 5, 9)
"""The steps of a home's history that ingest."""
_STEPS = {"first ingest": INGESTS[:1], "ingest": INGESTS[1:]}
"""At which a family is struck; others at any but the first."""

FATES = ("left", "left", "left", "gone", "damaged", "older", "another's")
_OPERATIONS = 40
_READINGS = 12
"""Each a few more than a repair of the catalogue takes."""

_NO_MARK = {"mark": "gone", "mark copy": "gone"}
_MARK_DAMAGED = {"mark": "damaged", "mark copy": "damaged"}
_MARK_OF_ANOTHER = {"mark": "another's", "mark copy": "another's"}
_FILES = ("file", "copy", "version 1", "version 2")
_RECORDS = ("record", "record copy")
_WITNESSES = (*_RECORDS, "mark", "mark copy")

RARE: tuple[tuple[str, Fates], ...] = (
    ("catalogue", {"file": "another's", **_NO_MARK}),
    ("catalogue", {"file": "of the same number", **_NO_MARK}),
    ("catalogue", {"file": "gone", "copy": "damaged", "before": "damaged"}),
    ("catalogue", {"file": "damaged", "copy": "damaged"}),
    ("catalogue", _NO_MARK),
    ("catalogue", {"copy": "gone", **_NO_MARK}),
    ("catalogue", _MARK_DAMAGED),
    ("catalogue", {"file": "older", **_MARK_DAMAGED}),
    ("catalogue", {"copy": "another's", "mark copy": "another's"}),
    ("catalogue", {"file": "another's", "copy": "another's", "mark copy": "another's"}),
    ("catalogue", {"note": "damaged"}),
    ("first ingest", {"mark copy": "another's"}),
    ("first ingest", {"copy": "another's", "mark copy": "another's"}),
    ("first ingest", _MARK_OF_ANOTHER),
    ("ingest", {"file": "older", "mark": "older", "mark copy": "older", "copy": "damaged"}),
    ("partition", {"record": "damaged", "record copy": "damaged", **_NO_MARK}),
    ("partition", {"record": "damaged", "record copy": "damaged", "file": "gone", "copy": "gone"}),
    ("partition", dict.fromkeys((*_FILES, *_RECORDS), "gone")),
    ("partition", dict.fromkeys((*_FILES, *_RECORDS), "older")),
    ("partition", {"record": "older", "file": "gone", "copy": "gone"}),
    ("partition", {"record": "older", "copy": "another's"}),
    ("partition", {"mark": "older", "mark copy": "older"}),
    ("partition", {"file": "another's", "copy": "damaged"}),
    ("partition", _MARK_DAMAGED),
    ("partition", {"record": "damaged", **_MARK_DAMAGED}),
    ("partition", {"file": "gone", "copy": "gone", **_MARK_DAMAGED}),
    ("partition", {"file": "gone", "record": "another's", "record copy": "damaged"}),
    ("partition", {"file": "another's", "record": "damaged", **_MARK_OF_ANOTHER}),
    ("partition", {"file": "another's", "record": "another's", "record copy": "another's"}),
)
_BEFORE_AN_INGEST: tuple[Fates, ...] = (
    {},
    {"file": "damaged"},
    {"file": "older"},
    _NO_MARK,
    {"file": "gone"},
    {"copy": "damaged"},
)


def struck(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Strike several files of one family, and go on."""
    archive = archive_at(place)
    name, fates = _drawn(chance) if number % 2 else RARE[number // 2 % len(RARE)]
    step, family, older = _somewhere(archive, chance, name, fates)
    with trial_at(archive, place / f"several-{number}", step) as trial:
        description = _strike(trial.home, archive, step, older, family, fates, chance)
        if not description:
            return Counter(cases=1)
        return ended(trial, chance, "strikes", f"{name} at step {step}: {description}", has_copy=True)


def failing(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Strike the catalogue before an ingest; a call fails while it is opened, compared or ingested."""
    archive, step = archive_at(place), chance.choice(INGESTS)
    acts = (open_catalog, compare_catalog, partial(_ingest, archive, step))
    act, fates = acts[number % len(acts)], _BEFORE_AN_INGEST[number // len(acts) % len(_BEFORE_AN_INGEST)]
    with trial_at(archive, place / f"failing-{number}", step, start=step - 1) as trial:
        older = max(0, *(ingest for ingest in (0, *INGESTS) if ingest < step - 1)) if step > 1 else 0
        description = _strike(trial.home, archive, step - 1, older, catalog_family, fates, chance)
        reads = chance.random() < 0.2
        at = chance.randint(1, _READINGS if reads else _OPERATIONS)
        before = None if reads else fail_at(at, chance.choice(CODES))
        life = act_in_child(trial.home, partial(_act, trial.home, act, at if reads else 0), before)
        description = (
            f"catalogue before step {step}: {description}; operation {at} failed: {life.error} {life.message}"
        )
        if life.error is not None and not life.is_ours and life.error != "OSError":
            raise PromiseBrokenError(f"{description} (home: {trial.home})")
        is_met = any("unread" in report for report in life.reports) if reads else life.operations >= at
        failed = {"failed calls": int(is_met or life.error is not None)}
        return ended(trial, chance, "goings on", description, has_copy=True) | Counter(failed)


def catalog_family(home: Path) -> dict[str, Path]:
    """The catalogue, its copies, its mark, and the note of its last repair."""
    copy, earlier = backup_paths(home)
    mark, mark_copy = mark_copies(mark_path(home))
    paths = (catalog_path(home), copy, earlier, mark, mark_copy, quarantine(home) / "put_back.json")
    return dict(zip(("file", "copy", "before", "mark", "mark copy", "note"), paths, strict=True))


def partition_family(home: Path, *, asset: str = ASSETS[0], key: str = "none") -> dict[str, Path]:
    """One partition's file, its versions, its record and its mark."""
    paths = Home(home).asset(asset).partition(key)
    files = (paths.published, *map(paths.version, (0, 1, 2)))
    records = (paths.record, paths.record_copy, *mark_copies(paths.version_mark))
    return dict(zip((*_FILES, *_WITNESSES), (*files, *records), strict=True))


def _drawn(chance: random.Random) -> tuple[str, Fates]:
    name, family = chance.choice((("catalogue", catalog_family), ("partition", partition_family)))
    fates = {label: chance.choice(FATES) for label in family(Path())}
    witnesses = [label for label in _WITNESSES if label in fates]
    if all(fates[label] != "left" for label in witnesses):
        fates[chance.choice(witnesses)] = "left"
    return name, fates


def _somewhere(archive: Archive, chance: random.Random, name: str, fates: Fates) -> tuple[int, Family, int]:
    """A step, a family of files that are there at that step, and the last step at which they were older."""
    steps = _STEPS.get(name, range(2, len(archive.history.steps) + 1))
    families: list[Family] = [catalog_family]
    if name == "partition":
        keys = Home(archive.home(steps[-1])).asset(ASSETS[0]).published_keys()
        families = [partial(partition_family, asset=asset, key=key) for asset in ASSETS for key in keys]
    places = []
    for step in steps:
        for family in families:
            now = family(archive.home(step))["file"]
            older = [
                earlier_step
                for earlier_step in range(1, step)
                if _differs(family(archive.home(earlier_step))["file"], now)
            ]
            if now.exists() and (older or "older" not in fates.values()):
                places.append((step, family, older[-1] if older else 0))
    return chance.choice(places)


def _differs(then: Path, now: Path) -> bool:
    return then.exists() and now.exists() and then.read_bytes() != now.read_bytes()


def _strike(
    home: Path, archive: Archive, step: int, older: int, family: Family, fates: Fates, chance: random.Random
) -> str:
    """Do to each file what is its fate, where that can be done; says what was done."""
    files, done = family(home), []
    for label, fate in fates.items():
        path = files[label]
        if fate == "gone" and path.exists():
            path.unlink()
        elif fate == "damaged" and path.exists():
            _damage(path, chance)
        elif fate == "damaged" and label == "note":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"{")
        elif fate in ("older", "another's", "of the same number"):
            other = _other_home(fate, archive, step, older)
            if not _differs(family(other)[label], path):
                continue
            shutil.copy2(family(other)[label], path)
        else:
            continue
        done.append(f"{path.relative_to(home)} {fate}")
    return ", ".join(done)


def _other_home(fate: str, archive: Archive, step: int, older: int) -> Path:
    """The home from which a file comes that is whole and wrong."""
    if fate == "older":
        return archive.home(older)
    if fate == "another's":
        return archive_at(archive.folder.parent, "q").home(step)
    return _of_the_same_number(archive, step)


def _damage(path: Path, chance: random.Random) -> None:
    """Invert eight bytes, in half of the cases far from the end, where a parquet file has its rows."""
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data) // chance.choice((1, 3)))
    data[at : at + 8] = bytes(255 - byte for byte in data[at : at + 8])
    path.write_bytes(data)


def _of_the_same_number(archive: Archive, step: int) -> Path:
    """A copy of the home that somebody gave another listing at the last ingest; made once."""
    ingest = max(number for number in INGESTS if number <= step)
    home = archive.folder / f"other-{ingest}"
    if not home.exists():
        shutil.copytree(archive.home(ingest - 1), home)
        order = random.Random(ingest)
        count = archive.history.listed_after(ingest)
        life = act_in_child(home, lambda say: archive.history.take_in(home, count, order))
        if life.error is not None:
            raise PromiseBrokenError(f"another ingest: {life.error}: {life.message}")
    return home


def _ingest(archive: Archive, step: int, home: Path) -> None:
    archive.history.take_in(home, archive.history.listed_after(step))


def _act(home: Path, act: Callable[[Path], None], reading: int, say: Say) -> None:
    if reading:
        fail_to_read(home, reading, say)
    with contextlib.suppress(CatalogMissingError):
        act(home)
