"""A withdrawn property stays out, whatever happens to the catalogue and to the list of withdrawn ids."""

from __future__ import annotations

import hashlib
import shutil
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import Result

from faults.file_operations import FileOperations, Operation
from tests.support.command_line import run_command
from tests.support.homes import Dataset
from tests.support.listings import catalogued, write_listing
from vlm_assets.config.settings import load_settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.home_audit import audit
from vlm_assets.services.repairs import Remedy, find_repairs
from vlm_assets.services.withdrawal import prepare_withdrawal, returned_ids
from vlm_catalog.catalog_copies import backup_paths, catalog_path, mark_path
from vlm_catalog.catalog_file import WITHDRAWN
from vlm_catalog.chosen_catalog import check_catalog
from vlm_catalog.ingest import IngestReport, ingest
from vlm_catalog.withdrawn_ids import (
    WithdrawnIds,
    WithdrawnListError,
    list_paths,
    read_withdrawn,
    restore_withdrawn,
    save_withdrawn,
    share_withdrawn,
)
from vlm_durable.mirror.bucket import S3Folder, StoredObject, TakenError
from vlm_durable.versions.findings import FindingKind

IDS = [f"p{number}" for number in range(6)]


def add(home: Path, ids: list[str]) -> IngestReport:
    """Ingest these properties, in this order."""
    listing = write_listing(home.parent / "listing.jsonl", {one: [f"{one}.jpg"] for one in ids})
    return ingest(listing, home, range_size=3, image_root=Path("/"))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of six properties, of which p1 was withdrawn; ``before``: as it was before that."""
    folder = tmp_path_factory.mktemp("withdrawn")
    add(folder / "home", IDS)
    shutil.copytree(folder / "home", folder / "before")
    Dataset(load_settings(model="example", home=folder / "home")).withdraw("p1")
    return folder


@pytest.fixture
def dataset(template: Path, tmp_path: Path) -> Dataset:
    """A copy of the home that a test may change."""
    shutil.copytree(template / "home", tmp_path / "home")
    return Dataset(load_settings(model="example", home=tmp_path / "home"))


def call(dataset: Dataset, *arguments: str) -> Result:
    return run_command(dataset.settings.home, *arguments)


def ids(home: Path) -> list[str]:
    """The ids of the catalogue, by ordinal."""
    return list(catalogued(home))


def put_catalog_back(home: Path, older: Path) -> None:
    """Have everything that says which catalogue this is say what an older home said."""
    for files in (catalog_path, lambda home: backup_paths(home)[0], mark_path):
        for path in files(home).parent.iterdir():
            if path not in list_paths(home):
                path.unlink()
        for path in files(older).parent.iterdir():
            shutil.copyfile(path, files(home).parent / path.name)


def wrong(dataset: Dataset) -> list[FindingKind]:
    """What a deep audit finds wrong."""
    return [one.kind for one in audit(dataset.settings, dataset.catalog, deep=True).wrong]


def test_the_list_says_nothing_to_who_guesses_ids(dataset: Dataset) -> None:
    """No id and no plain digest stands in it; nobody else may read it; another home has another key."""
    home = dataset.settings.home
    for path in list_paths(home):
        assert "p1" not in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = WithdrawnIds.new().changed(["p1"], withdrawn=True)
    mine = read_withdrawn(home)
    assert mine is not None
    assert not set(other.changes).intersection(mine.changes)
    assert "p1" in mine
    assert "p2" not in mine
    assert ids(home)[1] == mine.tombstone("p1")


def test_what_is_said_twice_changes_nothing() -> None:
    """A command that is given again, and tombstones that are read again, leave the list as it was."""
    once = WithdrawnIds.new().changed(["a", "b"], withdrawn=True).changed(["b"], withdrawn=False)
    assert once.changed(["a"], withdrawn=True).changed(["b"], withdrawn=False) == once
    assert ("a" in once, "b" in once) == (True, False)
    tombstones = [once.tombstone(id_) for id_ in "ab"]
    assert once.with_tombstones(tombstones) == once
    again = once.changed(["b"], withdrawn=True)
    assert again.with_tombstones(tombstones) == again


def test_an_older_catalogue_brings_no_withdrawn_property_back(dataset: Dataset, template: Path) -> None:
    """It is named by the audit, and withdrawn again by the command that the sentence names."""
    home = dataset.settings.home
    put_catalog_back(home, template / "before")
    assert ids(home) == IDS
    found = audit(dataset.settings, dataset.catalog)
    assert [one.kind for one in found.wrong] == [FindingKind.WITHDRAWN]
    assert "such as 'p1'" in found.wrong[0].sentence
    assert [one.remedy for one in find_repairs(dataset.settings, found)] == [Remedy.BY_HAND]
    assert returned_ids(dataset.settings, dataset.catalog) == ["p1"]
    done = call(dataset, "withdraw", "--yes")
    assert done.exit_code == 0, done.output
    assert "p1" not in ids(home)
    assert wrong(dataset) == []


def test_a_catalogue_from_before_the_property_takes_it_not_in_again(dataset: Dataset, tmp_path: Path) -> None:
    """Where the catalogue has neither the property nor its tombstone, the list alone keeps it out."""
    home = dataset.settings.home
    shutil.copytree(home, tmp_path / "earlier")
    add(home, [*IDS, "p6", "p7", "p8"])
    dataset.withdraw("p7")
    put_catalog_back(home, tmp_path / "earlier")
    assert not any(one.startswith(WITHDRAWN) for one in ids(home)[2:])
    report = add(home, [*IDS, "p8", "p7", "p6"])
    assert report.withdrawn == 2
    assert "2 listed properties were withdrawn and stay out" in " ".join(report.sentences())
    assert ids(home)[6:] == ["p8", "p6"]


@pytest.mark.parametrize("lists", ["whole", "older"])
def test_a_published_tombstone_keeps_its_number(dataset: Dataset, tmp_path: Path, lists: str) -> None:
    """An older catalogue gets the tombstone of a published range back in its place, and the list has it."""
    home = dataset.settings.home
    shutil.copytree(home, tmp_path / "earlier")
    add(home, [*IDS, "p6", "p7", "p8"])
    dataset.withdraw("p7")
    dataset.describe(dataset.keys[2])
    before = ids(home), dataset.catalog.slice(dataset.catalog.ranges[2])
    put_catalog_back(home, tmp_path / "earlier")
    if lists == "older":
        for path in list_paths(home):
            shutil.copyfile(tmp_path / "earlier" / path.relative_to(home), path)
    add(home, ["p9", "p8", "p7", "p6", *IDS])
    assert (ids(home)[:9], dataset.catalog.slice(dataset.catalog.ranges[2])) == before
    assert ids(home)[9:] == ["p9"]
    assert wrong(dataset) == []


def test_an_id_that_is_taken_off_the_list_comes_in_again_and_may_be_withdrawn_again(dataset: Dataset) -> None:
    """It gets a new number; the ids of tombstones stay unique; another id cannot be taken off."""
    home = dataset.settings.home
    with pytest.raises(CommandError, match="'p2' is not withdrawn"):
        call(dataset, "withdraw", "--undo", "p1", "--undo", "p2")
    assert add(home, IDS).written is False
    assert call(dataset, "withdraw", "--undo", "p1").exit_code == 0
    assert add(home, IDS).restored == ()
    assert ids(home)[6:] == ["p1"]
    assert wrong(dataset) == []
    dataset.withdraw("p1")
    assert add(home, IDS).restored == ()
    assert len(set(ids(home))) == 7
    assert "p1" not in ids(home)
    assert wrong(dataset) == []


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", ["gone", "damaged", "older"])
def test_one_copy_of_the_list_is_enough(dataset: Dataset, number: int, damage: str) -> None:
    """What the other copy says counts, and the next ingest restores the list and says from what."""
    home = dataset.settings.home
    path, other = list_paths(home)[number], list_paths(home)[1 - number]
    older = path.read_bytes()
    dataset.withdraw("p2")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(older if damage == "older" else b"{}")
    report = add(home, [*IDS, "p6"])
    (sentence,) = report.restored
    assert f"in {path}, and was restored from {other}" in sentence
    assert path.read_bytes() == other.read_bytes()
    assert [name for name in ids(home) if not name.startswith(WITHDRAWN)] == ["p0", "p3", "p4", "p5", "p6"]
    assert restore_withdrawn(home) is None


def test_a_list_that_forgot_is_completed_from_the_tombstones(dataset: Dataset) -> None:
    """With both copies from an earlier day the catalogue still says what was withdrawn since."""
    home = dataset.settings.home
    older = [path.read_bytes() for path in list_paths(home)]
    dataset.withdraw("p2")
    for path, data in zip(list_paths(home), older, strict=True):
        path.write_bytes(data)
    report = add(home, IDS)
    assert report.restored == (
        "1 property was missing from the list of withdrawn ids, and were restored from the tombstones of"
        " the catalogue.",
    )
    withdrawn = read_withdrawn(home)
    assert withdrawn is not None
    assert "p2" in withdrawn
    assert (report.written, report.gone) == (False, 0)


def test_a_list_that_is_lost_stops_an_ingest(dataset: Dataset) -> None:
    """Nobody can say which ids the tombstones are of: nothing is ingested until a person says so."""
    home = dataset.settings.home
    for path in list_paths(home):
        path.unlink()
    with pytest.raises(WithdrawnListError, match="The list of withdrawn ids is gone"):
        add(home, IDS)
    with pytest.raises(WithdrawnListError, match="The list of withdrawn ids is gone"):
        prepare_withdrawal(dataset.settings, ["p2"])
    assert wrong(dataset) == [FindingKind.WITHDRAWN]
    assert call(dataset, "withdraw", "--new-list").exit_code == 0
    assert add(home, IDS).new == 1, "this one nobody can tell any more"
    assert wrong(dataset) == []
    for path in list_paths(home):
        path.write_bytes(b"garbage")
    with pytest.raises(WithdrawnListError, match="cannot be read"):
        add(home, IDS)


def test_an_id_that_begins_like_a_tombstone_is_one_of_a_property(tmp_path: Path) -> None:
    """Where it is not listed any more it is gone as any other, and no list of withdrawn ids is missed."""
    add(tmp_path / "home", ["p0", f"{WITHDRAWN}-house"])
    assert add(tmp_path / "home", ["p0"]).gone_ids == (f"{WITHDRAWN}-house",)


def test_the_list_of_another_home_is_no_copy_of_this(dataset: Dataset, tmp_path: Path) -> None:
    """Two lists with two keys are named, and neither is overwritten."""
    home = dataset.settings.home
    save_withdrawn(tmp_path / "other", WithdrawnIds.new().changed(["p3"], withdrawn=True))
    shutil.copyfile(list_paths(tmp_path / "other")[0], list_paths(home)[1])
    before = [path.read_bytes() for path in list_paths(home)]
    with pytest.raises(WithdrawnListError, match="are of two homes"):
        add(home, IDS)
    with pytest.raises(WithdrawnListError, match="are of two homes"):
        save_withdrawn(home, WithdrawnIds.new())
    assert [path.read_bytes() for path in list_paths(home)] == before


class DiedError(BaseException):
    """The process is gone."""


def test_a_kill_while_the_list_is_written_loses_nothing(dataset: Dataset, tmp_path: Path) -> None:
    """At each operation the list reads, with all that was on it, and the next write is complete."""
    number = 0
    while True:
        number += 1
        home = tmp_path / str(number)
        shutil.copytree(dataset.settings.home, home)
        withdrawn = read_withdrawn(home)
        assert withdrawn is not None

        def die(operation: Operation, operations: FileOperations, number: int = number) -> None:
            if operations.count >= number and operation.name != "close":
                raise DiedError

        is_dead = False
        try:
            with FileOperations(home, before=die).watched():
                save_withdrawn(home, withdrawn.changed(["p4"], withdrawn=True))
        except DiedError:
            is_dead = True
        after = read_withdrawn(home)
        assert after is not None
        assert "p1" in after
        assert is_dead or "p4" in after
        save_withdrawn(home, withdrawn.changed(["p4"], withdrawn=True))
        first, second = (path.read_bytes() for path in list_paths(home))
        assert first == second
        assert not [path for path in home.rglob("*") if path.name.startswith(".withdrawn")]
        if not is_dead:
            break
    assert number > 8


def test_what_was_withdrawn_meanwhile_stays(dataset: Dataset) -> None:
    """Of two processes that have read the same list neither takes the other's change back."""
    home = dataset.settings.home
    read = read_withdrawn(home)
    assert read is not None
    for one in ("p2", "p3"):
        save_withdrawn(home, read.changed([one], withdrawn=True))
    withdrawn = read_withdrawn(home)
    assert withdrawn is not None
    assert [one in withdrawn for one in IDS] == [False, True, True, True, False, False]


def test_a_machine_that_another_one_is_faster_than_takes_its_list_in(dataset: Dataset, monkeypatch) -> None:
    """The store's list is replaced only if it is the one that was read; the next try has what both know."""
    home = dataset.settings.home
    before = read_withdrawn(home)
    assert before is not None
    save_withdrawn(home, before.changed(["p2"], withdrawn=True))
    others = before.changed(["p3"], withdrawn=True).to_bytes()
    stored: list[bytes] = []

    def look(*_: object) -> StoredObject | None:
        if stored:
            digest = hashlib.sha256(stored[-1]).hexdigest()
            return StoredObject(len(stored[-1]), digest, digest, datetime.now(UTC))
        stored.append(others)
        return None

    def put(_: object, name: str, content: bytes, *, over: StoredObject | None) -> None:
        if over is None or over.sha256 != hashlib.sha256(stored[-1]).hexdigest():
            raise TakenError(name)
        stored.append(content)

    monkeypatch.setattr(S3Folder, "head", look)
    monkeypatch.setattr(S3Folder, "put", put)
    monkeypatch.setattr(S3Folder, "get", lambda *_, **how: stored[-1])
    shared = share_withdrawn(home, S3Folder("bucket", "home/"))
    assert shared == read_withdrawn(home)
    assert shared is not None and [one in shared for one in IDS[1:4]] == [True] * 3
    assert stored == [others, shared.to_bytes()]


@pytest.mark.parametrize("number", [0, 1])
def test_an_older_copy_takes_no_change_back(dataset: Dataset, number: int) -> None:
    """Of an id that was withdrawn and taken off the list, the later of the two counts, in whichever copy."""
    home = dataset.settings.home
    older = list_paths(home)[number].read_bytes()
    assert call(dataset, "withdraw", "--undo", "p1").exit_code == 0
    list_paths(home)[number].write_bytes(older)
    withdrawn = read_withdrawn(home)
    assert withdrawn is not None
    assert "p1" not in withdrawn


def test_the_list_is_no_published_partition(dataset: Dataset) -> None:
    """The list lies beside the copies of the catalogue: a catalogue that a person names does not lack it."""
    home = dataset.settings.home
    assert check_catalog(home, str(catalog_path(home))).unlisted == ()
