"""Seeded damage to every kind of file a journal keeps: always noticed, never wrong rows, never empty."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.damage import flip_bit
from tests.support.journals import open_journal
from vlm_durable.files.layout import Home, PartitionPaths
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.journal_errors import JournalLossError
from vlm_durable.journal.recovery import survey_journal
from vlm_durable.journal.segments import JournalIdentity

SCHEMA = pa.schema([("ordinal", pa.int64()), ("property_id", pa.string()), ("text", pa.string())])
IDS = frozenset(f"p{n}" for n in range(60))
FLIPS = 400


@dataclass
class Standing:
    """A journal of sixty rows in three segments, and the ways to look at it."""

    root: Path

    @property
    def paths(self) -> PartitionPaths:
        """The partition's files."""
        return Home(self.root).asset("property_descriptions").partition("KEY")

    @property
    def directory(self) -> Path:
        """The journal's folder."""
        return self.paths.journal("g")

    @property
    def mark(self) -> Path:
        """The high-water mark."""
        return self.paths.high_water_mark("g")

    def open(self, **more) -> Journal:
        """Open it for writing."""
        return open_journal(self.paths, "g", IDS, schema=SCHEMA, **more)

    def survey(self):
        """What a recovery would do, nothing changed."""
        identity = JournalIdentity("KEY", "g", {}, SCHEMA, IDS)
        return survey_journal(self.directory, identity, self.mark)

    def files(self, pattern: str) -> list[Path]:
        """Files of one kind, oldest first."""
        return sorted(self.directory.glob(pattern))


@pytest.fixture
def standing(tmp_path) -> Standing:
    made = Standing(tmp_path / "home")
    with made.open() as journal:
        for start in (0, 20, 40):
            numbers = list(range(start, start + 20))
            values = {"ordinal": numbers, "property_id": [f"p{n}" for n in numbers]}
            journal.submit(pa.table({**values, "text": [f"text {n}" for n in numbers]}, schema=SCHEMA))
            journal.flush()
    return made


def test_every_flip_in_an_unlisted_segment_is_found_by_its_name(standing, rounds, seed):
    """Fault 10: no manifest lists it, so its name carries the digest; a damaged one is never adopted."""
    choose = random.Random(seed + 1)
    standing.files("manifest-*")[-1].unlink()
    last = standing.files("segment-*")[-1]
    whole = last.read_bytes()
    for number in range(FLIPS // 2 * rounds):
        flip(last, choose)
        survey = standing.survey()
        assert last in survey.damaged, (seed, number)
        assert survey.losses, (seed, number)
        last.write_bytes(whole)
    assert standing.survey().adopted == (last.name,)


@pytest.mark.parametrize("kind", ["segment-*", "manifest-*"])
@pytest.mark.promise("A changed, missing or added bit")
def test_any_truncation_is_found(standing, rounds, seed, kind):
    """Faults 5, 11: cut anywhere, to nothing included; a zero-byte file is never taken for an empty one."""
    choose = random.Random(seed + 4)
    path = standing.files(kind)[-1]
    whole = path.read_bytes()
    for size in [0, len(whole) - 1, *(choose.randrange(len(whole)) for _ in range(40 * rounds))]:
        path.write_bytes(whole[:size])
        found = standing.survey()
        assert path in found.damaged, (seed, size)
        assert bool(found.losses) == kind.startswith("segment"), (seed, size)


@pytest.mark.promise("What can be restored without loss")
def test_several_files_damaged_at_once_restore_or_refuse(standing, rounds, seed):
    """Any combination: either every row is exact, or the start is refused; after a yes, the rest is exact."""
    choose = random.Random(seed + 5)
    kept = standing.root.with_name("kept")
    shutil.copytree(standing.root, kept)
    for number in range(25 * rounds):
        shutil.rmtree(standing.root)
        shutil.copytree(kept, standing.root)
        candidates = [*standing.files("*-*"), *standing.root.glob("mark*")]
        for path in choose.sample(candidates, choose.randint(1, 4)):
            choose.choice([flip, remove, empty])(path, choose)
        try:
            journal = standing.open()
        except JournalLossError:
            journal = standing.open(accept_loss="test")
        else:
            assert journal.committed_rows == 60, (seed, number)
        with journal:
            for batch in journal.read_ordered():
                for row in batch.to_pylist():
                    n = row["ordinal"]
                    assert row == {"ordinal": n, "property_id": f"p{n}", "text": f"text {n}"}, (seed, number)


def flip(path: Path, choose: random.Random) -> None:
    """Flip one bit of a file in place."""
    flip_bit(path, choose.randrange(path.stat().st_size), choose.randrange(8))


def remove(path: Path, _: random.Random) -> None:
    """Delete a file."""
    path.unlink()


def empty(path: Path, _: random.Random) -> None:
    """Leave a file of no bytes."""
    path.write_bytes(b"")
