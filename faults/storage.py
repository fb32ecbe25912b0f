"""``make faults HOME_DIR=…``: whether a directory's storage can be trusted. Fault table row 9.

What lives here: a short campaign of kills and flips on the spot. What does not: looking and trying
(``vlm_durable/files/file_systems.py``).
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from faults import flips, kills
from faults.ledger import PromiseBrokenError
from faults.runner import FRUITLESS_CASES
from vlm_durable.files import file_systems
from vlm_durable.files.file_systems import FileSystemVerdict


def examine(directory: Path, *, seconds: float = 20.0) -> FileSystemVerdict:
    """Look at a directory (which must exist), try it, and run kills and flips on it for so many seconds."""
    return file_systems.examine(
        directory, further=lambda scratch, verdict: _campaign(scratch, verdict, seconds)
    )


def _campaign(scratch: Path, verdict: FileSystemVerdict, seconds: float) -> None:
    """Kills and flips on the spot, half of the time each at most."""
    for case, unit, share in ((kills.at_random, "kills", 0.8), (flips.anywhere, "flips", 0.2)):
        deadline, number, done = time.monotonic() + share * seconds, 0, 0
        try:
            while time.monotonic() < deadline or (not done and number < FRUITLESS_CASES):
                done += case(random.Random(number), scratch, number)[unit]
                number += 1
        except PromiseBrokenError as broken:
            verdict.against.append(f"After {done} {unit}: {broken}.")
            return
        if not done:
            verdict.against.append(f"No {unit} took place in {number} cases: nothing was tried.")
            return
        verdict.notes.append(f"{done} {unit}: nothing committed was lost, doubled or changed.")
