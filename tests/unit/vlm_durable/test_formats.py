"""Files on disk state their format: this version reads the last one's, and no change goes unnumbered."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from vlm_durable.files.sealed_json import FormatVersionError, seal, unseal
from vlm_durable.versions.published import PublishedPartitions

_FILE = Path(__file__).with_name("written_formats.py")
_spec = importlib.util.spec_from_file_location("written_formats", _FILE)
assert _spec and _spec.loader
written = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(written)

WRITTEN = sorted(path.name for path in written.FORMATS.iterdir())


@pytest.fixture(params=WRITTEN)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a home that this version or an earlier one wrote."""
    shutil.copytree(written.FORMATS / request.param / "home", tmp_path / "home")
    return tmp_path / "home"


def test_a_journal_of_the_last_version_is_resumed(home: Path) -> None:
    """Every committed row is restored, the rest is committed beside it, and the journal retires."""
    with written.work_under_way(home) as journal:
        assert journal.recovery.quarantined == ()
        found = pa.Table.from_batches(journal.read_ordered(), schema=written.SCHEMA)
        assert found.to_pylist() == written.rows(3, 2).to_pylist()
        assert journal.missing_ids == {"p5"}
        journal.submit(written.rows(5, 1))
        journal.flush()
        journal.retire()


def test_a_partition_of_the_last_version_is_read_and_published_over(home: Path) -> None:
    """Its record, second copy and earlier version are what they were."""
    partitions = PublishedPartitions(written.paths(home, written.PUBLISHED).asset)
    assert partitions.verify(written.PUBLISHED).ok
    assert partitions.read(written.PUBLISHED).to_table().to_pylist() == written.rows(0, 3).to_pylist()
    assert partitions.record(written.PUBLISHED).fingerprint == "two"


def test_a_format_that_changes_has_a_new_number(tmp_path: Path) -> None:
    """A changed file with an old number would be read as something it is not."""
    assert written.number() in WRITTEN, f"write the new formats: python {_FILE}"
    written.write(tmp_path)
    told = json.loads((written.FORMATS / written.number() / "structure.json").read_text())
    assert json.loads(json.dumps(written.structure(tmp_path))) == told, (
        "a file on disk has another structure under the same number: raise FORMAT in the module that "
        f"writes it (commits.py, high_water_mark.py, partition_files.py, version_mark.py): python {_FILE}"
    )


def test_a_record_of_a_newer_version_is_refused_and_left_alone(home: Path) -> None:
    """An older program must not take it for damage and move the partition away."""
    place = written.paths(home, written.PUBLISHED)
    for path in (place.record, place.record_copy):
        path.write_bytes(seal(json.dumps({**unseal(path.read_bytes()), "format": 99}).encode()))
    before = place.record.read_bytes()
    partitions = PublishedPartitions(place.asset)
    for call in (partitions.record, partitions.verify, partitions.restore):
        with pytest.raises(FormatVersionError, match="a newer version wrote it"):
            call(written.PUBLISHED)
    assert place.record.read_bytes() == before
    assert not place.quarantine.exists()
