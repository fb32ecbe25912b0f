"""The quality of a partition: counts that are right, and rows to look at that are not just the first."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from resources.publishing.partition_rows import PartitionRows
from vlm_assets.assets.quality import SAMPLED, read_quality

FAILED_IMAGE = pa.struct([("uri", pa.string()), ("kind", pa.string()), ("error", pa.string())])
SCHEMA = pa.schema(
    [
        ("property_id", pa.string()),
        ("ordinal", pa.int64()),
        ("status", pa.string()),
        ("error_kind", pa.string()),
        ("error", pa.string()),
        ("description", pa.struct([("floors", pa.int64())])),
        ("attempts", pa.int32()),
        ("images_seen", pa.int32()),
        ("images_failed", pa.list_(FAILED_IMAGE)),
    ]
)


def row(ordinal, **fields):
    return {
        "property_id": f"p{ordinal}",
        "ordinal": ordinal,
        "status": "ok",
        "description": {"floors": ordinal},
        "attempts": 1,
        "images_seen": 9,
        "images_failed": [],
        **fields,
    }


def failed(ordinal, kind="no_image", **fields):
    why = {"status": "failed", "error_kind": kind, "error": "why", "description": None}
    return row(ordinal, **why, images_seen=0, **fields)


@pytest.fixture
def quality(tmp_path):
    """Reads the quality of rows that are written to a file."""

    def read(rows):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, row_group_size=50)
        return read_quality(PartitionRows(path))

    return read


def test_everything_is_counted(quality):
    """Failed rows by kind and by id, images left out, and answers that had to be asked for again."""
    bad = [{"uri": "1.jpg", "kind": "damaged", "error": "cut"}]
    rows = [row(n, attempts=1 + (n < 3)) for n in range(100)]
    rows[7] = row(7, images_seen=7, images_failed=bad * 2)
    rows[60:80] = [failed(n, "timeout" if n < 65 else "no_image") for n in range(60, 80)]
    found = quality(rows)
    assert (found.rows, found.ok, dict(found.failed_by_kind)) == (100, 80, {"timeout": 5, "no_image": 15})
    table = found.table()
    assert "| described | 80 of 100 properties (80.0%) |" in table
    assert "| failed | 20 (no_image 15, timeout 5) |" in table
    assert "| which | p60, p61, p62, p63, p64, p65, p66, p67, p68, p69, 10 more |" in table
    assert "| images left out | 2 of 720, in 1 property |" in table
    assert "| asked more than once | 3 properties |" in table


def test_the_sample_is_random_and_always_the_same(quality):
    """The first rows of a partition are neighbours and alike; the sample is spread, and can be compared."""
    found = quality([row(n) for n in range(1000)])
    sampled = sorted(one["ordinal"] for one in found.sample)
    assert len(sampled) == SAMPLED
    assert sampled[-1] > 100
    assert (
        sorted(one["ordinal"] for one in quality([row(n) for n in reversed(range(1000))]).sample) == sampled
    )
    assert {one["description"]["floors"] for one in found.sample} == set(sampled)


def test_failed_rows_are_looked_at_beside_the_sample(quality):
    """A person sees what failed without searching for it; a partition where all failed has no sample."""
    found = quality([row(0), failed(1), failed(2)])
    assert [one["property_id"] for one in found.failed] == ["p1", "p2"]
    assert [one["property_id"] for one in found.sample] == ["p0"]
    everything = quality([failed(n) for n in range(30)])
    assert everything.sample == []
    assert len(everything.failed) == 10
