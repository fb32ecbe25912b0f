"""The catalogue of a home without a store, or with one in memory. Real stores are in tests/integration."""

import hashlib
from datetime import UTC, datetime

import pytest

from tests.support.homes import Dataset
from vlm_catalog.catalog_copies import catalog_path, last_store, mark_path, note_store
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.stored_catalog import CATALOG_NAME, extend_catalog, pull_catalog, put_back_catalog
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
    ):
        monkeypatch.setattr(S3Folder, name, answer)
    return stored


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
