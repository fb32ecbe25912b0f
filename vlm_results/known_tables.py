"""The tables that a home has begun, so that one on a disk that is not mounted is missed, and not forgotten.

A file for each in ``.state/tables`` holds the path of the table's folder. It is there before the first row.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory, write_replacing
from vlm_durable.mirror.bucket import Place, S3Folder, place_of
from vlm_results.results_settings import ResultsSettings

NAME: Final = "described_properties"
"""The table's name. Its files are in a folder of this name with a number, like those of earlier tables."""


def has_table(settings: Settings) -> bool:
    """Whether somebody has begun the asset's own table, wherever its disk is now."""
    folder = ResultsSettings.part_of(settings).described_table
    return note_of(settings, folder).exists() or bool(versions_in(folder))


def versions_in(folder: Place) -> list[str]:
    """The names of the table's folder and of those of the tables that it followed, the newest last."""
    if isinstance(folder, S3Folder):
        names = list(folder.folders(f"{NAME}_"))
    else:
        names = [path.name for path in folder.glob(f"{NAME}_*")]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def remember(settings: Settings, folder: Place) -> None:
    """Write down that a table was begun in this folder. Safe to repeat. Raises OSError."""
    note = note_of(settings, folder)
    if not note.exists():
        make_directory(note.parent)
        write_replacing(note, os.fsencode(str(folder)))


def refuse_away(settings: Settings, folder: Place) -> None:
    """Raise CommandError where a table was begun in this folder, and none is there."""
    note = note_of(settings, folder)
    if note.exists() and not versions_in(folder):
        back = "Mount its disk" if isinstance(folder, Path) else "Put its objects back"
        raise CommandError(
            f"The table that was begun in {folder} is not there. {back}, or delete {note} if the table was"
            " deleted on purpose; then do it again."
        )


def other_tables(settings: Settings) -> Iterator[str]:
    """What to do about tables that have withdrawn properties until their command runs again."""
    own = ResultsSettings.part_of(settings).described_table
    for note in sorted(_notes(settings).glob("*.path")):
        folder = place_of(os.fsdecode(note.read_bytes()))
        if folder != own:
            again = command("export", str(folder), "--format", "iceberg")
            yield (
                f"The table in {folder} has the properties until you run {again}. If you have deleted it,"
                f" delete {note} too."
            )


def note_of(settings: Settings, folder: Place) -> Path:
    """The file that says that a table was begun in this folder."""
    return _notes(settings) / f"{hashlib.sha256(os.fsencode(str(folder))).hexdigest()[:16]}.path"


def _notes(settings: Settings) -> Path:
    return settings.state_directory / "tables"
