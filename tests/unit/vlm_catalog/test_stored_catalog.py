"""The catalogue of a home without a store. That of a store is in tests/integration."""

import pytest

from tests.support.homes import Dataset
from vlm_catalog.catalog_copies import catalog_path, last_store, mark_path, note_store
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.stored_catalog import extend_catalog, pull_catalog, put_back_catalog
from vlm_durable.mirror.bucket import S3Folder
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
