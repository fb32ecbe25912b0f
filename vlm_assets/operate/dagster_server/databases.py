"""Dagster's SQLite databases: found damaged, and set aside under a name that says so.

Nothing in them is the only copy of finished work. A new history is filled from disk: the catalogue when
Dagster starts, published partitions by the reconciliation sensor, and interrupted work by the scheduled
re-materialization.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resources.storage.files import sync_directory
from vlm_assets.operate.dagster_server.home import DagsterHomeError

_DATABASES = {
    "history": ("history/runs.db", "history/runs/index.db"),
    "schedules": ("schedules/schedules.db",),
}
"""Databases by the folder that holds them. A folder is set aside whole, as its databases belong together."""

_LOCKED_SECONDS = 1.0

LOST = {
    "history": "Lost are the pages of earlier runs. Partitions on disk become green again within minutes.",
    "schedules": "Lost are the ticks of sensors and schedules, and which of them a person had switched off.",
}
"""What a new database does not know, for people."""


class DamagedDatabaseError(DagsterHomeError):
    """A database of the running Dagster is damaged; a start sets it aside."""


@dataclass(frozen=True)
class Damage:
    """A damaged database. folder: the name of the folder that holds it."""

    folder: str
    path: Path
    why: str


def damages(dagster_home: Path) -> list[Damage]:
    """The damaged databases, by a look at all their pages; none where Dagster keeps its state elsewhere.

    A database that cannot be read at this moment (locked, a failing disk) is not called damaged.
    """
    return [
        Damage(folder, path, why)
        for folder, names in _DATABASES.items()
        for path in (dagster_home / name for name in names)
        if path.exists() and (why := _damage(path)) is not None
    ]


def _damage(path: Path) -> str | None:
    try:
        address = f"{path.absolute().as_uri()}?mode=rw"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=_LOCKED_SECONDS)) as database:
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        return None
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if found == "ok" else str(found)


def names_aside(dagster_home: Path, found: Sequence[Damage]) -> dict[str, Path]:
    """Where the folders of damaged databases will be set aside, by the folder's name."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return {one.folder: _unused(dagster_home / f"{one.folder}.damaged-{stamp}") for one in found}


def set_aside(dagster_home: Path, names: Mapping[str, Path]) -> None:
    """Rename the folders of damaged databases, durably. Dagster must not run."""
    for folder, aside in names.items():
        (dagster_home / folder).rename(aside)
    sync_directory(dagster_home)


def _unused(path: Path) -> Path:
    number = 1
    unused = path
    while unused.exists():
        number += 1
        unused = path.with_name(f"{path.name}-{number}")
    return unused
