"""Builds this extension as ../../setup.py builds the core, with the names that the core has in its wheel."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[2] / "setup.py"), run_name="__main__")
