"""``make rehearse``: the program ``python -m faults.rehearsal``."""

from __future__ import annotations

from faults.rehearsal.rehearse import program
from vlm_assets.commands.main import main

if __name__ == "__main__":
    main(program)
