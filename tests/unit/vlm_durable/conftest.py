"""Published partitions of ten rows each, whose text says which version they are."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlm_durable.files.layout import Home
from vlm_durable.versions.partition_files import PartitionFiles
from vlm_durable.versions.published import Publication, PublishedPartitions, StagedFile


class VersionedPartitions(PublishedPartitions):
    """Partitions of one asset, of which ``KEY`` is published in versions named by a letter."""

    KEY = "000000000-000000009"
    IDS = tuple(f"p {i}/ü" for i in range(10))
    SCHEMA = pa.schema([("property_id", pa.string()), ("ordinal", pa.int64()), ("text", pa.string())])

    def rows(self, ids: list[str], text: str = "a") -> pa.RecordBatch:
        """Rows of these ids."""
        return pa.record_batch([ids, list(range(len(ids))), [text] * len(ids)], schema=self.SCHEMA)

    def stage_text(self, text: str, ids: tuple[str | None, ...] = IDS) -> StagedFile:
        """The version of this letter, staged."""
        return self.stage(
            self.KEY,
            [self.rows(list(ids), text)],
            self.SCHEMA,
            expected_ids=self.IDS,
            fingerprint=f"f{text}",
            metadata={"ok": len(ids)},
        )

    def publish_text(self, text: str) -> Publication:
        """The version of this letter, published."""
        return self.publish(self.stage_text(text))

    @property
    def files(self) -> PartitionFiles:
        """The files of the partition."""
        return PartitionFiles(self.asset, self.KEY)

    @staticmethod
    def text_of(path: Path) -> str:
        """The letter of the version that a file holds."""
        return str(pq.read_table(path).column("text")[0].as_py())

    def slots(self) -> list[str | None]:
        """The letters of the backups; None where there is none."""
        paths = [self.files.slot(number) for number in (0, 1, 2)]
        return [self.text_of(path) if path.exists() else None for path in paths]

    @property
    def home(self) -> Path:
        """The home directory."""
        return self.asset.home.root

    def leftovers(self) -> list[Path]:
        """Temporary files."""
        return [path for path in self.home.rglob("*.tmp") if path.is_file()]

    def quarantined(self) -> list[bytes]:
        """The contents of the files that were set aside."""
        return [path.read_bytes() for path in sorted(self.files.quarantine.glob("*"))]


@pytest.fixture
def partitions(tmp_path: Path) -> VersionedPartitions:
    """Nothing published yet."""
    return VersionedPartitions(Home(tmp_path / "home").asset("property_descriptions"), lock_seconds=0.2)
