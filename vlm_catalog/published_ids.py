"""Published ids that the catalogue does not list: an ingest gives them their own ordinals again.

An older version of the catalogue lacks ranges that were described since. Their files say which property has
which ordinal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_copies import catalog_id_of
from vlm_catalog.catalog_file import CatalogError, is_tombstone
from vlm_catalog.ranges import InvalidRangeError, PropertyRange, range_assets
from vlm_durable.commands import command
from vlm_durable.files.layout import Home
from vlm_durable.mirror.mirror import NO_MIRROR, Mirror
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import StoredPartitions


@dataclass(frozen=True)
class PublishedIds:
    """The ids of one published range, by ordinal. path: of the published file.

    catalog_id: of the catalogue that gave the ordinals; "" in records of earlier formats.
    """

    range: PropertyRange
    ids: tuple[str, ...]
    path: Path
    catalog_id: str = ""


def unlisted_ids(home: Path, catalog: Catalog | None, store: Mirror = NO_MIRROR) -> list[PublishedIds]:
    """The published ranges that the catalogue does not list, in order. catalog: None where there is none.

    Damaged files are put back from their second copies, and those of the store are fetched. Raises
    CatalogError where such a range lies across others, PublishedError, StoreError, OSError.
    """
    ranges = {listed.key: listed for listed in catalog.ranges} if catalog is not None else {}
    by_key: dict[str, PublishedIds] = {}
    for asset in range_assets(Home(home, catalog_id_of), store):
        stored_keys = {Path(stored_name).stem for stored_name, _ in store.names(f"{asset.name}/")}
        for key in stored_keys.difference(ranges):
            StoredPartitions(asset, store).pull(key)
        published = PublishedPartitions(asset)
        for key in asset.recorded_keys().difference(ranges, by_key):
            if (ids := _ids_of(published, key)) is not None:
                by_key[key] = ids
    unlisted = sorted(by_key.values(), key=lambda published_ids: published_ids.range.start)
    closed = max((listed.stop for listed in ranges.values()), default=0)
    for published_ids in unlisted:
        if published_ids.range.start < closed:
            raise CatalogError(
                f"{published_ids.path} is published, and its range lies across others. Nothing was changed."
                " It is of another catalogue: bring that one back with"
                f" {command('repair', '--catalog', 'FILE')}, or move the file and its record away."
            )
        closed = published_ids.range.stop
    return unlisted


def refuse_unlisted(home: Path, catalog: Catalog) -> None:
    """Raise CatalogError where published ranges are not in the catalogue: only an ingest numbers them."""
    if unlisted := unlisted_ids(home, catalog):
        raise CatalogError(
            f"{unlisted[0].path} is published, and the catalogue does not list its range: it is an older"
            " version. Nothing was changed. Ingest your listings again first: their properties get the same"
            " numbers."
        )


def numbered_as_published(
    unlisted: Sequence[PublishedIds], new: Sequence[str], *, tail: Sequence[str], start: int, source: object
) -> list[str]:
    """New ids in the order of their ordinals, the first of which is ``start``: published ones keep theirs.

    tail: the ids of the unfilled tail, whose ordinals come just before. Raises CatalogError.
    """
    if not unlisted:
        return list(new)
    own = {published.range.start + at: id_ for published in unlisted for at, id_ in enumerate(published.ids)}
    by_ordinal = dict(enumerate(tail, start - len(tail)))
    for ordinal, id_ in own.items():
        if by_ordinal.get(ordinal, id_) != id_ and not is_tombstone(id_):
            raise _contradiction(unlisted, f"the catalogue has {by_ordinal[ordinal]!r} in place of {id_!r}")
    to_place = {id_ for ordinal, id_ in own.items() if ordinal >= start}
    if missing := sorted(id_ for id_ in to_place.difference(new) if not is_tombstone(id_)):
        raise _contradiction(
            unlisted, f"{len(missing)} of its properties are not new in {source}, such as {missing[0]!r}"
        )
    others = iter([id_ for id_ in new if id_ not in to_place])
    ids: list[str] = []
    for ordinal in range(start, unlisted[-1].range.stop):
        placed = own.get(ordinal) or next(others, None)
        if placed is None:
            raise _contradiction(unlisted, f"{source} has no property for the number {ordinal} before it")
        ids.append(placed)
    return [*ids, *others]


def _contradiction(unlisted: Sequence[PublishedIds], why: str) -> CatalogError:
    return CatalogError(
        f"{unlisted[0].path} is published, and the catalogue, which is an older version, does not list it:"
        f" {why}. Nothing was changed. Ingest the listing that has these properties first, or put the newer"
        f" catalogue back: {command('repair', '--catalog', 'FILE')}."
    )


def _ids_of(published: PublishedPartitions, key: str) -> PublishedIds | None:
    """The ids of a published range; None where the name is no range's, or nothing was published."""
    try:
        property_range = PropertyRange.from_key(key)
    except InvalidRangeError:
        return None
    record = published.record(key)
    if record is None:
        return None
    if not published.verify(key).ok:
        published.restore(key)
    rows = published.read(key)
    ids = [id_ for batch in rows.iter_batches(["property_id"]) for id_ in batch["property_id"].to_pylist()]
    return PublishedIds(property_range, tuple(ids), published.path(key), record.origin)
