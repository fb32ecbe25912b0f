"""A killed materialization goes on where it was, and comes out as if it had never been killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from vlm_assets.demo.example import write_example
from vlm_assets.ingest import ingest

SCRIPT = Path(__file__).with_name("killed_materialization.py")
KEY = "000000000-000000011"
VOLATILE = {"seconds", "described_at"}


def run(home, batches):
    return subprocess.run(
        [sys.executable, SCRIPT, home, KEY, str(batches)], capture_output=True, text=True, timeout=240
    )


def rows(home):
    table = pq.read_table(home / "property_descriptions" / f"{KEY}.parquet")
    return [{name: value for name, value in row.items() if name not in VOLATILE} for row in table.to_pylist()]


def test_a_partition_killed_twice_equals_an_uninterrupted_one(tmp_path):
    """Two kills in a row lose and double nothing: row for row and value for value the same."""
    listing = write_example(tmp_path / "source", properties=12, seed=3)
    for home in ("killed", "whole"):
        ingest(listing, tmp_path / home, range_size=12)
    for batches in (2, 1):
        died = run(tmp_path / "killed", batches)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert not list((tmp_path / "killed" / "property_descriptions").glob("*.parquet"))
    ended = run(tmp_path / "killed", 0)
    assert ended.returncode == 0, ended.stderr
    assert "6 of 12 rows restored" in ended.stderr
    whole = run(tmp_path / "whole", 0)
    assert whole.returncode == 0, whole.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
