"""How much memory there is to plan with: the machine's, or what a container is given of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of the second and the first version of control groups; a container sees its own."""


def memory_bytes() -> int:
    """Bytes, none of which need be free: what takes more is killed."""
    known = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in _LIMITS:
        try:
            known.append(int(limit.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(known)
