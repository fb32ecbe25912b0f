"""The digest of a set of ids: the same for the same ids in any order, another for any other set.

Equal counts hide a swapped id; equal digests do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def key_set_digest(ids: Iterable[str]) -> str:
    """SHA-256, in hex, over the sorted ids; each is prefixed by its length, so none can imitate two."""
    return hashlib.sha256("".join(f"{len(i)}:{i}" for i in sorted(ids)).encode()).hexdigest()
