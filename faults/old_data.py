"""Files that are whole and are the wrong ones: put back to an older version, or exchanged; and lost sectors.

A case is a copy of a home at one step of its history (home_life.py). Files are exchanged under it; then it
goes on. It must end as an undisturbed one does, or stop with a sentence that names a command. That command is
run, and then all must be as in the undisturbed home. Finished rows are computed again only where a sentence
named their partition before. Fault table rows 24 to 26.
"""

from __future__ import annotations

import hashlib
import random
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from faults.home_life import History, go_on, run_command, tell_audit, tell_contents
from faults.ledger import PromiseBrokenError
from faults.lives import Life, act_in_child
from vlm_catalog.catalog_copies import backup_paths, catalog_path
from vlm_durable.files.layout import AssetFolders, Home
from vlm_durable.versions.version_mark import mark_copies

ASSETS = ("property_descriptions", "property_embeddings")
SECTOR = 4096
_STOPS = 4
"""How often a home may stop before it must have come to its end."""

Files = tuple[str, ...]
"""Paths in a home, of files or folders, that are exchanged together."""

_COMMAND = re.compile(r"`(vlm-assets [^`]+)`|(vlm-assets (?:repair|withdraw|prune|restore)\b[^\n.;]*)")
_RECOMPUTE = re.compile(r"\[recompute (\S+) (\S+)\]")


@dataclass(frozen=True)
class Ending:
    """What an undisturbed home comes to. computed: the rows that it computed on the way."""

    contents: dict[str, Any]
    computed: Counter[tuple[str, str, str]]


@dataclass
class Archive:
    """A home as it was after each step of its history, and how each of them ends undisturbed."""

    folder: Path
    history: History
    endings: dict[Path, Ending] = field(default_factory=dict)

    def home(self, step: int) -> Path:
        """The home after so many steps; never changed."""
        if not (self.folder / "step-0").exists():
            self._build()
        return self.folder / f"step-{step}"

    def _build(self) -> None:
        home = self.folder / "home"
        home.mkdir(parents=True)
        shutil.copytree(home, self.folder / "step-0")
        for number, step in enumerate(self.history.steps, start=1):
            life = act_in_child(home, partial(_take_step, step, home))
            if life.error is not None:
                raise PromiseBrokenError(
                    f"the history stopped at step {number}: {life.error}: {life.message}"
                )
            shutil.copytree(home, self.folder / f"step-{number}")

    def ending(self, step: int, start: Path | None = None) -> Ending:
        """How the home goes on undisturbed from a step, or from another ``start`` at that step."""
        start = start or self.home(step)
        if start not in self.endings:
            home = self.folder / "undisturbed"
            shutil.rmtree(home, ignore_errors=True)
            shutil.copytree(start, home)
            trial = Trial(home, self, step)
            trial.go_on()
            self.endings[start] = Ending(trial.contents(), trial.computed)
            shutil.rmtree(home)
        return self.endings[start]


def _take_step(step: Callable[[Path], None], home: Path, say: Callable[..., None]) -> None:
    step(home)


@dataclass
class Trial:
    """A home that goes on from a step of its history after something was done to it."""

    home: Path
    archive: Archive
    step: int
    undisturbed: Path | None = None
    """The home that it is compared with; None: as it was after the step."""
    copy: Path | None = None
    """A whole copy of the home that a person has; None: there is none."""
    order: random.Random | None = None
    """In which the listing is ingested again; None: as before."""
    sentences: list[str] = field(default_factory=list)
    computed: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    recompute: set[tuple[str, str]] = field(default_factory=set)
    stops: int = 0

    def finish(self) -> None:
        """Go on to the end, with the commands that are named on the way. Raises PromiseBrokenError."""
        ending = self.archive.ending(self.step, self.undisturbed)
        whole = self._whole_files(ending)
        self._look()
        self.go_on()
        if self._look():
            self._command(["repair", "--deep", "--yes"])
            self.go_on()
            if commands := [words for sentence in self._look() for words in self._commands_in(sentence)]:
                self._command(commands[0])
                self.go_on()
            if wrong := self._look():
                self._broken(f"still wrong after its repair: {wrong}")
        contents = self.contents()
        different = sorted(
            name for name in {*contents, *ending.contents} if contents.get(name) != ending.contents.get(name)
        )
        if different:
            self._broken(f"not as undisturbed: {', '.join(different)}; it was said: {self.sentences}")
        self.check_computed(ending, whole)

    def go_on(self) -> None:
        """Go on, and obey each stop. Raises PromiseBrokenError where one names no command that works."""
        count = self.archive.history.listed_after(self.step)
        while True:
            life = self._child(
                lambda say: go_on(
                    self.home, say, self.archive.history, count, order=self.order, recompute=[*self.recompute]
                )
            )
            for report in life.reports:
                if "computed" in report:
                    self.computed[tuple(report["computed"])] += 1
                if "note" in report:
                    self.sentences.append(report["note"])
            if life.error is None:
                return
            self.stops += 1
            self.sentences.append(life.message)
            if not life.is_ours:
                self._broken(f"{life.error}: {life.message}")
            if self.stops > _STOPS:
                self._broken(f"stopped {self.stops} times, at last with {life.error}: {life.message}")
            self._obey(life)

    def contents(self) -> dict[str, Any]:
        """What readers find."""
        life = self._child(lambda say: tell_contents(self.home, say))
        if life.error is not None:
            self._broken(f"it cannot be read: {life.error}: {life.message}")
        return next(dict(report["contents"]) for report in life.reports if "contents" in report)

    def _look(self) -> list[str]:
        """Audit; what is wrong. What is said is kept. A stop says nothing here: going on meets it too."""
        life = self._child(lambda say: tell_audit(self.home, say))
        outcome = {name: value for report in life.reports for name, value in report.items()}
        self.sentences += [*outcome.get("wrong", ()), *outcome.get("warnings", ())]
        return list(outcome.get("wrong", ()))

    def _obey(self, life: Life) -> None:
        if anew := _RECOMPUTE.findall(life.message):
            self.recompute.update(anew)
            return
        commands = self._commands_in(life.message)
        if not commands:
            self._broken(f"it stopped and named no command: {life.error}: {life.message}")
        self._command(commands[0])

    def _commands_in(self, sentence: str) -> list[list[str]]:
        """The commands that a sentence names, without those that need a copy which nobody has."""
        commands = [shlex.split(match[1] or match[2])[1:] for match in _COMMAND.finditer(sentence)]
        if self.copy is not None:
            catalog = str(catalog_path(self.copy))
            commands = [[catalog if word == "FILE" else word for word in words] for words in commands]
        return [words for words in commands if "FILE" not in words]

    def _command(self, words: list[str]) -> None:
        if words[0] in ("repair", "withdraw", "prune", "restore") and "--yes" not in words:
            words = [*words, "--yes"]
        life = self._child(lambda say: run_command(self.home, say, words))
        (answer,) = [report for report in life.reports if "code" in report] or [
            {"code": None, "output": life.message}
        ]
        self.sentences.append(answer["output"])
        if answer["code"] is None or "Traceback" in answer["output"]:
            self._broken(f"vlm-assets {' '.join(words)} failed: {answer['output']}")
        for asset in ASSETS:
            self.recompute |= {
                (asset, key) for key in re.findall(rf"{asset} (\S+): compute again", answer["output"])
            }

    def check_computed(self, ending: Ending, whole: set[tuple[str, str]]) -> None:
        """Finished rows were computed again only where that was said, and as many as was said."""
        again = Counter((asset, key) for asset, key, _ in (self.computed - ending.computed).elements())
        for (asset, key), rows in again.items():
            # Vectors are made anew with the descriptions that they are of.
            follows = asset == ASSETS[1] and (ASSETS[0], key) in again
            if (asset, key) in whole and not follows:
                self._broken(
                    f"{rows} rows of {asset} {key} were computed again beside a whole file of them; "
                    f"it was said: {self.sentences}"
                )
            if not any(key in sentence for sentence in self.sentences):
                self._broken(
                    f"{rows} finished rows of {asset} {key} were computed again, and nothing said so"
                )

    def _whole_files(self, ending: Ending) -> set[tuple[str, str]]:
        """The partitions that were complete before, with a whole file still there and what vouches for it."""
        before, done = self.undisturbed or self.archive.home(self.step), ending.computed
        complete = set()
        for asset in ASSETS:
            now, then = Home(self.home).asset(asset), Home(before).asset(asset)
            for key in then.published_keys():
                if any((asset, key) == (its_asset, its_key) for its_asset, its_key, _ in done):
                    continue
                if not any(
                    _digest(path) == _digest(now_path)
                    for path, now_path in zip(_vouching(then, key), _vouching(now, key), strict=True)
                ):
                    continue
                digest = _digest(then.partition(key).published)
                copies = (now.partition(key).published, *map(now.partition(key).version, (0, 1, 2)))
                if any(_digest(path) == digest for path in copies):
                    complete.add((asset, key))
        return complete

    def _child(self, act: Callable[[Callable[..., None]], None]) -> Life:
        life = act_in_child(self.home, act)
        if life.killed:
            self._broken("a process died by itself")
        return life

    def _broken(self, sentence: str) -> None:
        raise PromiseBrokenError(f"{sentence} (home: {self.home})")


def _vouching(asset: AssetFolders, key: str) -> list[Path]:
    """The files that say which file of a partition is the newest."""
    paths = asset.partition(key)
    return [paths.record, paths.record_copy, *mark_copies(paths.version_mark)]


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


# What is exchanged together


def _of_partitions(home: Path, choose: Callable[[AssetFolders, str], Sequence[Path]]) -> Iterator[Files]:
    for name in ASSETS:
        asset = Home(home).asset(name)
        for key in asset.published_keys():
            yield _relative(home, choose(asset, key))


def _relative(home: Path, paths: Sequence[Path]) -> Files:
    return tuple(str(path.relative_to(home)) for path in paths)


def _versions_of(asset: AssetFolders, key: str) -> list[Path]:
    paths = asset.partition(key)
    return [paths.record, paths.record_copy, *map(paths.version, (0, 1, 2))]


def _each(home: Path, pattern: str) -> Iterator[Files]:
    for path in sorted(home.glob(pattern)):
        yield (str(path.relative_to(home)),)


def _copies_of_each(home: Path, pattern: str, other: Callable[[Path], Path]) -> Iterator[Files]:
    for path in sorted(home.glob(pattern)):
        yield _relative(home, (path, other(path)))


_MARKS = ".state/high_water_marks/*/*"
_VERSION_MARKS = ".state/version_marks/*"

Kinds = dict[str, Callable[[Path], Iterator[Files]]]

ALONE: Kinds = {
    "catalogue": lambda home: iter([_relative(home, [catalog_path(home)])]),
    "copy of the catalogue": lambda home: iter([_relative(home, [backup_paths(home)[0]])]),
    "published file": lambda home: _of_partitions(home, lambda asset, key: [asset.partition(key).published]),
    "record": lambda home: _of_partitions(home, lambda asset, key: [asset.partition(key).record]),
    "record copy": lambda home: _of_partitions(home, lambda asset, key: [asset.partition(key).record_copy]),
    "second copy": lambda home: _of_partitions(home, lambda asset, key: [asset.partition(key).version(0)]),
    "earlier version": lambda home: _of_partitions(
        home, lambda asset, key: [asset.partition(key).version(1)]
    ),
    "high-water mark": lambda home: _each(home, f"{_MARKS}/*.json*"),
    "version mark": lambda home: _each(home, f"{_VERSION_MARKS}/*.json"),
}
"""Single files by their kind."""

WRITTEN_ONCE: Kinds = {
    "manifest": lambda home: _each(home, ".journal/*/*/*/manifest-*"),
    "segment": lambda home: _each(home, ".journal/*/*/*/segment-*"),
}
"""Single files that have no older version."""

TOGETHER: Kinds = {
    "catalogue and its copy": lambda home: iter(
        [_relative(home, [catalog_path(home), backup_paths(home)[0]])]
    ),
    "catalogue and all copies": lambda home: iter(
        [_relative(home, [catalog_path(home), *backup_paths(home)])]
    ),
    "record and its copy": lambda home: _of_partitions(
        home, lambda asset, key: [asset.partition(key).record, asset.partition(key).record_copy]
    ),
    "file and record": lambda home: _of_partitions(
        home, lambda asset, key: [asset.partition(key).published, asset.partition(key).record]
    ),
    "file and second copy": lambda home: _of_partitions(
        home, lambda asset, key: [asset.partition(key).published, asset.partition(key).version(0)]
    ),
    "file, record and its copy": lambda home: _of_partitions(
        home,
        lambda asset, key: [
            asset.partition(key).published,
            asset.partition(key).record,
            asset.partition(key).record_copy,
        ],
    ),
    "versions of a partition": lambda home: _of_partitions(home, _versions_of),
    "whole partition": lambda home: _of_partitions(
        home, lambda asset, key: [asset.partition(key).published, *_versions_of(asset, key)]
    ),
    "both slots of a mark": lambda home: _copies_of_each(
        home, f"{_MARKS}/*.json", lambda path: path.with_name(f"{path.name}.other")
    ),
    "both copies of a version mark": lambda home: _copies_of_each(
        home, f"{_VERSION_MARKS}/*[!y].json", lambda path: path.with_name(f"{path.stem}.copy.json")
    ),
    "journal of a generation": lambda home: _each(home, ".journal/*/*/*"),
    "all journals": lambda home: iter([(".journal",)]),
    "all marks": lambda home: iter([(".state/high_water_marks",)]),
    "all version marks": lambda home: iter([(".state/version_marks",)]),
    "all of .state": lambda home: iter([(".state",)]),
    "all of .versions": lambda home: iter([(".versions",)]),
    "all published files of an asset": lambda home: iter([(asset,) for asset in ASSETS]),
}
"""Files that are copies of one another, or speak of one another, and whole folders."""


# The three classes of faults

_archives: dict[tuple[Path, str], Archive] = {}


def archive_at(place: Path, prefix: str = "p") -> Archive:
    """The history of homes in a place, made when it is first asked for."""
    name = (place, prefix)
    if name not in _archives:
        _archives[name] = Archive(place / f"history-{prefix}", History(prefix))
    return _archives[name]


def put_back(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Put one file, or files of a kind together, back to an older valid version."""
    archive = archive_at(place)
    kinds = ALONE | TOGETHER
    name = list(kinds)[number % len(kinds)]
    last = len(archive.history.steps)
    choices = [
        (now, then, files)
        for now in range(2, last + 1)
        for files in kinds[name](archive.home(now))
        for then in range(1, now)
        if _may_be_older(name, archive.home(then), archive.home(now), files)
    ]
    if not choices:
        return Counter(cases=1)
    now, then, files = chance.choice(choices)
    with trial_at(archive, place / f"put-back-{number}", now) as trial:
        for path in files:
            _copy(archive.home(then) / path, trial.home / path)
        return ended(trial, chance, "old files", f"{name} of step {then} at step {now}: {', '.join(files)}")


def _may_be_older(name: str, old: Path, new: Path, files: Files) -> bool:
    """Whether files are there in both states and differ. Alone, or all of them."""
    in_both = [path for path in files if (old / path).exists() and (new / path).exists()]
    return bool(in_both) and all(_content(old / path) != _content(new / path) for path in in_both)


def exchange(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Exchange two files of a kind between partitions, assets, generations or homes."""
    archive = archive_at(place)
    kinds = (
        ALONE | WRITTEN_ONCE | {name: TOGETHER[name] for name in ("record and its copy", "file and record")}
    )
    name = list(kinds)[number % len(kinds)]
    with_homes = number // len(kinds) % 3 == 2
    now = chance.randint(4, len(archive.history.steps))
    groups = list(kinds[name](archive.home(now)))
    with trial_at(archive, place / f"exchange-{number}", now) as trial:
        if with_homes and groups:
            other, (first, *_) = archive_at(place, "q").home(now), chance.sample(groups, 1)
            pairs = [(source, source) for source in first if (other / source).exists()]
            description = f"{name} of another home at step {now}: {', '.join(first)}"
            for source, _ in pairs:
                shutil.copy2(other / source, trial.home / source)
        elif len(groups) > 1:
            first, second = chance.sample(groups, 2)
            pairs = list(zip(first, second, strict=True))
            description = f"{name} at step {now}: {', '.join(first)} and {', '.join(second)}"
            for source, target in pairs:
                _swap(trial.home / source, trial.home / target)
        else:
            pairs, description = [], ""
        if not pairs:
            return Counter(cases=1)
        return ended(trial, chance, "exchanges", description)


def sectors(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Zero a sector of a file, or exchange two: within it, or with another file of its kind."""
    archive = archive_at(place)
    kinds = ALONE | WRITTEN_ONCE
    names = list(kinds)
    name = names[number % len(names)]
    how = ("zeroed", "exchanged within", "exchanged between")[number // len(names) % 3]
    now = chance.randint(2, len(archive.history.steps))
    paths = [path for (path,) in kinds[name](archive.home(now)) if (archive.home(now) / path).exists()]
    with trial_at(archive, place / f"sectors-{number}", now) as trial:
        struck = _strike_sectors(chance, trial.home, how, paths)
        if struck is None:
            return Counter(cases=1)
        return ended(trial, chance, "sectors", f"{how} {name} at step {now}: {struck}")


def _strike_sectors(chance: random.Random, home: Path, how: str, paths: Sequence[str]) -> str | None:
    """Change sectors of a file; says which, or None where no file is so large."""
    if not paths:
        return None
    first, second = chance.choice(paths), chance.choice(paths)
    data, other = bytearray((home / first).read_bytes()), bytearray((home / second).read_bytes())
    start, other_start = chance.randrange(0, len(data), SECTOR), chance.randrange(0, len(other), SECTOR)
    if how == "zeroed":
        changed = _with_sector(data, start, bytes(len(data[start : start + SECTOR])))
    elif how == "exchanged within":
        other_start = chance.randrange(0, len(data), SECTOR)
        size = min(len(data[start : start + SECTOR]), len(data[other_start : other_start + SECTOR]))
        changed = _with_sector(data, start, data[other_start : other_start + size])
        changed = _with_sector(changed, other_start, data[start : start + size])
    else:
        size = min(len(data[start : start + SECTOR]), len(other[other_start : other_start + SECTOR]))
        changed = _with_sector(data, start, other[other_start : other_start + size])
    if changed == data:
        return None
    (home / first).write_bytes(changed)
    return f"sector at {start} of {first}, {other_start} of {second}"


def _with_sector(data: bytes | bytearray, at: int, sector: bytes | bytearray) -> bytes:
    return bytes(data[:at]) + bytes(sector) + bytes(data[at + len(sector) :])


@contextmanager
def trial_at(archive: Archive, home: Path, step: int, start: int | None = None) -> Iterator[Trial]:
    """A copy of a home that goes on, removed in the end unless a promise was broken.

    start: the step that it is as after, where it is compared with one that went on.
    """
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(archive.home(step if start is None else start), home)
    yield Trial(home, archive, step)
    shutil.rmtree(home)


def ended(
    trial: Trial, chance: random.Random, unit: str, description: str, *, has_copy: bool = False
) -> Counter[str]:
    """Let a home that was struck go on; the listing in another order, if the newest catalogue is left.

    has_copy: a person has a copy of the home for sure, and not in every second case.
    """
    newest = catalog_path(trial.archive.home(trial.step))
    catalogs = (catalog_path(trial.home), *backup_paths(trial.home))
    if chance.random() < 0.5 and _digest(newest) in map(_digest, catalogs):
        trial.order = random.Random(chance.random())
    if has_copy or chance.random() < 0.5:
        trial.copy = trial.archive.home(trial.step)
    try:
        trial.finish()
    except PromiseBrokenError as broken:
        raise PromiseBrokenError(f"{description}: {broken}") from broken
    return Counter({unit: 1, "cases": 1, "stops": trial.stops})


def _content(path: Path) -> object:
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        return [(str(file.relative_to(path)), file.read_bytes()) for file in inside]
    return path.read_bytes()


def _copy(source: Path, target: Path) -> None:
    """Have ``target`` be what ``source`` is: there and the same, or not there."""
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _swap(first_path: Path, second_path: Path) -> None:
    """Exchange two files; where one is missing, the other moves."""
    first, second = (path.read_bytes() if path.exists() else None for path in (first_path, second_path))
    for path, data in ((first_path, second), (second_path, first)):
        if data is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
