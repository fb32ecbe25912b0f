"""The catalogue in an S3 store: the one from which every machine numbers properties.

The store's is changed first, on the condition that it is still the one that was extended; then the home's. So
two ingests at once cannot both succeed, and a home is never ahead of the store.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from resources.storage.files import sha256_of
from resources.store.bucket import ObjectDamagedError, S3Folder, Stored, TakenError
from vlm_assets.catalog.catalog import Catalog, CatalogMissingError
from vlm_assets.catalog.catalog_copies import CatalogUnreadableError, publish_catalog
from vlm_assets.catalog.catalog_file import UNREADABLE, CatalogError, CatalogHeader

CATALOG = "property_catalog"
"""The asset of the catalogue."""

_NAME = f"{CATALOG}/catalog.parquet"
_MOST_BYTES = 5 << 30


def pull_catalog(home: Path, store: S3Folder | None) -> Stored | None:
    """Have the home hold the store's catalogue; a store without one gets the home's, if there is one.

    Returns what stands in the store. Raises CatalogError, StoreError.
    """
    if store is None:
        return None
    there = store.head(_NAME)
    try:
        here = Catalog.open(home)
    except CatalogMissingError:
        here = None
    if there is None:
        return None if here is None else put_catalog(store, here.path.read_bytes(), over=None)
    if here is not None and there.sha256 == sha256_of(here.path):
        return there
    data = store.get(_NAME, most=_MOST_BYTES)
    header = _header(data, store, there)
    if here is not None and here.catalog_id != header.catalog_id:
        raise CatalogError(
            f"{store} is the store of another home: its catalogue is {header.catalog_id}, and the one in"
            f" {home} is {here.catalog_id}. Nothing was changed. Give each home a prefix of its own in"
            " VLM_ASSETS_STORE."
        )
    if here is not None and here.header.sequence >= header.sequence:
        raise CatalogError(
            f"The catalogue in {home} (change {here.header.sequence}) is not the one that {store} holds"
            f" (change {header.sequence}), and does not come before it. Nothing was changed. If this home was"
            " extended while no store was set, or the store was put back from an older copy: compare both,"
            f" and move the one that is wrong away ({here.path}, or {store.address(_NAME)})."
        )
    publish_catalog(home, data)
    return there


def stored_catalog_trouble(home: Path, store: S3Folder, *, deep: bool) -> str | None:
    """What is wrong with the store's catalogue, in a sentence; None where nothing is, or none is here yet.

    deep: its bytes are read if it is the one that is here. Raises CatalogError, StoreError.
    """
    there = store.head(_NAME)
    try:
        here = Catalog.open(home)
    except CatalogMissingError:
        return None
    where = store.address(_NAME)
    if there is None:
        return f"{where} is not there."
    digest = sha256_of(here.path)
    if there.sha256 != digest:
        # Another one: it is taken over by the next run if it is newer, and refused by it if it is not.
        try:
            _header(store.get(_NAME, most=_MOST_BYTES), store, there)
        except CatalogUnreadableError as error:
            return str(error)
        return None
    if deep:
        try:
            store.get_whole(_NAME, digest, most=_MOST_BYTES)
        except ObjectDamagedError as error:
            return f"{error}."
    return None


def put_back_catalog(home: Path, store: S3Folder) -> list[str]:
    """Have the store hold the catalogue to the byte; says what was put.

    A damaged one that was not the home's is left alone: a person decides which one counts. Raises
    CatalogError, StoreError.
    """
    trouble = stored_catalog_trouble(home, store, deep=True)
    if trouble is None:
        return []
    here, there = Catalog.open(home).path, store.head(_NAME)
    if there is not None and there.sha256 != sha256_of(here):
        raise CatalogUnreadableError(trouble)
    put_catalog(store, here.read_bytes(), over=there)
    return [f"{trouble} It was put back from {here}."]


def extend_catalog(home: Path, data: bytes, *, store: S3Folder | None, over: Stored | None) -> None:
    """Put a new catalogue into the store, where there is one, and then in the home.

    over: what ``pull_catalog`` gave. Raises CatalogError, StoreError, OSError.
    """
    if store is not None:
        put_catalog(store, data, over=over)
    publish_catalog(home, data)


def put_catalog(store: S3Folder, data: bytes, *, over: Stored | None) -> Stored:
    """Put a catalogue into the store in place of the one that was extended. Raises CatalogError."""
    store.prove()
    try:
        return store.put(_NAME, data, over=over)
    except TakenError as error:
        raise CatalogError(
            f"Another machine changed the catalogue in {store} at the same time. Nothing was changed there or"
            " here. Do the same again: it starts from that one's catalogue."
        ) from error


def _header(data: bytes, store: S3Folder, there: Stored) -> CatalogHeader:
    try:
        if hashlib.sha256(data).hexdigest() != there.sha256:
            raise ValueError("its bytes are not those that its checksum stands for")
        return CatalogHeader.from_footer(pq.read_metadata(pa.BufferReader(data)))
    except UNREADABLE as error:
        raise CatalogUnreadableError(
            f"{store.address(_NAME)} cannot be read: {error}. Nothing was changed. Put it back from a version"
            " of the bucket; a machine that has the catalogue puts it back where the object is removed."
        ) from error
