"""Old data that is whole: the newest version counts, and finished work is never computed again."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from resources.parquet_io import ParquetIOManager
from tests.support.damage import flip_bit
from vlm_durable.files import files
from vlm_durable.files.layout import Home
from vlm_durable.versions import version_mark
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.partition_files import PartitionVersions, PendingPublication, PutBackError
from vlm_durable.versions.version_mark import mark_copies
from vlm_durable.versions.versioned_object import PublishedError, RecordDamagedError

KEY = "000000000-000000009"


class Old:
    """The files of a partition as they were before its next publication, to be put back one by one."""

    def __init__(self, partitions: Any, folder: Path) -> None:
        self.files = partitions.files
        self.paths = {
            "file": self.files.published,
            "record": self.files.record_path,
            "copy": self.files.record_copy,
            "second copy": self.files.slot(0),
            "version 1": self.files.slot(1),
            "version 2": self.files.slot(2),
            "mark": mark_copies(self.files.paths.version_mark)[0],
            "copy of the mark": mark_copies(self.files.paths.version_mark)[1],
        }
        self._kept = folder
        folder.mkdir()
        for name, path in self.paths.items():
            if path.exists():
                shutil.copy(path, folder / name)

    def put_back(self, *names: str) -> None:
        for name in names:
            if (self._kept / name).exists():
                shutil.copy(self._kept / name, self.paths[name])
            else:
                self.paths[name].unlink(missing_ok=True)


ALL_FILES = ("file", "record", "copy", "second copy", "version 1", "version 2")


@pytest.fixture
def old(partitions: Any, tmp_path: Path) -> Old:
    """Published as a, then b; b is what was kept; c came after it and is published."""
    partitions.publish_text("a")
    partitions.publish_text("b")
    kept = Old(partitions, tmp_path / "kept")
    partitions.publish_text("c")
    return kept


def text(partitions: Any) -> str:
    return str(partitions.text_of(partitions.path(KEY)))


@contextmanager
def unchanged(partitions: Any) -> Iterator[None]:
    def standing() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in partitions.home.rglob("*") if path.is_file()}

    before = standing()
    yield
    assert standing() == before


@pytest.mark.parametrize(
    "names",
    [names for count in (1, 2) for names in itertools.combinations(("record", "copy", "file", "mark"), count)]
    + [("second copy",), ("mark", "copy of the mark"), ("file", "record", "copy")],
    ids=" and ".join,
)
@pytest.mark.promise("Of two valid versions the newer is true")
def test_the_newest_version_wins_that_has_a_whole_file(
    partitions: Any, old: Old, names: tuple[str, ...]
) -> None:
    """A file, record, copy or mark put back to the version before: the newest one comes back."""
    sound = partitions.record(KEY)
    assert sound.sequence == 3
    old.put_back(*names)
    partitions.verify(KEY)
    partitions.restore(KEY)
    assert text(partitions) == "c"
    assert partitions.record(KEY) == partitions.settled(KEY) == sound
    assert partitions.slots() == ["c", "b", "a"]
    assert partitions.verify(KEY).ok and not partitions.verify(KEY).repairs
    assert partitions.files.marked().published == sound
    assert partitions.publish_text("d").record.sequence == 4


@pytest.mark.parametrize("lost", ["unlinked", "damaged"])
def test_a_lost_record_comes_back_from_the_mark(partitions: Any, lost: str) -> None:
    """A whole file whose record is lost is not foreign: the mark says what it is, to the byte."""
    partitions.publish_text("a")
    sound = partitions.publish_text("b").record
    for path in partitions.files.record_paths:
        path.unlink() if lost == "unlinked" else path.write_bytes(b"?")
    assert partitions.settled(KEY) == sound
    assert partitions.verify(KEY).ok
    assert partitions.slots() == ["b", "a", None]
    assert partitions.quarantined().count(b"?") == (2 if lost == "damaged" else 0)


def test_a_record_is_not_made_for_a_damaged_file(partitions: Any) -> None:
    """What the mark does not vouch for to the byte stays without a record."""
    partitions.publish_text("a")
    for path in [*partitions.files.record_paths, partitions.files.slot(0)]:
        path.unlink()
    flip_bit(partitions.path(KEY), 40)
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.UNRECORDED]
    assert partitions.record(KEY) is None


def test_the_records_of_two_assets_exchanged(partitions: Any) -> None:
    """A record says of which asset it is: that of another one is set aside, and the right one comes back."""
    other = type(partitions)(partitions.asset.home.asset("property_embeddings"), lock_seconds=0.2)
    sound = [both.publish_text(text).record for both, text in ((partitions, "a"), (other, "b"))]
    for mine, its in zip(partitions.files.record_paths, other.files.record_paths, strict=True):
        mine_was, its_was = mine.read_bytes(), its.read_bytes()
        mine.write_bytes(its_was)
        its.write_bytes(mine_was)
    assert [both.settled(KEY) for both in (partitions, other)] == sound
    for both, letter in ((partitions, "a"), (other, "b")):
        assert both.verify(KEY).ok
        assert text(both) == letter
        assert len(both.quarantined()) == 2


def test_a_partition_put_back_wholly_stops(partitions: Any, old: Old) -> None:
    """The version before is never silently taken for the newest: both dates, and what to do."""
    newest = partitions.record(KEY)
    old.put_back(*ALL_FILES)
    older = partitions.record(KEY)
    assert older.sequence == 2
    with unchanged(partitions):
        (finding,) = partitions.verify(KEY).findings
    assert finding.kind is FindingKind.PUT_BACK
    for said in (newest.published_at, older.published_at, f"repair --accept-version {KEY}"):
        assert said in finding.sentence
    with unchanged(partitions):
        for call in (partitions.settled, partitions.restore):
            with pytest.raises(PutBackError, match=r"version 2 .* stands there, and version 3"):
                call(KEY)
        with pytest.raises(PutBackError):
            partitions.stage_text("d")
    assert partitions.read(KEY).to_table()["text"][0].as_py() == "b", "readers read on meanwhile"


def test_the_newest_file_put_back_from_a_backup(partitions: Any, old: Old) -> None:
    """The first remedy: with the file alone everything else comes back."""
    sound, newest = partitions.record(KEY), partitions.path(KEY).read_bytes()
    old.put_back(*ALL_FILES)
    partitions.path(KEY).write_bytes(newest)
    assert partitions.settled(KEY) == sound
    assert partitions.slots() == ["c", "b", "a"]
    assert partitions.verify(KEY).ok


def test_the_older_version_accepted(partitions: Any, old: Old) -> None:
    """The second remedy: what stands counts as the newest, under a number that was never given before."""
    with pytest.raises(PublishedError, match="nothing to accept"):
        partitions.accept_older(KEY)
    old.put_back(*ALL_FILES)
    assert "as version 4" in partitions.accept_older(KEY)[0]
    assert partitions.verify(KEY).ok
    assert partitions.record(KEY).sequence == 4
    assert partitions.publish_text("d").record.sequence == 5
    assert partitions.slots() == ["d", "b", "a"]
    assert partitions.verify(KEY).ok


@pytest.mark.parametrize("writes", range(5))
def test_an_acceptance_cut_short_is_finished_or_done_again(
    partitions: Any, old: Old, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Killed after any write, what stands still stops a start, or counts already; it is given one number."""
    old.put_back(*ALL_FILES)
    real, calls = files.write_replacing, itertools.count()

    def die(*arguments: Any, **options: Any) -> None:
        if next(calls) == writes:
            raise SystemExit
        real(*arguments, **options)

    with monkeypatch.context() as killed, suppress(SystemExit):
        killed.setattr(files, "write_replacing", die)
        killed.setattr(version_mark, "write_replacing", die)
        partitions.accept_older(KEY)
    looked = partitions.verify(KEY)
    assert not any("Was .state put back" in one for one in looked.repairs)
    if not looked.ok:
        assert writes == 0
        partitions.accept_older(KEY)
    assert partitions.settled(KEY).sequence == 4
    assert partitions.verify(KEY).ok
    assert text(partitions) == "b"


@pytest.mark.promise("Of two valid versions the newer is true")
def test_damaged_marks_are_written_anew_beside_files_that_agree(partitions: Any, old: Old) -> None:
    """Unreadable is not the same as none: it is told, once."""
    sound = partitions.record(KEY)
    damage_marks(partitions)
    (said,) = partitions.verify(KEY).repairs
    assert "could not be read" in said
    assert partitions.verify(KEY).repairs == ()
    assert partitions.files.marked().published == sound


@pytest.mark.parametrize(
    "names",
    [("record",), ("copy",), ("file", "second copy", "version 1", "version 2", "record")],
    ids=" and ".join,
)
@pytest.mark.promise("Of two valid versions the newer is true")
def test_damaged_marks_beside_files_that_do_not_agree_stop(
    partitions: Any, old: Old, names: tuple[str, ...]
) -> None:
    """Nobody can tell which version was the newest: nothing changes until a person says so."""
    old.put_back(*names)
    damage_marks(partitions)
    with unchanged(partitions):
        assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.PUT_BACK]
        for call in (partitions.settled, partitions.restore, partitions.refuse_put_back):
            with pytest.raises(PutBackError, match="--accept-version"):
                call(KEY)
    partitions.accept_older(KEY)
    assert partitions.verify(KEY).ok
    assert partitions.record(KEY).sequence > 3
    assert text(partitions) == ("b" if "file" in names else "c")


@pytest.mark.parametrize("names", [("file", "second copy"), ("record", "copy")], ids=" and ".join)
def test_damaged_marks_beside_a_record_without_its_file_stop(
    partitions: Any, old: Old, names: tuple[str, ...]
) -> None:
    """Neither is believed nor written over: the newest file may be the one that the record does not name."""
    old.put_back(*names)
    damage_marks(partitions)
    with unchanged(partitions):
        assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.RECORD]
        with pytest.raises(RecordDamagedError, match="vlm-assets repair"):
            partitions.settled(KEY)


def test_a_damaged_mark_of_what_vanished_is_not_never_published(partitions: Any) -> None:
    """With all files gone, marks that cannot be read still say that there was something."""
    partitions.publish_text("a")
    for path in (partitions.path(KEY), partitions.files.slot(0), *partitions.files.record_paths):
        path.unlink()
    damage_marks(partitions)
    with pytest.raises(RecordDamagedError, match="nor its version mark"):
        partitions.settled(KEY)
    partitions.set_aside(KEY)
    assert partitions.settled(KEY) is None


def damage_marks(partitions: Any) -> None:
    for path in mark_copies(partitions.files.paths.version_mark):
        path.write_bytes(b"?")


def test_a_newer_copy_of_the_record_counts_without_a_mark(partitions: Any, old: Old) -> None:
    """One old record beside a newer one: the newer one, or a stop; never the first that reads."""
    for path in mark_copies(partitions.files.paths.version_mark):
        path.unlink()
    old.put_back("record")
    assert partitions.record(KEY).sequence == 3
    old.put_back("file", "record", "second copy", "version 1", "version 2")
    with unchanged(partitions), pytest.raises(PutBackError):
        partitions.settled(KEY)
    partitions.accept_older(KEY)
    assert partitions.verify(KEY).ok and partitions.record(KEY).sequence == 4


def test_a_version_that_was_marked_is_not_taken_back(partitions: Any, old: Old) -> None:
    """A record of a publication under way, put back with the file before: that version was durable once."""
    newest = partitions.record(KEY)
    old.put_back(*ALL_FILES)
    before = partitions.record(KEY)
    under_way = PartitionVersions(KEY, before, pending=PendingPublication(newest, (before,)))
    for path in partitions.files.record_paths:
        path.write_bytes(under_way.to_bytes(partitions.asset.name))
    with unchanged(partitions), pytest.raises(PutBackError):
        partitions.settled(KEY)


def test_what_does_not_verify_is_kept_beside_an_older_record(partitions: Any, old: Old) -> None:
    """Bringing a record up to its file replaces a damaged second copy: that is moved aside, not lost."""
    sound = partitions.record(KEY)
    old.put_back("record", "copy")
    partitions.files.slot(0).write_bytes(b"damaged")
    assert partitions.settled(KEY) == sound
    assert partitions.quarantined() == [b"damaged"]
    assert partitions.slots() == ["c", "b", "a"]


def test_nothing_is_made_from_a_partition_that_was_put_back(partitions: Any, old: Old) -> None:
    """A run that reads the partition stops too: its rows would be those of an older version."""
    partitions.refuse_put_back(KEY)
    old.put_back("record")
    partitions.refuse_put_back(KEY)
    old.put_back(*ALL_FILES)
    manager = ParquetIOManager(partitions.asset.home)
    context = dg.build_input_context(
        asset_key=dg.AssetKey(partitions.asset.name),
        asset_partitions_def=dg.StaticPartitionsDefinition([KEY]),
        asset_partition_key_range=dg.PartitionKeyRange(KEY, KEY),
    )
    with unchanged(partitions), pytest.raises(PutBackError):
        manager.load_input(context)


def test_another_version_of_the_same_number_stops(partitions: Any, tmp_path: Path) -> None:
    """The files of another home's partition have the number of the marked version, and are not it."""
    other = type(partitions)(
        type(partitions.asset.home)(tmp_path / "other").asset(partitions.asset.name), lock_seconds=0.2
    )
    partitions.publish_text("a")
    other.publish_text("b")
    for mine, its in zip(
        (partitions.path(KEY), *partitions.files.record_paths, partitions.files.slot(0)),
        (other.path(KEY), *other.files.record_paths, other.files.slot(0)),
        strict=True,
    ):
        shutil.copy(its, mine)
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.PUT_BACK]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "names", [("record",), ("copy",), ("record", "copy"), ("mark",), ("mark", "copy of the mark")]
)
@pytest.mark.promise("Of two valid versions the newer is true")
def test_records_and_marks_of_another_home_cost_nothing(
    partitions: Any, tmp_path: Path, names: tuple[str, ...], count: int
) -> None:
    """However high their number is: a whole file is never given up for a version that is nowhere here."""
    folders = type(partitions.asset.home)(tmp_path / "other").asset(partitions.asset.name)
    other = type(partitions)(folders, lock_seconds=0.2)
    partitions.publish_text("a")
    partitions.publish_text("b")
    for number in range(count):
        other.publish_text(f"foreign {number}")
    here, there = (Old(one, tmp_path / f"kept {one.home.name}") for one in (partitions, other))
    for name in names:
        shutil.copy(there.paths[name], here.paths[name])
    mine = partitions.path(KEY).read_bytes()
    try:
        partitions.settled(KEY)
    except PutBackError as error:
        assert "--accept-version" in str(error)
        assert not any("Was .state put back" in one for one in partitions.accept_older(KEY))
    partitions.verify(KEY)
    assert partitions.verify(KEY).ok
    assert partitions.path(KEY).read_bytes() == mine
    assert partitions.slots()[:2] == ["b", "a"]
    assert partitions.publish_text("c").record.sequence > 2
    assert partitions.verify(KEY).ok


def of_catalogue(name: str, folder: Path, kind: type[Any]) -> Any:
    """The partitions of a home whose catalogue has this id."""
    return kind(Home(folder / name, lambda root: name).asset("property_descriptions"), lock_seconds=0.2)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("foreign", "damaged"),
    [
        (("file", "record"), ("copy",)),
        (("file", "record", "copy"), ()),
        (("file", "mark", "copy of the mark"), ("record",)),
        (("file", "record", "copy", "mark"), ()),
        (("file", "copy", "mark", "copy of the mark"), ()),
    ],
    ids=str,
)
@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_version_of_another_catalogue_is_never_believed(
    partitions: Any, tmp_path: Path, foreign: tuple[str, ...], damaged: tuple[str, ...], count: int
) -> None:
    """With its file and however high its number: the second copy of this home's is taken, or all stops."""
    mine, other = (of_catalogue(name, tmp_path, type(partitions)) for name in ("mine", "other"))
    mine.publish_text("a")
    mine.publish_text("b")
    for number in range(count):
        other.publish_text(f"foreign {number}")
    here, there = (Old(one, tmp_path / f"kept {one.home.name}") for one in (mine, other))
    for name in foreign:
        shutil.copy(there.paths[name], here.paths[name])
    for name in damaged:
        here.paths[name].write_bytes(b"?")
    try:
        mine.settled(KEY)
    except PutBackError as error:
        assert f"repair --accept-version {KEY}" in str(error)
        mine.accept_older(KEY)
    mine.restore(KEY)
    assert text(mine) == "b"
    assert mine.slots() == ["b", "a", None]
    assert mine.verify(KEY).ok and not mine.verify(KEY).repairs
    assert {json.loads(path.read_bytes())["content"]["digest"].partition(":")[0] for path in marks(mine)} == {
        "mine"
    }
    assert mine.publish_text("c").record.sequence > 2


def marks(partitions: Any) -> tuple[Path, Path]:
    return mark_copies(partitions.files.paths.version_mark)


def test_where_all_that_speaks_of_a_partition_is_another_catalogues_everything_stops(
    partitions: Any, tmp_path: Path
) -> None:
    """Nothing says which file is this home's then: nothing is taken, moved or counted as never published."""
    mine, other = (of_catalogue(name, tmp_path, type(partitions)) for name in ("mine", "other"))
    mine.publish_text("a")
    other.publish_text("foreign")
    here, there = (Old(one, tmp_path / f"kept {one.home.name}") for one in (mine, other))
    for name in ("file", "record", "copy", "mark", "copy of the mark"):
        shutil.copy(there.paths[name], here.paths[name])
    with unchanged(mine), pytest.raises(RecordDamagedError, match="another home's, whose catalogue is other"):
        mine.record(KEY)
    with pytest.raises(RecordDamagedError, match="repair"):
        mine.stage_text("b")
    assert mine.slots() == ["a", None, None]


def test_a_copy_of_a_home_has_the_same_partitions(partitions: Any, tmp_path: Path) -> None:
    """A restored home, or that of another machine, has the same catalogue: its files fit in."""
    mine = of_catalogue("mine", tmp_path, type(partitions))
    sound = mine.publish_text("a").record
    shutil.copytree(mine.home, tmp_path / "restored")
    copy = type(partitions)(Home(tmp_path / "restored", lambda root: "mine").asset(mine.asset.name))
    assert copy.settled(KEY) == sound
    assert copy.verify(KEY).ok and not copy.verify(KEY).repairs


def test_a_record_that_names_no_catalogue_is_read_as_ours(partitions: Any) -> None:
    """An earlier format did not say of which home it is; the next publication does."""
    earlier = partitions.publish_text("a").record
    mine = type(partitions)(Home(partitions.home, lambda root: "mine").asset(partitions.asset.name))
    assert earlier.origin == ""
    assert mine.record(KEY) == mine.settled(KEY) == earlier
    assert mine.publish_text("b").record.origin == "mine"
    assert mine.slots() == ["b", "a", None]
    assert partitions.settled(KEY) == mine.settled(KEY), "who does not know the catalogue takes any"


def test_the_catalogue_is_asked_for_its_id_once_it_is_there(tmp_path: Path) -> None:
    """Settings are read before the first ingest; after it the id is read once."""
    answers = iter([None, "mine"])
    asset = Home(tmp_path, lambda root: next(answers)).asset("a")
    assert [asset.origin for _ in range(3)] == ["", "mine", "mine"]


def test_a_mark_that_is_behind_is_raised(partitions: Any, old: Old) -> None:
    """A ``.state`` put back from a backup knows less than the data: it learns, and says so."""
    old.put_back("mark", "copy of the mark")
    assert any(
        "was behind, at version 2: it was raised to 3" in one for one in partitions.verify(KEY).repairs
    )
    mark = partitions.files.mark.read().mark
    assert mark is not None and mark.sequence == 3
    assert partitions.verify(KEY).repairs == ()


def test_a_partition_that_vanished_counts_on(partitions: Any) -> None:
    """A number that was given once is not given again, so that no later version looks older than a mark."""
    partitions.publish_text("a")
    partitions.publish_text("b")
    for path in (partitions.path(KEY), *map(partitions.files.slot, (0, 1)), *partitions.files.record_paths):
        path.unlink()
    assert partitions.settled(KEY) is None
    assert partitions.publish_text("c").record.sequence == 3
    assert partitions.verify(KEY).ok


def test_a_partition_set_aside_was_never_published(partitions: Any) -> None:
    """A person gave it up: its mark names no version any more. Its number is not given again."""
    partitions.publish_text("a")
    partitions.set_aside(KEY)
    assert partitions.files.marked() is None
    assert partitions.settled(KEY) is None
    assert partitions.publish_text("b").record.sequence == 2
    assert partitions.verify(KEY).ok and not partitions.verify(KEY).repairs
