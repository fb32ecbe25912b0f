"""What was found in files when they were last read. A file that was changed since is read again.

This is the one rule by which anything that is remembered of a file is believed. A lost note costs time alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed

_SETTLED_NS = 2 * 10**9
"""A file that changed so recently could change again within the same time: it is read again next time."""

_ABOUT = "May be deleted: what was found in files that were read. They are read again then."


def signature_of(file: os.stat_result) -> str:
    """A text that changes when a file is written, replaced or renamed.

    The change time (ctime) moves with each of these, and only the kernel's clock sets it.
    """
    return f"{file.st_size} {file.st_mtime_ns} {file.st_ctime_ns} {file.st_ino}"


def signature_at(path: Path | None) -> str:
    """The signature of a file; empty if there is none."""
    try:
        return "" if path is None else signature_of(path.stat())
    except FileNotFoundError:
        return ""


def is_settled(file: os.stat_result) -> bool:
    """Whether a further change of the file would show in its signature."""
    return file.st_ctime_ns < time.time_ns() - _SETTLED_NS


class SeenFiles:
    """What was found in each file, by a name, under its signature. note: where it is kept between processes.

    trusted_seconds: after at most which a file is read again all the same; some half of that, by its name, so
    that not all are read at once.
    """

    def __init__(self, note: Path, *, trusted_seconds: float = math.inf) -> None:
        self._note = note
        self._trusted_seconds = trusted_seconds
        self._seen = self._read()
        self._new: dict[str, tuple[str, str, float]] = {}

    def outcome(self, name: str, signature: str) -> str | None:
        """What was found in a file; None where it was not read, or changed since."""
        seen_signature, outcome, at = self._seen.get(name, ("", "", 0.0))
        return outcome if seen_signature == signature and self._is_trusted(name, at) else None

    def doubtful(self, damaged: str) -> Iterator[str]:
        """The names of files in which ``damaged`` was found, or which were read too long ago."""
        for name, (_, outcome, at) in self._seen.items():
            if outcome == damaged or not self._is_trusted(name, at):
                yield name

    def keep(self, name: str, signature: str, outcome: str, file: os.stat_result) -> None:
        """Remember what was found. signature: of before the file was read. file: its state after that."""
        if is_settled(file):
            self._seen[name] = self._new[name] = (signature, outcome, time.time_ns() / 1e9)

    def save(self) -> None:
        """Write the note, if there is anything new. If that fails, the next look takes longer."""
        if self._new:
            # Another process may have noted others meanwhile.
            seen = self._read() | self._new
            with contextlib.suppress(OSError):
                write_sealed(self._note, {"about": _ABOUT, "seen": seen})
                self._new = {}

    def _is_trusted(self, name: str, at: float) -> bool:
        share = zlib.crc32(name.encode()) / 2**32
        return 0.0 <= time.time_ns() / 1e9 - at < self._trusted_seconds * (1.0 + share) / 2.0

    def _read(self) -> dict[str, tuple[str, str, float]]:
        try:
            seen = read_sealed(self._note)["seen"]
            return {name: (str(sign), str(outcome), float(at)) for name, (sign, outcome, at) in seen.items()}
        except (OSError, BrokenSealError, KeyError, TypeError, ValueError, AttributeError):
            return {}
