"""The digest of a set of ids, whatever their order: how two places agree that they hold the same properties.

What lives here: the digest only. Who compares what, and what is refused, is said by the journal and by
the published partitions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def key_set_digest(ids: Iterable[str]) -> str:
    """SHA-256, in hex, over the sorted distinct ids, each with its length in bytes before it.

    The length keeps ``["ab", "c"]`` and ``["a", "bc"]`` apart. A repeated id counts once: whether ids
    repeat is asked separately, because a set cannot tell.
    """
    digest = hashlib.sha256()
    for encoded in sorted(one.encode() for one in set(ids)):
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.hexdigest()
