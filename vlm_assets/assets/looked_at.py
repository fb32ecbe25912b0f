"""What the condition ``where`` of a question set finds in a partition: the answers of the sets above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import pyarrow as pa

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.partition import CONFIDENCE
from vlm_assets.config.settings import Settings
from vlm_assets.config.where import Answers, Where, WhereError, WhereLook
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.files.layout import Home
from vlm_durable.versions.partition_files import PartitionFiles, PublishedRecord
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import PublishedError, RecordDamagedError

_SAMPLE = 100
"""Partitions in which a share is counted, at most: ten thousand would take minutes."""


@dataclass(frozen=True)
class LookedAt:
    """What a condition found in a partition. digest: of the files that it read. looks: by property id."""

    digest: str
    looks: Mapping[str, WhereLook]

    @classmethod
    def read(cls, where: Where, home: Home, key: str, ids: Sequence[str]) -> LookedAt:
        """Look at what is published. Raises PublishedError, WhereError."""
        published = {}
        for source in where.answers:
            partitions = PublishedPartitions(home.asset(source.asset))
            partitions.refuse_put_back(key)
            published[source.asset] = partitions.read(key)
        rows = {source.asset: _answers(source, published[source.asset], key) for source in where.answers}
        records = {asset: file.record for asset, file in published.items()}
        return cls(_digest(records), where.evaluate(ids, rows))


def asked_shares(settings: Settings, catalog: Catalog) -> dict[str, float]:
    """The share of properties for which the settings' condition holds, for each partition.

    A partition beyond the sample, or whose answers are not published yet, gets the mean of the others;
    1 where there are none. Empty without a condition.
    """
    if settings.where is None:
        return {}
    shares = dict[str, float]()
    for range_ in sorted(catalog.ranges, key=lambda range_: digest_of(range_.key)):
        if len(shares) == _SAMPLE:
            break
        ids = catalog.slice(range_)["property_id"].to_pylist()
        try:
            looks = LookedAt.read(settings.where, settings.layout, range_.key, ids).looks.values()
        except (PublishedError, WhereError):
            continue
        shares[range_.key] = sum(evaluated.holds for evaluated in looks) / len(ids)
    usual = fmean(shares.values()) if shares else 1.0
    return {range_.key: usual for range_ in catalog.ranges} | shares


def published_digest(where: Where, home: Home, key: str) -> str | None:
    """The digest that ``LookedAt`` would have now; None where a record cannot be read."""
    try:
        return _digest(
            {source.asset: PartitionFiles(home.asset(source.asset), key).peek() for source in where.answers}
        )
    except RecordDamagedError:
        return None


def _digest(records: Mapping[str, PublishedRecord | None]) -> str:
    """ "" where one of them is not published."""
    files = {asset: record.sha256 for asset, record in records.items() if record is not None}
    return digest_of(files) if len(files) == len(records) else ""


def _answers(source: Answers, rows: PartitionRows, key: str) -> pa.Table:
    has_confidence = CONFIDENCE in rows.schema.names
    table = rows.to_table(["property_id", "description", *([CONFIDENCE] if has_confidence else [])])
    made_with = table["description"].type
    if lacking := [field for field in source.fields if made_with.get_field_index(field) < 0]:
        raise WhereError(
            f"The rows of {source.asset} in {key} have no {', '.join(lacking)}: another schema made them."
            f" {command('run', key, '--stale')} makes them anew."
        )
    if not has_confidence:  # Files of earlier versions.
        return table.append_column(
            CONFIDENCE, pa.nulls(table.num_rows, source.columns.field(CONFIDENCE).type)
        )
    return table
