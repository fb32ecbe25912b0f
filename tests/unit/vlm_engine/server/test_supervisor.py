"""What a supervisor costs and keeps. Its work is in tests/faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from vlm_engine.server import supervisor


def test_a_supervisor_is_light() -> None:
    """It lives as long as its server: no torch, no Dagster, no pyarrow, no pydantic in it."""
    script = "import sys, vlm_engine.server.supervisor; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    heavy = {"torch", "transformers", "dagster", "pyarrow", "pydantic", "numpy", "PIL"}
    assert not heavy & set(loaded.split())


def test_a_log_that_has_grown_keeps_its_end(tmp_path: Path) -> None:
    """The log of a server that runs for weeks is bounded, and who writes to it goes on writing to it."""
    log = tmp_path / "cpu-0.log"
    with log.open("ab", buffering=0) as server:
        server.write(b"x" * (5 << 20) + b"the end\n")
        supervisor.begin_anew(log)
        server.write(b"more\n")
    assert log.read_bytes() == b"more\n"
    kept = (tmp_path / "cpu-0.log.1").read_bytes()
    assert (len(kept), kept[-8:]) == (4 << 20, b"the end\n")
