"""The catalogue of a home without a store, or with one in memory. Real stores are in tests/integration."""

import hashlib
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.damage import damage_rows
from tests.support.homes import Dataset
from tests.support.listings import write_listing
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_copies import backup_paths, catalog_path, last_store, mark_path, note_store
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.ingest import ingest
from vlm_catalog.stored_catalog import (
    CATALOG_NAME,
    extend_catalog,
    pull_catalog,
    put_back_catalog,
    stored_catalog_trouble,
)
from vlm_catalog.withdrawn_ids import WithdrawnIds, save_withdrawn
from vlm_durable.mirror.bucket import S3Folder, StoredObject, TakenError, UnfitStoreError
from vlm_durable.mirror.mirror import NO_MIRROR
from vlm_durable.versions.version_mark import UNKNOWN_STORE, mark_copies


def test_without_a_store_the_catalogue_is_this_homes_alone(dataset: Dataset):
    """Nothing is missing in a store that there is not, and the last one that there was is remembered."""
    home = dataset.settings.home
    note_store(home, S3Folder("bucket", "before/"))
    assert pull_catalog(home, NO_MIRROR) is None
    assert put_back_catalog(home, NO_MIRROR) == []
    extend_catalog(home, catalog_path(home).read_bytes(), store=NO_MIRROR, over=None)
    assert last_store(home) == "s3://bucket/before"
    catalog_path(home).write_bytes(b"damaged: the home's own copies put it right, and no store is asked")
    assert pull_catalog(home, NO_MIRROR) is None


def test_a_catalogue_whose_mark_is_lost_may_have_been_in_the_store(dataset, monkeypatch):
    """A store that was emptied is not filled from a home that no longer knows what the store had."""
    home = dataset.settings.home
    store = S3Folder("bucket", "before/")
    note_store(home, store)
    for copy in mark_copies(mark_path(home)):
        copy.write_bytes(b"damaged")
    assert last_store(home) == UNKNOWN_STORE
    monkeypatch.setattr(S3Folder, "head", lambda folder, name: None)
    for _ in range(2):  # the first opening writes the mark anew
        with pytest.raises(CatalogError, match="may have been there: was the store emptied"):
            pull_catalog(home, store)


STORE = S3Folder("bucket", "home/")


@pytest.fixture
def objects(monkeypatch):
    """The objects of a store that honours conditions."""
    stored: dict[str, bytes] = {}

    def look(_, name):
        data = stored.get(name)
        digest = hashlib.sha256(data or b"").hexdigest()
        return None if data is None else StoredObject(len(data), digest, digest, datetime.now(UTC))

    def put(folder, name, content, *, over):
        if over != look(folder, name):
            raise TakenError(name)
        stored[name] = content
        return look(folder, name)

    for name, answer in (
        ("head", look),
        ("put", put),
        ("get", lambda _, name, **how: stored[name]),
        ("prove", lambda _: None),
        ("folders", lambda *_: iter(())),
        ("names", lambda *_: iter(())),
    ):
        monkeypatch.setattr(S3Folder, name, answer)
    return stored


def add(home, folder, name, store=NO_MIRROR):
    """Ingest one property more."""
    listing = write_listing(folder / "listing.jsonl", {name: []})
    ingest(listing, home, image_root=Path(Catalog.open(home).image_root), store=store)


def test_a_home_is_never_ahead_of_its_store(dataset, objects):
    """What the store refuses, because another machine was faster, changes nothing here."""
    home = dataset.settings.home
    stored, before = pull_catalog(home, STORE), catalog_path(home).read_bytes()
    objects[CATALOG_NAME] = b"another machine's"
    with pytest.raises(CatalogError, match="Another machine changed the catalogue"):
        extend_catalog(home, before + b" ", store=STORE, over=stored)
    assert (catalog_path(home).read_bytes(), objects[CATALOG_NAME]) == (before, b"another machine's")


def test_no_catalogue_goes_into_a_store_that_honours_no_conditions(dataset, objects, monkeypatch):
    """There two ingests at once would both succeed."""

    def refuse(_):
        raise UnfitStoreError("it honours none")

    monkeypatch.setattr(S3Folder, "prove", refuse)
    with pytest.raises(UnfitStoreError):
        pull_catalog(dataset.settings.home, STORE)
    assert objects == {}


def test_damage_in_a_store_is_not_taken_and_not_written_over(dataset, objects, monkeypatch):
    """Bytes that are not those of the checksum may be a newer catalogue: a person decides."""
    home = dataset.settings.home
    pull_catalog(home, STORE)
    before = catalog_path(home).read_bytes()
    objects[CATALOG_NAME] = before + b"damage"
    monkeypatch.setattr(S3Folder, "get", lambda *_, **how: before)
    for act in (pull_catalog, put_back_catalog):
        with pytest.raises(CatalogError, match="not those that its checksum stands for"):
            act(home, STORE)
    assert (catalog_path(home).read_bytes(), objects[CATALOG_NAME]) == (before, before + b"damage")


def test_of_two_catalogues_of_one_number_a_person_names_the_true_one(dataset, objects, tmp_path):
    """Two machines were extended while no store was set: the sentence has the command for either."""
    home, other = dataset.settings.home, tmp_path / "other"
    pull_catalog(home, STORE)
    shutil.copytree(home, other)
    for machine in (home, other):
        add(machine, tmp_path, f"of {machine.name}")
    objects[CATALOG_NAME] = catalog_path(other).read_bytes()
    with pytest.raises(CatalogError, match="does not come before it: the store was put back"):
        pull_catalog(home, STORE)


def test_a_store_that_was_emptied_is_filled_by_a_persons_word_alone(dataset, objects):
    """Another machine may have had a newer catalogue there."""
    home = dataset.settings.home
    pull_catalog(home, STORE)
    before = objects.pop(CATALOG_NAME)
    for act in (pull_catalog, put_back_catalog):
        with pytest.raises(CatalogError, match="was the store emptied"):
            act(home, STORE)
    assert objects == {}
    put_back_catalog(home, STORE, newest_here=True)
    assert objects == {CATALOG_NAME: before}
    assert pull_catalog(home, STORE) is not None


def test_a_stores_older_catalogue_replaces_nothing(dataset, objects, tmp_path):
    """Neither a newer one of the home nor a damaged one: a person says that it is true."""
    home = dataset.settings.home
    pull_catalog(home, STORE)
    older = objects[CATALOG_NAME]
    add(home, tmp_path, "late", STORE)
    newest, objects[CATALOG_NAME] = objects[CATALOG_NAME], older
    with pytest.raises(CatalogError, match="does not come before it: the store was put back"):
        pull_catalog(home, STORE)
    assert catalog_path(home).read_bytes() == newest
    for path in (catalog_path(home), *backup_paths(home)):
        path.write_bytes(b"damaged")
    with pytest.raises(CatalogError, match="does not take its place: it is an older version"):
        pull_catalog(home, STORE)
    objects[CATALOG_NAME] = newest
    pull_catalog(home, STORE)
    assert catalog_path(home).read_bytes() == newest


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("files", [1, 2])
def test_rows_that_rotted_keep_the_stores_catalogue_not_away(dataset, objects, tmp_path, files, is_newer):
    """Their footers read, so a home opens: the same version of the store, or a newer one, puts it right."""
    home, other = dataset.settings.home, tmp_path / "other"
    pull_catalog(home, STORE)
    if is_newer:
        shutil.copytree(home, other)
        add(other, tmp_path, "late", STORE)
    for path in (catalog_path(home), backup_paths(home)[0])[:files]:
        damage_rows(path)
    pull_catalog(home, STORE)
    assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes() == objects[CATALOG_NAME]
    Catalog.open(home).verify()


def test_the_store_of_another_home_is_named(dataset, objects, tmp_path):
    """Neither catalogue is changed, however new the other is."""
    other = tmp_path / "other"
    ingest(write_listing(tmp_path / "listing.jsonl", {"x": []}), other)
    pull_catalog(dataset.settings.home, STORE)
    before = catalog_path(other).read_bytes(), dict(objects)
    with pytest.raises(CatalogError, match="is the store of another home"):
        pull_catalog(other, STORE)
    assert (catalog_path(other).read_bytes(), objects) == before


def test_the_list_of_withdrawn_ids_comes_first(dataset, objects, monkeypatch):
    """A run or ingest that takes over a catalogue knows who was withdrawn."""
    home = dataset.settings.home
    save_withdrawn(home, WithdrawnIds.new().changed(["x"], withdrawn=True))
    pull_catalog(home, STORE)
    assert list(objects) == ["property_catalog/withdrawn.json", CATALOG_NAME]


def test_a_deep_look_reads_the_stores_catalogue(dataset, objects, monkeypatch):
    """What rotted under its checksum is seen by its bytes alone."""
    home = dataset.settings.home
    pull_catalog(home, STORE)
    monkeypatch.setattr(S3Folder, "get", lambda *_, **how: b"rot")
    assert stored_catalog_trouble(home, STORE, deep=False) is None
    assert "holds other bytes" in stored_catalog_trouble(home, STORE, deep=True)
