"""What the published files of an asset look like from outside, and what they looked like at the last look.

What lives here: one signature a partition, from the file system alone, and the snapshot of them in
``.state/drift``. What does not: reading the files, and what a difference means (``row_count_drift.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from resources.storage.files import make_directory, write_replacing
from resources.storage.layout import AssetFolders

_FORMAT = 1
_ABOUT = "What was seen at the last look; may be deleted: every partition is then looked at anew."
_FILE, _RECORD = ".parquet", ".json"


def signatures(asset: AssetFolders, *, made_from: AssetFolders | None = None) -> dict[str, str]:
    """Size, change time and inode of each partition's file and record, by key; of all files that are there.

    made_from: the asset that this one is made from; its records count as part of it. The change
    time (ctime) moves with every write, and with a rename; nothing but the kernel's clock can set it.
    """
    found: dict[str, list[str]] = {}
    for folder, ending in ((asset.published, _FILE), (asset.versions, _RECORD)):
        for name, said in _entries(folder, ending):
            found.setdefault(name, []).append(ending + said)
    if made_from is not None:
        for name, said in _entries(made_from.versions, _RECORD):
            if name in found:
                found[name].append(said)
    return {key: " ".join(parts) for key, parts in found.items()}


def foreign_names(asset: AssetFolders, keys: Collection[str]) -> list[str]:
    """Names of parquet files that are no partition's but that whoever reads ``*.parquet`` reads too."""
    return [name for name in asset.published_keys() if name not in keys and not name.startswith(".")]


def _entries(folder: Path, ending: str) -> Iterator[tuple[str, str]]:
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            # No dot in the rest: not the record's second copy, nor a temporary file.
            if entry.name.endswith(ending) and "." not in entry.name.removesuffix(ending):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                yield entry.name.removesuffix(ending), f"{stat.st_size}.{stat.st_ctime_ns}.{stat.st_ino}"


class Seen(NamedTuple):
    """One partition at its last look.

    expectation: what its record was compared with; kind: of the verdict; told: the verdict that Dagster was
    told, "" where none was. owed: the verdict that it is to be told, "" where none is; it may have been told
    already by a tick that then died. at: when the owed one was found, in unix seconds.
    """

    signature: str
    expectation: str
    kind: str
    told: str
    owed: str = ""
    at: float = 0.0


@dataclass
class Snapshot:
    """What was seen of one asset. is_lost: not every partition was looked at since nothing was known."""

    path: Path
    partitions: dict[str, Seen] = field(default_factory=dict)
    is_lost: bool = False

    @classmethod
    def read(cls, path: Path) -> Snapshot:
        """The last one; a new one where there is none that reads."""
        try:
            said = json.loads(path.read_bytes())
            if said["format"] != _FORMAT:
                return cls(path, is_lost=True)
            partitions = {key: Seen(*seen) for key, seen in said["partitions"].items()}
            return cls(path, partitions, is_lost=bool(said["is_lost"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(path, is_lost=True)

    def write(self) -> None:
        """Replace the file, durably when it returns. Raises OSError."""
        make_directory(self.path.parent)
        said = {
            "about": _ABOUT,
            "format": _FORMAT,
            "is_lost": self.is_lost,
            "partitions": self.partitions,
        }
        write_replacing(self.path, json.dumps(said).encode())
