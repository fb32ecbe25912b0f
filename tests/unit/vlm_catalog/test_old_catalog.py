"""A catalogue that was put back to an older version is whole, and is not believed: the newer one is true."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import damage_rows, flip_bit
from tests.support.homes import Dataset
from tests.support.listings import list_properties
from vlm_catalog import catalog_copies
from vlm_catalog.catalog import Catalog, CatalogMissingError, CatalogUnreadableError
from vlm_catalog.catalog_copies import (
    backup_paths,
    catalog_folders,
    catalog_id_of,
    catalog_path,
    check_copies,
    last_put_back,
    mark_path,
    publish_catalog,
    quarantine,
    replace_catalog,
)
from vlm_catalog.catalog_file import CatalogError, verify_file
from vlm_catalog.chosen_catalog import check_catalog, put_in_place
from vlm_catalog.ingest import close_tail, ingest
from vlm_durable.versions import version_mark
from vlm_durable.versions.version_mark import mark_copies


def add(listing: Path, home: Path) -> None:
    """Ingest a listing, wherever it lies: in partitions of 5, with images that are not there."""
    ingest(listing, home, range_size=5, image_root=Path("/"))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The home as it was after each of three ingests, of 10, 20 and 30 properties."""
    folder = tmp_path_factory.mktemp("versions")
    homes = {}
    for number in (1, 2, 3):
        add(list_properties(folder, 10 * number), folder / "home")
        homes[number] = folder / str(number)
        shutil.copytree(folder / "home", homes[number])
    return homes


@pytest.fixture
def home(versions: dict[int, Path], tmp_path: Path) -> Path:
    """The home of the third ingest, which a test may change."""
    shutil.copytree(versions[3], tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Another home after one ingest and after four: fewer, and more, than the three of this home."""
    folder = tmp_path_factory.mktemp("strangers")
    homes = {}
    for number in (1, 2, 3, 4):
        add(list_properties(folder, number), folder / "home")
        homes[number] = folder / str(number)
        shutil.copytree(folder / "home", homes[number])
    return homes


FILES: dict[str, Callable[[Path], tuple[Path, ...]]] = {
    "catalogue": lambda home: (catalog_path(home),),
    "second copy": lambda home: (backup_paths(home)[0],),
    "version before": lambda home: (backup_paths(home)[1],),
    "mark": lambda home: tuple(mark_path(home).parent.iterdir()),
}


def put_back(home: Path, older: Path, *names: str) -> None:
    """Have some files of a home be those of an older copy of it; gone where that had none."""
    for name in names:
        for path in FILES[name](home):
            path.unlink(missing_ok=True)
            if (older / path.relative_to(home)).exists():
                shutil.copyfile(older / path.relative_to(home), path)


_SETS = [
    names
    for count in (1, 2, 3)
    for names in itertools.combinations(FILES, count)
    # Nothing that is left knows of a newer version then.
    if not {"catalogue", "second copy", "mark"} <= set(names)
]

READS: dict[str, Callable[[Path], object]] = {
    "open": Catalog.open,
    "compare": check_copies,
    "ingest": lambda home: add(list_properties(home.parent, 30), home),
    "close": close_tail,
}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("names", _SETS, ids=str)
@pytest.mark.promise("Of two valid versions the newer is true")
def test_what_is_put_back_is_put_right_or_stops_everything(home, versions, names, read, number) -> None:
    """As long as the catalogue or its second copy is the newest, it wins; else the mark stops everything."""
    newest = catalog_path(home).read_bytes()
    put_back(home, versions[number], *names)
    before = {path: path.read_bytes() for path in (catalog_path(home), backup_paths(home)[0])}
    if {"catalogue", "second copy"} <= set(names):
        with pytest.raises(CatalogUnreadableError, match="is an older version: ingest"):
            READS[read](home)
        assert {path: path.read_bytes() for path in before} == before
        return
    READS[read](home)
    assert catalog_path(home).read_bytes() == newest
    check_copies(home)
    assert backup_paths(home)[0].read_bytes() == newest
    if "catalogue" in names:
        assert before[catalog_path(home)] in [
            path.read_bytes() for path in quarantine(home).glob("*parquet*")
        ]
        title, sentence = last_put_back(home)[1:]
        assert title == "The catalogue was an older version and was put back"
        assert ".quarantine" in sentence


def test_a_kill_between_the_catalogue_and_its_mark_is_explained(home, versions, tmp_path) -> None:
    """A mark that is one version behind is raised in silence; one that is further behind is told, once."""
    put_back(home, versions[2], "mark")
    Catalog.open(home)
    assert last_put_back(home) is None
    put_back(home, versions[2], "catalogue", "second copy")
    with pytest.raises(CatalogUnreadableError, match="ingest 3 was durable here"):
        Catalog.open(home)
    shutil.copytree(versions[3], tmp_path / "other")
    put_back(tmp_path / "other", versions[1], "mark")
    for _ in range(2):
        Catalog.open(tmp_path / "other")
    title, sentence = last_put_back(tmp_path / "other")[1:]
    assert title == "The catalogue's version mark was behind"
    assert "is ingest 3, and its mark in" in sentence
    assert "said 1: .state was lost, or is an older copy" in sentence


@pytest.mark.parametrize("before", [None, 1, 2])
def test_a_kill_between_a_catalogue_of_a_store_and_its_mark_is_explained(
    versions: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    """One that comes from a store may be several ingests ahead: no alarm that ``.state`` was lost."""
    home = tmp_path / "home"
    if before is not None:
        shutil.copytree(versions[before], home)

    def die(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as killed, pytest.raises(SystemExit):
        killed.setattr("vlm_catalog.catalog_copies._raise_mark", die)
        publish_catalog(home, catalog_path(versions[3]).read_bytes())
    assert Catalog.open(home).rows == 30
    assert last_put_back(home) is None
    if before is not None:
        put_back(home, versions[3 - before], "mark")
        Catalog.open(home)
        assert last_put_back(home) is not None


@pytest.mark.parametrize("writes", range(5))
@pytest.mark.parametrize("harm", ["older", "damaged", "damaged rows"])
def test_a_kill_while_the_catalogue_of_a_store_replaces_what_is_wrong_is_explained(
    versions: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str, writes: int
) -> None:
    """Whatever write it dies at, doing it again heals the home; nobody is told that ``.state`` was lost."""
    home, newest = tmp_path / "home", catalog_path(versions[3]).read_bytes()
    shutil.copytree(versions[2], home)
    if harm == "older":
        put_back(home, versions[1], "catalogue", "second copy")
    else:
        for path in (catalog_path(home), backup_paths(home)[0]):
            damage_rows(path) if harm == "damaged rows" else path.write_bytes(b"damaged")
    take = publish_catalog if harm == "damaged rows" else replace_catalog
    real, calls = catalog_copies.write_replacing, itertools.count()

    def die(*arguments: Any) -> None:
        if next(calls) == writes:
            raise SystemExit
        real(*arguments)

    with monkeypatch.context() as killed, contextlib.suppress(SystemExit):
        killed.setattr(catalog_copies, "write_replacing", die)
        killed.setattr(version_mark, "write_replacing", die)
        take(home, newest)
    try:
        Catalog.open(home).verify()
    except CatalogUnreadableError:
        assert writes == 0
        take(home, newest)
    check_copies(home)
    assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes() == newest
    assert last_put_back(home) is None


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("read", ["open", "compare"])
def test_a_lost_mark_is_written_again_and_told(versions, tmp_path, number: int, read: str) -> None:
    """Without a mark the catalogue is believed, and is marked from then on; one lost copy is no alarm."""
    home = shutil.copytree(versions[number], tmp_path / "home")
    for copy in mark_copies(mark_path(home)):
        copy.unlink()
        check_copies(home)
        assert copy.is_file()
    assert last_put_back(home) is None
    shutil.rmtree(mark_path(home).parent)
    READS[read](home)
    assert "said nothing" in last_put_back(home)[2]
    assert mark_path(home).is_file()


def test_a_catalogue_that_rotted_keeps_no_newer_one_away(home: Path, versions: dict[int, Path]) -> None:
    """Its second copy takes its place first, and that one is the version before."""
    put_back(home, versions[2], *FILES)
    whole, newest = (catalog_path(versions[number]).read_bytes() for number in (2, 3))
    damage_rows(catalog_path(home))
    publish_catalog(home, newest)
    paths = (catalog_path(home), *backup_paths(home))
    assert [path.read_bytes() for path in paths] == [newest, newest, whole]
    assert last_put_back(home) is not None


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.promise("Of two valid versions the newer is true")
def test_two_copies_that_rotted_keep_no_newer_one_away(home: Path, versions, number: int) -> None:
    """Their footers tell that it comes after them, or is the same version; they are kept."""
    put_back(home, versions[number], *FILES)
    newest = catalog_path(versions[3]).read_bytes()
    paths = catalog_path(home), backup_paths(home)[0]
    for path in paths:
        damage_rows(path)
    rotten = [path.read_bytes() for path in paths]
    publish_catalog(home, newest)
    assert [path.read_bytes() for path in paths] == [newest, newest]
    assert sorted(path.read_bytes() for path in quarantine(home).glob("*parquet*")) == sorted(rotten)
    Catalog.open(home).verify()


@pytest.mark.parametrize("stands", ["newer", "another's", "of the same number"])
@pytest.mark.promise("Of two valid versions the newer is true")
def test_rotten_files_that_may_be_the_true_ones_are_not_replaced(
    home: Path, versions: dict[int, Path], strangers: dict[int, Path], tmp_path: Path, stands: str
) -> None:
    """Without a mark that knows of them their footers do: then everything stops, and nothing is changed."""
    older = (
        catalog_path(home).read_bytes() if stands == "another's" else catalog_path(versions[2]).read_bytes()
    )
    if stands == "another's":
        put_back(home, strangers[1], "catalogue", "second copy")
    elif stands == "of the same number":
        put_back(home, versions[1], *FILES)
        add(list_properties(tmp_path, 17), home)
    shutil.rmtree(mark_path(home).parent)
    paths = catalog_path(home), backup_paths(home)[0]
    for path in paths:
        damage_rows(path)
    rotten = [path.read_bytes() for path in paths]
    with pytest.raises(CatalogUnreadableError, match=r"(?s)cannot be read.*Nothing was changed"):
        publish_catalog(home, older)
    assert [path.read_bytes() for path in paths] == rotten


def test_a_first_catalogue_whose_mark_the_disk_refused_alarms_nobody(
    versions: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no second copy yet, so its mark was never lost; the next regular look makes both."""
    home, first = tmp_path / "home", catalog_path(versions[1]).read_bytes()

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("vlm_durable.versions.version_mark.write_replacing", refuse)
        publish_catalog(home, first)
        assert Catalog.open(home).rows == 10
    check_copies(home)
    assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes() == first
    assert mark_path(home).is_file()
    assert last_put_back(home) is None


def test_a_copy_that_a_person_replaced_does_not_come_back_where_the_disk_refuses_the_mark(
    home: Path, strangers: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another home's copy agrees with the old mark: beside it the person's choice would be put back."""
    kept = shutil.copy(catalog_path(home), tmp_path / "kept.parquet")
    put_back(home, strangers[4], *FILES)
    shutil.copyfile(kept, catalog_path(home))

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vlm_durable.versions.version_mark.write_replacing", refuse)
    chosen = Path(kept).read_bytes()
    replace_catalog(home, chosen, chosen=verify_file(Path(kept)))
    with pytest.raises(CatalogUnreadableError, match="is that of another one"):
        Catalog.open(home)
    assert catalog_path(home).read_bytes() == chosen


def test_a_mark_that_cannot_be_written_stops_nobody(home, versions, monkeypatch) -> None:
    """A full disk leaves the mark behind; what the catalogue holds is published, and read all the same."""
    put_back(home, versions[2], *FILES)

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vlm_durable.versions.version_mark.write_replacing", refuse)
    publish_catalog(home, catalog_path(versions[3]).read_bytes())
    shutil.rmtree(mark_path(home).parent)
    monkeypatch.setattr("vlm_catalog.catalog_copies.write_replacing", refuse)
    assert Catalog.open(home).rows == 30


@pytest.mark.parametrize("before", [None, 2])
@pytest.mark.promise("Of two valid versions the newer is true")
def test_what_is_published_is_marked_at_once(versions, tmp_path, before: int | None) -> None:
    """No reader has to come by first: an older version that is put back the moment after is not believed."""
    home = tmp_path / "home"
    if before is not None:
        shutil.copytree(versions[before], home)
    publish_catalog(home, catalog_path(versions[3]).read_bytes())
    put_back(home, versions[2], "catalogue", "second copy")
    with pytest.raises(CatalogUnreadableError, match="ingest 3 was durable here"):
        Catalog.open(home)


def test_the_catalogue_of_another_home_is_not_believed(home: Path, strangers: dict[int, Path]) -> None:
    """However new it is: the mark says which catalogue this home's is; without a mark nothing is taken."""
    mine = catalog_path(home).read_bytes()
    foreign = catalog_path(strangers[4]).read_bytes()
    catalog_path(home).write_bytes(foreign)
    assert Catalog.open(home).rows == 30
    assert catalog_path(home).read_bytes() == mine
    for put in (publish_catalog, replace_catalog):
        with pytest.raises(CatalogUnreadableError, match="is that of another one: ingest 3 of"):
            put(home, foreign)
    shutil.rmtree(mark_path(home).parent)
    for contents in ((foreign, mine), (mine, foreign)):
        paths = catalog_path(home), backup_paths(home)[0]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        with pytest.raises(CatalogUnreadableError, match="is of another home than its second copy"):
            Catalog.open(home)
        assert tuple(path.read_bytes() for path in paths) == contents


def copy_marks(source: Path, home: Path, *numbers: int) -> None:
    """Have some copies of a home's mark be those of another home."""
    for number in numbers:
        shutil.copyfile(mark_copies(mark_path(source))[number], mark_copies(mark_path(home))[number])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_mark_of_another_home_stops_no_sound_catalogue(home, strangers, number) -> None:
    """One copy of it does not count, however high, and is written over; of the other nothing is forgotten."""
    copy_marks(strangers[4], home, number)
    assert Catalog.open(home).rows == 30
    add(list_properties(home.parent, 40), home)
    assert [path.read_bytes() for path in mark_copies(mark_path(home))] == [mark_path(home).read_bytes()] * 2
    newest = {path: path.read_bytes() for path in FILES["mark"](home)}
    older = backup_paths(home)[1].read_bytes()
    copy_marks(strangers[4], home, number)
    for path in (catalog_path(home), backup_paths(home)[0]):
        path.write_bytes(older)
    with pytest.raises(CatalogUnreadableError, match="is an older version: ingest 3"):
        Catalog.open(home)
    assert newest[mark_copies(mark_path(home))[1 - number]] in [
        path.read_bytes() for path in mark_copies(mark_path(home))
    ]


@pytest.mark.parametrize("with_version_before", [False, True])
def test_two_marks_of_another_home_stop_until_a_person_names_the_catalogue(
    home: Path, strangers: dict[int, Path], with_version_before: bool
) -> None:
    """Nobody can tell which of them is this home's: the command in the sentence settles it."""
    copy_marks(strangers[4], home, 0, 1)
    if with_version_before:
        shutil.copyfile(backup_paths(strangers[4])[1], backup_paths(home)[1])
    with pytest.raises(CatalogUnreadableError, match=f"--catalog {catalog_path(home)}"):
        Catalog.open(home)
    chosen = check_catalog(home, str(catalog_path(home)))
    assert any("is that of another one" in one for one in chosen.sentences())
    put_in_place(home, chosen)
    assert Catalog.open(home).rows == 30
    with pytest.raises(CatalogError, match="is the catalogue of another home"):
        check_catalog(home, str(catalog_path(strangers[4])))


def test_another_homes_catalogue_beside_a_mark_alone_is_not_offered(home, strangers, tmp_path) -> None:
    """The command that a sentence names does not put the catalogue of strangers in place."""
    mine = catalog_path(home).read_bytes()
    shutil.copyfile(catalog_path(strangers[1]), catalog_path(home))
    backup_paths(home)[0].write_bytes(b"damaged")
    backup_paths(home)[1].unlink()
    mark_path(home).write_bytes(b"damaged")
    with pytest.raises(CatalogUnreadableError, match="is that of another one") as stopped:
        Catalog.open(home)
    assert re.findall("--catalog ([^`]+)`", str(stopped.value)) == ["FILE"]
    kept = tmp_path / "kept.parquet"
    kept.write_bytes(mine)
    put_in_place(home, check_catalog(home, str(kept)))
    assert Catalog.open(home).rows == 30


@pytest.mark.parametrize("whose", ["another's", "older"])
@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_second_copy_with_damaged_rows_has_nobody_believe_what_the_mark_refuses(home, strangers, whose):
    """Its footer reads, so it is taken for whole until its rows are read: then everything stops."""
    wrong = catalog_path(strangers[1]) if whose == "another's" else backup_paths(home)[1]
    shutil.copyfile(wrong, catalog_path(home))
    flip_bit(backup_paths(home)[0], 200)
    marks = mark_path(home).read_bytes()
    with pytest.raises(CatalogUnreadableError, match=r"another one|an older version"):
        Catalog.open(home)
    assert mark_path(home).read_bytes() == marks
    assert catalog_path(home).read_bytes() == wrong.read_bytes()


@pytest.mark.parametrize("of_the_mark", [0, 1])
def test_files_of_two_homes_beside_marks_of_both_stop(home, strangers, of_the_mark) -> None:
    """A foreign catalogue with a copy of its mark is not believed for its higher number."""
    copy_marks(strangers[4], home, of_the_mark)
    mine = backup_paths(home)[0].read_bytes()
    shutil.copyfile(catalog_path(strangers[4]), catalog_path(home))
    with pytest.raises(CatalogUnreadableError, match="are those of two homes"):
        Catalog.open(home)
    put_in_place(home, check_catalog(home, str(backup_paths(home)[0])))
    assert Catalog.open(home).rows == 30
    assert backup_paths(home)[0].read_bytes() != mine, "it has a number of its own"


@pytest.mark.parametrize("of_the_mark", [0, 1])
def test_partitions_of_two_homes_beside_marks_of_both_stop(home, strangers, monkeypatch, of_the_mark) -> None:
    """What is published does not say whose home this is: the mark that contradicts the files counts."""
    copy_marks(strangers[1], home, of_the_mark)
    both = {Catalog.open(strangers[1]).catalog_id, catalog_id_of(home)}
    monkeypatch.setattr(catalog_copies, "recorded_catalogs", lambda home: both)
    with pytest.raises(CatalogUnreadableError, match="is that of another one"):
        Catalog.open(home)


@pytest.mark.parametrize("of_the_mark", [0, 1])
@pytest.mark.parametrize("lost", ["damaged", "gone"])
def test_a_foreign_catalogue_beside_one_foreign_mark_stops_where_no_second_copy_reads(
    home: Path, strangers, tmp_path, of_the_mark: int, lost: str
) -> None:
    """One file and one mark of each home: which of the two homes this is nothing says."""
    kept = shutil.copy(catalog_path(home), tmp_path / "kept.parquet")
    copy_marks(strangers[1], home, of_the_mark)
    shutil.copyfile(catalog_path(strangers[1]), catalog_path(home))
    backup_paths(home)[0].write_bytes(b"damaged") if lost == "damaged" else backup_paths(home)[0].unlink()
    for read in (Catalog.open, check_copies):
        with pytest.raises(CatalogUnreadableError, match="are those of two homes"):
            read(home)
    assert catalog_id_of(home) is None
    put_in_place(home, check_catalog(home, str(kept)))
    assert Catalog.open(home).rows == 30


def test_the_id_of_a_catalogue_is_told_as_long_as_its_files_agree(home, strangers, tmp_path) -> None:
    """What partitions belong to is never another home's: where its files do not agree nobody is told."""
    own, other = (Catalog.open(one).catalog_id for one in (home, strangers[1]))
    assert own != other
    assert catalog_id_of(tmp_path / "none") is None
    assert catalog_id_of(home) == own
    copy_marks(strangers[1], home, 0)
    assert catalog_id_of(home) == own
    copy_marks(strangers[1], home, 1)
    assert catalog_id_of(home) is None
    shutil.rmtree(mark_path(home).parent)
    assert catalog_id_of(home) == own
    shutil.copyfile(catalog_path(strangers[1]), catalog_path(home))
    assert catalog_id_of(home) is None
    catalog_path(home).unlink()
    assert catalog_id_of(home) == own


def test_a_home_that_lost_its_catalogue_keeps_its_id(dataset: Dataset, made: Path, tmp_path: Path) -> None:
    """Its published partitions name it: a catalogue of another id would have them count as another home's."""
    home = dataset.settings.home
    own = dataset.catalog.catalog_id
    record = dataset.descriptions.record(dataset.keys[0])
    assert record is not None and record.origin == own
    for folder in catalog_folders(home):
        shutil.rmtree(folder)
    ingest(made / "listing.jsonl", tmp_path / "other", range_size=3)
    with pytest.raises(CatalogError, match="is the catalogue of another home"):
        check_catalog(home, str(catalog_path(tmp_path / "other")))
    ingest(made / "listing.jsonl", home, range_size=3)
    assert dataset.catalog.catalog_id == own
    for published in (dataset.descriptions, dataset.embeddings):
        assert all(published.verify(key).ok for key in dataset.keys)


@pytest.mark.parametrize("of_the_mark", [0, 1])
@pytest.mark.promise("Of two valid versions the newer is true")
def test_what_is_published_says_whose_home_it_is(
    dataset: Dataset, strangers: dict[int, Path], tmp_path: Path, of_the_mark: int
) -> None:
    """A catalogue, its second copy and one mark of strangers are not believed beside this home's partitions.

    With a second copy of its own the home puts itself right.
    """
    home, rows = dataset.settings.home, dataset.catalog.rows
    kept = Path(shutil.copy(catalog_path(home), tmp_path / "kept.parquet"))
    copy_marks(strangers[4], home, of_the_mark)
    for path in (catalog_path(home), backup_paths(home)[0]):
        shutil.copyfile(catalog_path(strangers[4]), path)
    with pytest.raises(CatalogUnreadableError, match="is that of another one") as stopped:
        Catalog.open(home)
    assert re.findall("--catalog ([^`]+)`", str(stopped.value)) == ["FILE"]
    put_in_place(home, check_catalog(home, str(kept)))
    assert Catalog.open(home).rows == rows
    copy_marks(strangers[4], home, of_the_mark)
    shutil.copyfile(catalog_path(strangers[4]), catalog_path(home))
    assert Catalog.open(home).rows == rows
    copy_marks(strangers[4], home, of_the_mark)
    assert Catalog.open(home).rows == rows
    assert len({path.read_bytes() for path in mark_copies(mark_path(home))}) == 1, "it is asked once"


@pytest.mark.parametrize("of_the_mark", [0, 1])
def test_an_older_catalogue_beside_marks_of_two_homes_gets_a_number_that_nobody_had(
    home: Path, versions: dict[int, Path], strangers: dict[int, Path], of_the_mark: int
) -> None:
    """The mark of this home counts, though the other copy is another home's: one command settles it."""
    copy_marks(strangers[4], home, of_the_mark)
    shutil.copyfile(catalog_path(strangers[4]), catalog_path(home))
    put_back(home, versions[2], "second copy")
    chosen = check_catalog(home, str(backup_paths(home)[0]))
    assert any("the newest that is known of is ingest 3" in one for one in chosen.sentences())
    put_in_place(home, chosen)
    assert (Catalog.open(home).rows, Catalog.open(home).header.sequence) == (20, 4)


@pytest.mark.parametrize("marks", ["damaged", "the first another's", "the second another's"])
def test_a_copy_of_ones_own_comes_back_when_nothing_here_reads(home, strangers, tmp_path, marks) -> None:
    """Whatever the marks are, the command that the sentence names takes it, and its number never falls."""
    kept = shutil.copyfile(catalog_path(home), tmp_path / "kept.parquet")
    if marks == "damaged":
        damage_marks(home)
    else:
        copy_marks(strangers[4], home, 0 if "first" in marks else 1)
    for path in (catalog_path(home), *backup_paths(home)):
        path.write_bytes(b"damaged")
    with pytest.raises(CatalogUnreadableError, match="--catalog FILE"):
        Catalog.open(home)
    put_in_place(home, check_catalog(home, str(kept)))
    assert Catalog.open(home).rows == 30
    assert Catalog.open(home).header.sequence == 4


def damage_marks(home: Path) -> None:
    for path in mark_copies(mark_path(home)):
        path.write_bytes(b"?")


@pytest.mark.promise("Of two valid versions the newer is true")
def test_damaged_marks_are_written_anew_beside_two_copies_that_are_alike(home: Path) -> None:
    """Unreadable is not the same as none: it is told, once."""
    damage_marks(home)
    for _ in range(2):
        assert Catalog.open(home).rows == 30
    title, sentence = last_put_back(home)[1:]
    assert title == "The catalogue's version mark could not be read"
    assert str(mark_path(home)) in sentence and "was written anew" in sentence


@pytest.mark.parametrize("harm", ["older", "damaged", "gone"])
@pytest.mark.parametrize("name", ["catalogue", "second copy"])
@pytest.mark.promise("Of two valid versions the newer is true")
def test_damaged_marks_beside_copies_that_differ_stop(home, versions, name, harm) -> None:
    """Nobody can tell which version was the newest: nothing changes until a person names it."""
    (path,) = FILES[name](home)
    other = backup_paths(home)[0] if name == "catalogue" else catalog_path(home)
    if harm == "older":
        put_back(home, versions[2], name)
    elif harm == "damaged":
        path.write_bytes(b"damaged")
    else:
        path.unlink()
    damage_marks(home)
    before = other.read_bytes()
    for read in (Catalog.open, check_copies):
        with pytest.raises(CatalogUnreadableError, match="its mark cannot be read"):
            read(home)
    with pytest.raises(CatalogUnreadableError):
        publish_catalog(home, before)
    assert other.read_bytes() == before
    put_in_place(home, check_catalog(home, str(other)))
    assert Catalog.open(home).rows == 30


def test_what_a_person_names_is_read_once_and_no_renumbered_copy_goes_unread(home, monkeypatch) -> None:
    """The check read every row of these bytes; bytes that are written anew are read before they count."""
    chosen = check_catalog(home, str(catalog_path(home)))
    with monkeypatch.context() as once:
        once.setattr(catalog_copies, "verify_file", None)
        put_in_place(home, chosen)
    newest, older = catalog_path(home).read_bytes(), check_catalog(home, str(backup_paths(home)[1]))

    def torn(data: bytes, header: object) -> bytes:
        torn_file = home / "torn"
        torn_file.write_bytes(data)
        damage_rows(torn_file)
        return torn_file.read_bytes()

    monkeypatch.setattr("vlm_catalog.chosen_catalog._renumbered", torn)
    with pytest.raises(CatalogError, match=r"(?s)renumbered, is no whole catalogue.*Nothing was changed"):
        put_in_place(home, older)
    assert catalog_path(home).read_bytes() == newest


def test_a_choice_is_not_put_over_what_came_while_a_person_decided(home: Path, tmp_path: Path) -> None:
    """The mark is asked before anything is changed: the ingest of that moment is not lost unseen."""
    chosen = check_catalog(home, str(backup_paths(home)[1]))
    add(list_properties(tmp_path, 40), home)
    with pytest.raises(CatalogError, match=r"it is ingest 4 now.*Do the same again"):
        put_in_place(home, chosen)
    assert Catalog.open(home).rows == 40
    put_in_place(home, check_catalog(home, chosen.place))
    assert (Catalog.open(home).rows, Catalog.open(home).header.sequence) == (30, 5)


def test_two_versions_of_one_number_are_told_apart(home: Path, tmp_path: Path) -> None:
    """The mark says which is true; without it nothing is overwritten."""
    mine = catalog_path(home).read_bytes()
    shutil.copytree(home, tmp_path / "fork")
    put_back(tmp_path / "fork", tmp_path / "nothing", "mark")
    for path in (catalog_path(tmp_path / "fork"), backup_paths(tmp_path / "fork")[0]):
        shutil.copyfile(backup_paths(home)[1], path)
    add(list_properties(tmp_path, 27), tmp_path / "fork")
    fork = catalog_path(tmp_path / "fork").read_bytes()
    catalog_path(home).write_bytes(fork)
    assert Catalog.open(home).rows == 30
    assert catalog_path(home).read_bytes() == mine
    catalog_path(home).write_bytes(fork)
    shutil.rmtree(mark_path(home).parent)
    with pytest.raises(CatalogUnreadableError, match="are both ingest 3, with different properties"):
        Catalog.open(home)
    assert (catalog_path(home).read_bytes(), backup_paths(home)[0].read_bytes()) == (fork, mine)


def test_a_newer_second_copy_that_is_damaged_is_set_aside(home: Path, versions: dict[int, Path]) -> None:
    """The catalogue goes on by itself, and what was found is kept."""
    put_back(home, versions[2], "catalogue", "mark")
    damage_rows(backup_paths(home)[0])
    damaged = backup_paths(home)[0].read_bytes()
    assert Catalog.open(home).rows == 20
    assert [path.read_bytes() for path in quarantine(home).glob("*parquet*")] == [damaged]
    check_copies(home)
    assert backup_paths(home)[0].read_bytes() == catalog_path(home).read_bytes()


def test_a_home_that_had_a_catalogue_is_not_a_new_home(home: Path) -> None:
    """With all files gone the mark still says that there was one: nothing is numbered anew by itself."""
    for name in ("catalogue", "second copy", "version before"):
        for path in FILES[name](home):
            path.unlink()
    with pytest.raises(CatalogUnreadableError, match="it is gone"):
        add(list_properties(home.parent, 30), home)
    shutil.rmtree(mark_path(home).parent)
    with pytest.raises(CatalogMissingError):
        Catalog.open(home)
