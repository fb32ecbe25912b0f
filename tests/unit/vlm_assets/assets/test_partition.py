"""The retirement of a published partition's journal, where a crash or a copy left one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from vlm_assets.assets.fingerprint import Fingerprint
from vlm_assets.assets.partition import Partition
from vlm_assets.config.settings import load_settings
from vlm_durable.journal.journal_errors import JournalLossError

SCHEMA = pa.schema([("property_id", pa.string()), ("ordinal", pa.int64()), ("status", pa.string())])


@pytest.fixture
def partition(tmp_path: Path) -> Partition:
    settings, fingerprint = load_settings(home=tmp_path), Fingerprint({"model": "m"})
    return Partition(settings, "property_descriptions", "0-1", ("a", "b"), fingerprint)


def test_a_journal_that_was_put_back_beside_its_published_file_stops_no_start(
    partition: Partition, tmp_path: Path
) -> None:
    """Its rows are published: an older copy of it is left for prune, with a sentence."""
    directory = partition.paths.journal("g")
    with partition.open_journal("g", SCHEMA) as journal:
        journal.submit(pa.table([["a"], [0], ["ok"]], schema=SCHEMA))
        journal.flush()
        shutil.copytree(directory, tmp_path / "copy")
        journal.submit(pa.table([["b"], [1], ["ok"]], schema=SCHEMA))
        journal.flush()
    assert partition.finish_retirement("g", lambda: SCHEMA) is None
    assert not directory.exists()

    shutil.copytree(tmp_path / "copy", directory)
    sentence = partition.finish_retirement("g", lambda: SCHEMA)
    assert sentence == f"{directory} is older than what was published: `vlm-assets prune` removes it."
    assert directory.exists()


def test_a_journal_that_lost_rows_beside_its_published_file_stops_no_start(partition: Partition) -> None:
    """The published file has them: nobody has to accept a loss that is none."""
    directory = partition.paths.journal("g")
    with partition.open_journal("g", SCHEMA) as journal:
        journal.submit(pa.table([["a"], [0], ["ok"]], schema=SCHEMA))
        journal.flush()
    for segment in directory.glob("segment-*"):
        segment.unlink()
    sentence = partition.finish_retirement("g", lambda: SCHEMA)
    assert sentence == f"{directory} is left behind: files of it are gone, and the partition is published."
    with pytest.raises(JournalLossError):
        partition.open_journal("g", SCHEMA)
