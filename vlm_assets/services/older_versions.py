"""Older versions of a partition in place of newer ones: a person may let them count as the newest."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_assets.config.settings import Settings
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.partition_files import PublishedError
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import OlderInStoreError, StoredPartitions


def older_versions(
    settings: Settings, key: str
) -> Iterator[tuple[PublishedPartitions | StoredPartitions, str]]:
    """Where an older version of a partition stands, here or in the store, with a sentence for each place.

    Raises PublishedError, StoreError, OSError.
    """
    for asset in (settings.descriptions, settings.embeddings):
        published = PublishedPartitions(asset)
        verification = published.verify(key)
        if not verification.ok:
            stored = StoredPartitions(asset, settings.mirror)
            try:
                stored.pull(key)
            except OlderInStoreError as error:
                yield stored, str(error)
                continue
            except PublishedError:
                pass  # What stands here is the newer one, or all that there is.
            verification = published.verify(key)
        findings = {finding.kind: finding.text for finding in verification.findings}
        if FindingKind.PUT_BACK in findings:
            yield published, findings[FindingKind.PUT_BACK]
