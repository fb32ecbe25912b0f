"""Digests of a model's files, kept on disk: a run is a process, and each would read 16 GB again to hash them.

What lives here: one file's digest, computed or remembered. What does not: which files decide
(``model_loading.py``). A digest is remembered for a day, for a file of the same size, inode and times: a bit
that rots in the weights is noticed within that day. A file that was changed just before it was hashed is not
remembered, since its next change could keep its time.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from functools import cache
from pathlib import Path
from typing import Any

from resources.storage.files import sha256_of
from resources.storage.sealed_json import BrokenSealError, read_sealed, write_sealed

SMALL_BYTES = 16 << 20
"""A smaller file is hashed anew: that costs less than remembering it."""

_SETTLED_NS = 2 * 10**9
_TRUSTED_NS = 86_400 * 10**9
_ABOUT = "Digests of model files. May be deleted: the next run computes them again."


def file_digest(path: Path, kept_in: Path | None = None) -> str:
    """SHA-256 of a file's bytes, in hex. kept_in: folder of remembered digests. Raises OSError."""
    status = path.stat()
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return _digest(path.absolute(), identity, kept_in)


@cache
def _digest(path: Path, identity: tuple[int, ...], kept_in: Path | None) -> str:
    if kept_in is None or path.stat().st_size < SMALL_BYTES:
        return sha256_of(path)
    note = kept_in / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    now = time.time_ns()
    known = _read(note)
    if known.get("identity") == list(identity) and 0 <= now - int(known["hashed_ns"]) < _TRUSTED_NS:
        return str(known["sha256"])
    found = sha256_of(path)
    if max(identity[-2:]) < now - _SETTLED_NS:
        content = {
            "about": _ABOUT,
            "path": str(path),
            "identity": identity,
            "sha256": found,
            "hashed_ns": now,
        }
        # A full disk must not stop a run for want of a shortcut.
        with contextlib.suppress(OSError):
            write_sealed(note, content)
    return found


def _read(note: Path) -> dict[str, Any]:
    try:
        return read_sealed(note)
    except (OSError, BrokenSealError):
        return {}
