"""Several processes after few devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_two_processes_never_hold_one_device(tmp_path: Path) -> None:
    """Four processes take two devices in turn; none ever meets another on the same device."""
    witnesses = tmp_path / "witnesses"
    witnesses.mkdir()
    command = [sys.executable, Path(__file__).with_name("contender.py"), tmp_path / "leases", witnesses, "25"]
    contenders = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [contender.communicate()[1] for contender in contenders]
    assert [contender.returncode for contender in contenders] == [0, 0, 0, 0], "\n".join(said)
