"""Two question sets of one partition that one run describes, and what faults leave of each.

What lives here: runs of the product's own asset (vlm_assets/assets/property_descriptions.py) through Dagster,
with an engine that answers at once, and what strikes them. Each answer names the run that gave it: a finished
row that is lost, changed or asked again is seen by its text. What does not: every operation of a single
journal and its publication (kills.py and others). Fault table row 32.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from faults.file_operations import Before, FileOperations, Operation, die, fail_at, strike_at
from faults.full_disks import fill
from faults.ledger import PromiseBrokenError
from faults.lives import Life, StoppedLife, act_in_child, random_end
from faults.mounts import LOG_FLUSHED, LOG_LOST, Mount
from faults.partition_life import Say
from resources.vision_language_model import VisionLanguageModel
from vlm_assets.assets import description_work
from vlm_assets.config.questions_file import QuestionsFile
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.home_definitions import build_defs
from vlm_catalog.ingest import ingest
from vlm_durable.files.layout import Home
from vlm_durable.journal.journal import Journal
from vlm_durable.versions.published import Publication, PublishedPartitions, StagedFile
from vlm_engine.images.images import LoadedProperty, PropertyJob
from vlm_engine.model_source import exact_revision
from vlm_engine.prompt import FurtherQuestion
from vlm_engine.protocol import Answer, Attempt
from vlm_engine.schema import DescriptionSchema

KEY = "000000000-000000005"
IDS = tuple(f"p{number}" for number in range(6))
FIRST, ADDED = BOTH = ("property_descriptions", "property_condition")
OPERATIONS = 900
"""A few more than a run of both sets takes."""
_OPERATIONS_OF_A_SET = 350
_CODES = (errno.EIO, errno.ENOSPC)
_OF_A_PUBLICATION = "DagsterExecutionHandleOutputError"
_ROOM = 448 << 10
"""Bytes: somewhat less than a home of the two sets takes, with its control state."""
_STRIKES_IN_A_ROW = 2
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


class Facade(BaseModel):
    """What the first set asks."""

    facade: str


class Condition(BaseModel):
    """What the set that is added asks."""

    wear: str


# The cases


def struck(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """Both sets are described; one or two runs are killed, or a file operation fails; then one is let be."""
    ledger, met = _home_at(place, number), 0
    for _ in range(chance.randint(1, _STRIKES_IN_A_ROW)):
        if chance.random() < 0.5:
            end = random_end(chance, OPERATIONS)
            met += ledger.run(strike_at(end["at"], torn=end["torn"])).killed
        else:
            code = chance.choice(_CODES)
            met += _named(ledger.run(fail_at(chance.randint(1, OPERATIONS), code)), code)
    return _finished(ledger, met)


def added(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """The second set is added while a run of the first is stopped half way, and both get to their end.

    In half of the cases a run of the added set is killed too.
    """
    ledger = _home_at(place, number)
    first = ledger.act(FIRST, named="first", has_added=False)
    with StoppedLife(ledger.home, chance.randint(1, OPERATIONS // 2), first) as stopped:
        before = ledger.hear(stopped.life_so_far(), "first")
        if chance.random() < 0.5:
            end = random_end(chance, OPERATIONS // 2)
            ledger.run(strike_at(end["at"], torn=end["torn"]), sets=(ADDED,))
        ledger.run(sets=(ADDED,))
        ledger.must_have_published(ADDED)
        met, woken = stopped.is_stopped, stopped.wake()
        woken.reports = woken.reports[len(before.reports) :]
        ledger.hear(woken, "first")
    ledger.must_have_published(FIRST)
    return _finished(ledger, int(met))


def one_fails(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """From an operation on, all that is written of one set fails: the other is published all the same.

    Where its published file cannot be written, Dagster ends the run, and the next one publishes the other.
    """
    ledger, code = _home_at(place, number), chance.choice(_CODES)
    failing, other = chance.sample(BOTH, 2)
    life = ledger.run(_writes_of(failing, chance.randint(1, _OPERATIONS_OF_A_SET), code))
    if not any(_OF_A_PUBLICATION in report.get("failed", "") for report in life.reports):
        ledger.must_have_published(other)
    return _finished(ledger, _named(life, code))


_CASES = (struck, added, struck, one_fails)


def in_memory(chance: random.Random, place: Path, number: int) -> Counter[str]:
    """One of the cases that need no disk of their own."""
    return _CASES[number % len(_CASES)](chance, place, number)


def on_a_disk(chance: random.Random, mount: Mount, number: int) -> Counter[str]:
    """Both sets are described on a disk whose power is cut, or that is full; then one run is let be."""
    for home in mount.path.glob("sets-*"):  # A cut may have brought it back.
        shutil.rmtree(home)
    ledger, met, filler = _home_at(mount.path, number), 0, mount.path / "filler"
    for _ in range(chance.randint(1, _STRIKES_IN_A_ROW)):
        if number % 3 < 2:
            how = (LOG_FLUSHED, LOG_LOST)[number % 3]
            end = random_end(chance, OPERATIONS)
            before = strike_at(end["at"], partial(_cut_and_die, mount, how), torn=end["torn"])
            met += ledger.run(before, afterwards=mount.again).killed
        else:
            fill(filler, leave=chance.randrange(0, _ROOM, 4096))
            met += not ledger.run(afterwards=filler.unlink).finished
    return _finished(ledger, met)


def _cut_and_die(mount: Mount, how: int) -> None:
    mount.cut(how)
    die()


def _writes_of(asset: str, at: int, code: int) -> Before:
    """Fail each operation on files of this asset, from the ``at``-th on."""
    seen = 0

    def before(operation: Operation, operations: FileOperations) -> None:
        nonlocal seen
        seen += any(asset in Path(path).parts for path in operation.paths)
        if seen >= at and any(asset in Path(path).parts for path in operation.paths):
            if operation.name == "close":
                operations.real["close"](operation.descriptor)
            raise OSError(code, os.strerror(code), *operation.paths)

    return before


def _named(life: Life, code: int) -> int:
    """1 where a run failed, with what the system said. Raises PromiseBrokenError where it said otherwise."""
    failures = [report["failed"] for report in life.reports if "failed" in report]
    for failure in failures:
        if os.strerror(code) not in failure:
            raise PromiseBrokenError(f"{os.strerror(code)!r} came up as {failure}")
    return int(bool(failures))


def _finished(ledger: SetsLedger, met: int) -> Counter[str]:
    ledger.close(ledger.run())
    shutil.rmtree(ledger.home)
    return Counter({"strikes": met, "cases": 1})


# What was promised


def _home_at(place: Path, number: int) -> SetsLedger:
    """A home with a catalogue and nothing described."""
    _prepare()
    home = place / f"sets-{number}"
    home.mkdir()
    life = act_in_child(home, partial(_ingest, home))
    if life.error is not None:
        raise PromiseBrokenError(f"the ingest failed: {life.error}: {life.message} (home: {home})")
    return SetsLedger(home)


def _ingest(home: Path, say: Say) -> None:
    listing = home / "listing.jsonl"
    lines = [{"property_id": property_id, "images": [f"{property_id}.jpg"]} for property_id in IDS]
    listing.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ingest(listing, home, range_size=len(IDS), image_root=Path(os.sep))


@dataclass
class SetsLedger:
    """What runs on a home were promised: by asset and property, the run whose answer must stay."""

    home: Path
    promised: dict[tuple[str, str], str] = field(default_factory=dict)
    submitted: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    published: set[str] = field(default_factory=set)
    runs: int = 0

    def run(
        self,
        before: Before | None = None,
        *,
        sets: Sequence[str] = BOTH,
        afterwards: Callable[[], None] = lambda: None,
    ) -> Life:
        """Have a run describe these sets. before: sees its file operations. afterwards: done then."""
        self.runs += 1
        name = f"run {self.runs}"
        life = act_in_child(self.home, self.act(*sets, named=name), before)
        afterwards()
        return self.hear(life, name)

    def act(self, *sets: str, named: str, has_added: bool = True) -> Callable[[Say], None]:
        """What a child does that describes these sets. has_added: the settings name the second one."""
        return partial(_describe, self.home, name=named, sets=sets, has_added=has_added)

    def hear(self, life: Life, name: str) -> Life:
        """Note what a run was promised, and compare what readers find. Raises PromiseBrokenError."""
        if life.error is not None:
            self._broken(f"{name} ended with {life.error}: {life.message}")
        for report in life.reports:
            for asset, ids in filter(None, [report.get("submitted")]):
                for property_id in ids:
                    if (asset, property_id) in self.promised:
                        self._broken(f"{property_id} of {asset} was committed, and {name} asked again")
                    self.submitted.setdefault((asset, property_id), set()).add(name)
            for asset, ids in filter(None, [report.get("promised")]):
                self.promised |= dict.fromkeys(((asset, property_id) for property_id in ids), name)
            self.published |= {report["published"]} if "published" in report else set()
        for asset in BOTH:
            self._look(asset)
        return life

    def must_have_published(self, asset: str) -> None:
        """Raise PromiseBrokenError where a set is not published."""
        if asset not in self.published:
            self._broken(f"{asset} is not published")

    def close(self, life: Life) -> None:
        """After the last run: both sets are complete, and nothing of them is left over."""
        if not life.finished:
            self._broken(f"the last run, with nothing in its way, failed: {life.reports[-2:]}")
        for asset in BOTH:
            self.must_have_published(asset)
        # A worker that was killed before its lock had a name leaves that: nobody takes it for a worker.
        of_sets = {path for path in self.home.rglob("*.tmp") if path.parent.name != "workers"}
        for paths in (Home(self.home).asset(asset).partition(KEY) for asset in BOTH):
            of_sets |= {*paths.journals.glob("*")}
        if leftovers := sorted(map(str, of_sets)):
            self._broken(f"left behind: {', '.join(leftovers)}")

    def _look(self, asset: str) -> None:
        path = Home(self.home).asset(asset).partition(KEY).published
        if not path.exists():
            if asset in self.published:
                self._broken(f"the published file of {asset} is gone")
            return
        with pq.ParquetFile(path) as file:
            # Without threads: this process forks.
            rows = file.read(["property_id", "description"], use_threads=False).to_pylist()
        if tuple(row["property_id"] for row in rows) != IDS:
            self._broken(f"rows of {asset} are lost or doubled: {rows}")
        for row in rows:
            of_row = asset, row["property_id"]
            (answer,) = row["description"].values()
            name = answer.removeprefix(f"{row['property_id']} by ")
            if name not in self.submitted.get(of_row, ()) or self.promised.setdefault(of_row, name) != name:
                self._broken(f"a row of {asset} is changed: {row}, and {self.promised.get(of_row)} made it")
        self.published.add(asset)

    def _broken(self, sentence: str) -> None:
        raise PromiseBrokenError(f"{sentence} (home: {self.home})")


# A run


class _Engine:
    """Answers each question with the name of its run."""

    batches_at_once = 1
    image_tokens = None
    seconds: Mapping[str, float] = {}

    def __init__(self, model: VisionLanguageModel, run: str, schemas: Iterable[DescriptionSchema]) -> None:
        self.model, self.revision = model.source.label, exact_revision(model.source)
        self._run = run
        self._fields = [field for schema in schemas for field in schema.json_schema["properties"]]

    def prepare(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> None:
        """Nothing."""

    def describe(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> list[Answer]:
        """See Engine."""
        answers = [{self._fields[attempt.question]: f"{of.property_id} by {self._run}"} for of in batch]
        return [Answer(json.dumps(answer), "stop", 8, 10) for answer in answers]

    def close(self) -> None:
        """Nothing."""


class _Images:
    """In place of a pool of processes: one image a property, which nobody reads."""

    wait_seconds = 0.0

    def __init__(self, output: object, *, max_images: int, **_: object) -> None:
        self.max_images = max_images

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def feed(self, batches: Iterable[Sequence[PropertyJob]]) -> Iterator[list[LoadedProperty]]:
        """See WorkerPool."""
        for batch in batches:
            yield [LoadedProperty(job.property_id, job.ordinal, [], 1, (), 0.0) for job in batch]


def _describe(home: Path, say: Say, *, name: str, sets: Sequence[str], has_added: bool) -> None:
    """A run of Dagster's over these sets. Each batch of rows is committed before the next."""
    submit, publish = Journal.submit, PublishedPartitions.publish

    def load(
        model: VisionLanguageModel,
        device: object,
        *,
        schema: DescriptionSchema,
        prompt: object,
        further: Sequence[FurtherQuestion] = (),
    ) -> _Engine:
        return _Engine(model, name, [schema, *(question.schema for question in further)])

    def submit_and_commit(journal: Journal, rows: pa.Table) -> None:
        (question,) = rows.schema.field("description").type
        batch = [FIRST if question.name in Facade.model_fields else ADDED, rows["property_id"].to_pylist()]
        say(submitted=batch)
        submit(journal, rows)
        journal.flush()
        say(promised=batch)

    def publish_and_say(published: PublishedPartitions, staged: StagedFile) -> Publication:
        publication = publish(published, staged)
        say(published=published.asset.name)
        return publication

    replaced: list[tuple[Any, str, Any]] = [
        (VisionLanguageModel, "load", load),
        (Journal, "submit", submit_and_commit),
        (PublishedPartitions, "publish", publish_and_say),
        (description_work, "WorkerPool", _Images),
        (description_work, "make_thumbnails", lambda jobs, **_: [[None] for _ in jobs]),
    ]
    for place, attribute, replacement in replaced:
        setattr(place, attribute, replacement)
    defs = build_defs(_settings(home, has_added=has_added))
    assets: Any = defs.assets
    result = dg.materialize(
        assets,
        selection=list(sets),
        partition_key=KEY,
        resources=defs.resources,
        instance=dg.DagsterInstance.ephemeral(),
        run_config=_QUIET,
        raise_on_error=False,
    )
    for event in result.all_events:
        if event.is_step_failure and (error := event.step_failure_data.error) is not None:
            say(failed=error.to_string())
    if result.success:
        say(finished=True)


def _settings(home: Path, *, has_added: bool) -> Settings:
    questions = f"condition:\n  schema: {__name__}:{Condition.__name__}\n"
    settings = load_settings(
        home=home,
        model="example",
        description_schema=f"{__name__}:{Facade.__name__}",
        devices="cpu:2",
        batch_size=2,
        decode_workers=1,
    )
    asked = QuestionsFile.parse(Path("questions.yaml"), questions.encode()) if has_added else None
    return settings.model_copy(update={"questions": asked})


@cache
def _prepare() -> None:
    """Import what a run imports late, here once and not in each child."""
    import_module("duckdb")
    _settings(Path(), has_added=True)

    @dg.asset
    def nothing() -> None:
        """So that Dagster imports what a run needs."""

    stopping = signal.getsignal(signal.SIGTERM)
    with dg.DagsterInstance.ephemeral() as instance:
        dg.materialize([nothing], instance=instance, run_config=_QUIET)
    # Dagster has SIGTERM do what SIGINT does, and a campaign in the background may ignore that one.
    signal.signal(signal.SIGTERM, stopping)
