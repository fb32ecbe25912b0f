"""Publishing at the size of a real partition, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def peak_memory(folder: Path, rows: int) -> float:
    program = Path(__file__).with_name("publishing_process.py")
    done = subprocess.run(
        [sys.executable, program, folder, str(rows)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[0])


def test_memory_does_not_grow_with_the_partition(tmp_path: Path) -> None:
    """Rows are streamed: 80 MB more of them cost no more memory than their ids."""
    small = peak_memory(tmp_path / "small", 5_000)
    large = peak_memory(tmp_path / "large", 45_000)
    assert (tmp_path / "large" / "a" / "000-001.parquet").stat().st_size > 80_000_000
    assert large - small < 30
