"""The catalogue in an S3 store, from which every machine numbers properties.

The store's catalogue is replaced first, and only if it is still the one that was extended; then the home's.
So two ingests at once cannot both succeed, and a home is never ahead of the store. If a store is behind a
home, it was put back to an older version, and no home takes that over.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_catalog.catalog import Catalog, CatalogMissingError
from vlm_catalog.catalog_copies import (
    CatalogUnreadableError,
    catalog_path,
    choose_command,
    known_versions,
    last_store,
    note_store,
    publish_catalog,
    put_back,
    replace_catalog,
    trouble_of,
)
from vlm_catalog.catalog_file import UNREADABLE, CatalogError, CatalogHeader
from vlm_catalog.ranges import CATALOG
from vlm_catalog.withdrawn_ids import share_withdrawn
from vlm_durable.files.files import sha256_of
from vlm_durable.mirror.bucket import ObjectDamagedError, StoredObject, TakenError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.versions.stored import newest_here_command
from vlm_durable.versions.version_mark import UNKNOWN_STORE
from vlm_durable.wording import counted

CATALOG_NAME = f"{CATALOG}/catalog.parquet"
MOST_BYTES = 5 << 30


def pull_catalog(home: Path, store: Mirror) -> StoredObject | None:
    """Bring the store's catalogue into the home; a new store gets the home's, if there is one.

    The list of withdrawn ids is shared first. Returns the object in the store. Raises CatalogError, also
    where the store lost its catalogue; StoreError.
    """
    if not store.keeps_copies:
        return None
    share_withdrawn(home, store)
    stored = _pull(home, store)
    if stored is not None:
        note_store(home, store)
    return stored


def _pull(home: Path, store: Mirror) -> StoredObject | None:
    stored = store.head(CATALOG_NAME)
    local, local_error = None, None
    try:
        local = Catalog.open(home)
    except CatalogMissingError:
        pass
    except CatalogUnreadableError as error:
        local_error = error
    if stored is None:
        if local_error is not None:
            raise local_error
        if local is None:
            return None
        _refuse_emptied(home, store)
        return put_catalog(store, local.path.read_bytes(), over=None)
    if local is not None and stored.sha256 == sha256_of(local.path):
        return stored
    data = store.get(CATALOG_NAME, most=MOST_BYTES)
    header = _header(home, data, store, stored)
    if local_error is not None:
        if (trouble := trouble_of(home, header)) is not None:
            raise _with_stored(home, local_error, header, store, trouble)
        replace_catalog(home, data)
        return stored
    if local is not None and local.header.sha256 == header.sha256:
        # The same version in other bytes: the rows here rotted, and their footer does not tell.
        try:
            put_back(home, f"its bytes are not those of {store.address(CATALOG_NAME)}")
        except CatalogUnreadableError:
            replace_catalog(home, data)
        if stored.sha256 == sha256_of(local.path):
            return stored
    if local is not None and (contradiction := _contradiction(local, header, store)) is not None:
        raise CatalogError(contradiction)
    publish_catalog(home, data)
    return stored


def _with_stored(
    home: Path, error: CatalogUnreadableError, header: CatalogHeader, store: Mirror, trouble: str
) -> CatalogUnreadableError:
    """The error of a home without its newest catalogue, with what its store has and why it stays there."""
    versions, offer = known_versions(home), ""
    if header.catalog_id in versions or not versions:
        offer = (
            " If no newer one can be brought back, this checks it, says what it lacks, and asks:"
            f" {choose_command(home, store.address(CATALOG_NAME))}"
        )
    return CatalogUnreadableError(
        f"{error}. The catalogue in {store} (ingest {header.sequence}, {counted(header.rows, 'properties')})"
        f" does not take its place: it {trouble}.{offer}"
    )


def stored_catalog_trouble(home: Path, store: Mirror, *, deep: bool) -> str | None:
    """What is wrong with the store's catalogue, in a sentence; None where nothing is, or none is here yet.

    deep: its bytes are read if it is the one that is here. Raises CatalogError, StoreError.
    """
    if not store.keeps_copies:
        return None
    stored = store.head(CATALOG_NAME)
    try:
        local = Catalog.open(home)
    except CatalogMissingError:
        return None
    where = store.address(CATALOG_NAME)
    if stored is None:
        return f"{where} is not there."
    digest = sha256_of(local.path)
    if stored.sha256 != digest:
        # A different catalogue: the next run takes it over if it is newer.
        try:
            header = _header(home, store.get(CATALOG_NAME, most=MOST_BYTES), store, stored)
        except CatalogUnreadableError as error:
            return str(error)
        return _contradiction(local, header, store)
    if deep:
        try:
            store.get_whole(CATALOG_NAME, digest, most=MOST_BYTES)
        except ObjectDamagedError as error:
            return f"{error}."
    return None


def put_back_catalog(home: Path, store: Mirror, *, newest_here: bool = False) -> list[str]:
    """Make the store's catalogue equal to the home's, byte for byte; says what was put there.

    A damaged catalogue that was not this home's is left alone: a person decides which one counts.
    newest_here: a person says that no other machine has a newer catalogue, where the store lost its own.
    Raises CatalogError, StoreError.
    """
    trouble = stored_catalog_trouble(home, store, deep=True)
    if trouble is None:
        return []
    local_path, stored = Catalog.open(home).path, store.head(CATALOG_NAME)
    if stored is not None and stored.sha256 != sha256_of(local_path):
        raise CatalogUnreadableError(trouble)
    if stored is None and not newest_here:
        _refuse_emptied(home, store)
    put_catalog(store, local_path.read_bytes(), over=stored)
    note_store(home, store)
    return [f"{trouble} It was put back from {local_path}."]


def _refuse_emptied(home: Path, store: Mirror) -> None:
    """Raise CatalogError where a store lost this home's catalogue: another machine may have a newer one."""
    last = last_store(home)
    if last in (str(store), UNKNOWN_STORE):
        was = "may have been" if last == UNKNOWN_STORE else "was"
        raise CatalogError(
            f"{store.address(CATALOG_NAME)} is gone, and {was} there: was the store emptied? Nothing was"
            " changed. Another machine may have a newer catalogue than this one, so a person says which"
            f" machine fills the store again: {newest_here_command()}, on the machine that worked last."
        )


def _contradiction(local: Catalog, header: CatalogHeader, store: Mirror) -> str | None:
    """Why the store's catalogue, which is not the home's, does not take its place; None where it does."""
    if local.catalog_id != header.catalog_id:
        return (
            f"{store} is the store of another home: its catalogue is {header.catalog_id}, and the one in"
            f" {local.home} is {local.catalog_id}. Nothing was changed. Give each home a prefix of its own in"
            " VLM_ASSETS_STORE."
        )
    if local.header.sequence < header.sequence:
        return None
    return (
        f"The catalogue in {local.home} (ingest {local.header.sequence}, {counted(local.rows, 'properties')})"
        " is not the one"
        f" that {store} holds (ingest {header.sequence}, {counted(header.rows, 'properties')}), and does"
        " not come before"
        " it: the store was put back to an older version, or this home was extended while no store was set."
        " Nothing was changed. Say which of them is true; each command checks it and says what it lacks:"
        f" {choose_command(local.home, local.path)} takes this home's,"
        f" {choose_command(local.home, store.address(CATALOG_NAME))} the store's."
    )


def extend_catalog(home: Path, data: bytes, *, store: Mirror, over: StoredObject | None) -> None:
    """Put a new catalogue into the store, and then in the home.

    over: what ``pull_catalog`` gave. Raises CatalogError, StoreError, OSError.
    """
    put_catalog(store, data, over=over)
    publish_catalog(home, data)
    note_store(home, store)


def put_catalog(store: Mirror, data: bytes, *, over: StoredObject | None) -> StoredObject:
    """Put a catalogue into the store in place of the one that was extended. Raises CatalogError."""
    store.prove()
    try:
        return store.put(CATALOG_NAME, data, over=over)
    except TakenError as error:
        raise CatalogError(
            f"Another machine changed the catalogue in {store} at the same time. Nothing was changed there or"
            " here. Do the same again: it starts from that one's catalogue."
        ) from error


def _header(home: Path, data: bytes, store: Mirror, stored: StoredObject) -> CatalogHeader:
    try:
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise ValueError("its bytes are not those that its checksum stands for")
        return CatalogHeader.from_footer(pq.read_metadata(pa.BufferReader(data)))
    except UNREADABLE as error:
        raise CatalogUnreadableError(
            f"{store.address(CATALOG_NAME)} cannot be read: {error}. Nothing was changed. If this home"
            f" has it, this checks that and puts it there: {choose_command(home, catalog_path(home))}"
        ) from error
