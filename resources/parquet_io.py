"""The IO manager of partitioned assets: publishes what an asset staged, loads partitions lazily.

What may be published, and how, is in ``vlm_durable.versions.published``.
"""

from __future__ import annotations

from dagster import (
    AssetKey,
    InputContext,
    IOManager,
    MetadataValue,
    OutputContext,
)

from resources.dagster_names import NO_ATTEMPT, UNPREFIXED, DagsterNames, tag_value
from resources.interrupts import interrupt_once
from vlm_durable.files.layout import Home
from vlm_durable.mirror.bucket import StoreAwayError, StoreError
from vlm_durable.mirror.mirror import NO_MIRROR, Mirror
from vlm_durable.versions.fenced_object import OvertakenError
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import Publication, PublishedPartitions, StagedFile
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted


class ParquetIOManager(IOManager):
    """One parquet file per partition: ``HOME/<asset>/KEY.parquet``.

    An asset returns a StagedFile, or the Publication that stands if its partition is complete already. An
    asset that loads one partition gets PartitionRows; one that loads several gets a dict by partition key.
    """

    def __init__(
        self,
        home: Home,
        store: Mirror = NO_MIRROR,
        names: DagsterNames = UNPREFIXED,
    ) -> None:
        """home: holds a folder for each asset. store: every partition is copied there too."""
        self._home = home
        self._store = store
        self._names = names

    def handle_output(self, context: OutputContext, obj: StagedFile | Publication) -> None:
        """Publish the staged file here and then in the store, after the last checks of it.

        Raises as ``PublishedPartitions.publish`` and ``StoredPartitions.push``.
        """
        interrupt_once(context.run_id)
        partitions, keys = self.partitions(context.asset_key), context.asset_partition_keys
        if len(keys) != 1:
            raise PublishedError(
                f"asset {context.asset_key.to_user_string()} is published one partition a run, and this run"
                f" has {len(keys)}: launch a backfill with one run a partition (leave the backfill policy"
                " unset)"
            )
        (key,) = keys
        if not isinstance(obj, StagedFile | Publication):
            raise PublishedError(
                f"asset {context.asset_key.to_user_string()} returned a {type(obj).__name__}: it must return "
                "what PublishedPartitions.stage() gives, or the publication that stands"
            )
        if obj.record.key != key:
            raise PublishedError(
                f"partition {key} was handed the file of partition {obj.record.key}, which is not published. "
                "Stage the file with context.partition_key."
            )
        publication = partitions.publish(obj) if isinstance(obj, StagedFile) else obj
        record, changed = publication.record, publication.changed
        for note in publication.notes:
            context.log.warning(note)
        try:
            StoredPartitions(partitions.asset, self._store).push(key)
        except (StoreError, OvertakenError):
            tags = {NO_ATTEMPT: tag_value(context.run_id)}
            context.step_context.instance.add_run_tags(context.run_id, tags)
            raise
        path = partitions.path(key)
        context.log.info(
            f"{'Published' if changed else 'Unchanged'}: {path}, version {record.sequence},"
            f" {counted(record.rows, 'rows')}, digest {record.sha256[:12]}."
        )
        context.add_output_metadata(
            {
                "path": MetadataValue.path(str(path)),
                "dagster/uri": self._store.uri_of(path, self._home.root),
                "dagster/partition_row_count": record.rows,
                "bytes": record.bytes,
                "digest": record.sha256[:12],
                "version": record.sequence,
                "changed": changed,
            }
        )

    def load_input(self, context: InputContext) -> PartitionRows | dict[str, PartitionRows]:
        """A lazy handle on the partition, or on each of several, after copying it from the store.

        Raises PutBackError if an older version stands here, and as ``PublishedPartitions.read`` and
        ``StoredPartitions.pull``.
        """
        if not context.has_asset_partitions:
            folder = self.partitions(context.asset_key).asset.published
            raise PublishedError(
                f"asset {context.asset_key.to_user_string()} is read by partition; to read all of it, "
                f"query {folder}/*.parquet with DuckDB (union_by_name=true)"
            )
        partitions = self.partitions(context.asset_key)
        keys = context.asset_partition_keys
        stored = StoredPartitions(partitions.asset, self._store)
        try:
            for key in keys:
                for note in stored.pull(key):
                    context.log.warning(note)
        except StoreAwayError as error:
            # The local partition is read then; the asset itself waits for the store before it works.
            context.log.warning(str(error))
        for key in keys:
            partitions.refuse_put_back(key)
        rows = {key: partitions.read(key) for key in keys}
        return next(iter(rows.values())) if len(rows) == 1 else rows

    def partitions(self, asset_key: AssetKey) -> PublishedPartitions:
        """The published partitions of an asset."""
        asset = self._names.asset(asset_key)
        if asset is None:
            raise PublishedError(f"asset {asset_key.to_user_string()} is none of the home {self._home.root}")
        return PublishedPartitions(self._home.asset(asset))
