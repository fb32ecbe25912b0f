"""A disk that is really full, and one that is really read-only. Fault table rows 7 and 8.

Each case works until the space ends, is told so by name, gets room again and goes on: nothing is lost.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from pathlib import Path

from faults.ledger import Ledger, PromiseBrokenError
from faults.lives import Life, live_to_the_end
from faults.mounts import Mount

_FULL = frozenset({"DiskFullError", "DurableWriteError", "OSError"})
_READ_ONLY = frozenset({"DirectoryNotWritableError", "OSError"})
_ROOM = 96 << 10
"""Bytes: somewhat less than a home of the campaign takes on a file system with blocks of 4 KiB."""


def full(chance: random.Random, mount: Mount, number: int) -> Counter[str]:
    """All but some bytes of the disk are taken; a life meets the end of it; then there is room."""
    home, filler = mount.path / f"full-{number}", mount.path / "filler"
    ledger, met = Ledger(home, refused=_FULL), 0
    for _ in range(chance.randint(1, 3)):
        if home.exists() or chance.random() < 0.8:
            fill(filler, leave=chance.randrange(0, _ROOM, 4096))
        life = live_to_the_end(home)
        met += _named(life, errno.ENOSPC)
        ledger.hear(life)
        filler.unlink(missing_ok=True)
    ledger.refused = frozenset()
    ledger.close(live_to_the_end(home))
    shutil.rmtree(home)
    return Counter({"full disks": int(met), "cases": 1})


def read_only(chance: random.Random, mount: Mount, number: int) -> Counter[str]:
    """After some commits the file system is remounted read-only; then it is writable again."""
    home = mount.path / f"read-only-{number}"
    ledger = Ledger(home, refused=_READ_ONLY)
    ledger.hear(live_to_the_end(home, commits=chance.randint(1, 3)))
    mount.remount(read_only=True)
    try:
        life = live_to_the_end(home)
    finally:
        mount.remount(read_only=False)
    met = _named(life, errno.EROFS)
    ledger.hear(life)
    if not met:
        raise PromiseBrokenError(f"a read-only file system was not noticed (home: {home})")
    ledger.refused = frozenset()
    ledger.close(live_to_the_end(home))
    shutil.rmtree(home)
    return Counter({"read-only file systems": int(met), "cases": 1})


def _named(life: Life, code: int) -> bool:
    """Whether a life ended with this error; its message must say so in the system's words."""
    if life.error is None:
        return False
    if os.strerror(code) not in life.message:
        raise PromiseBrokenError(f"{os.strerror(code)!r} came up as {life.error}: {life.message}")
    return True


def fill(path: Path, *, leave: int) -> None:
    """Take all space but so many bytes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        size, step = 0, 1 << 20
        while step >= 4096:
            try:
                os.posix_fallocate(descriptor, size, step)
                size += step
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                step //= 2
        os.ftruncate(descriptor, max(0, size - leave))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
