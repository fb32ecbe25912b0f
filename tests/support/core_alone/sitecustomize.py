"""Makes a process see the core alone: nobody can import an extension, and no distribution names one.

Python imports this at the start of each process that has this folder in PYTHONPATH.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

EXTENSIONS = frozenset({"vlm_cluster", "vlm_results", "vlm_training"})
GROUP = "vlm_assets.extensions"

every_entry_point = importlib.metadata.entry_points


class NotInstalled:
    """Finds no extension, although its folder is in the checkout."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Raise what Python raises where nobody finds a module; None for all others."""
        if name.partition(".")[0] in EXTENSIONS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def entry_points_of_the_core(**wanted: Any) -> Any:
    """The entry points of all distributions without those of the extensions here."""
    points = every_entry_point(**wanted)
    if wanted.get("group") != GROUP:
        return points
    return importlib.metadata.EntryPoints(
        point for point in points if point.module.partition(".")[0] not in EXTENSIONS
    )


sys.meta_path.insert(0, NotInstalled)
importlib.metadata.entry_points = entry_points_of_the_core
