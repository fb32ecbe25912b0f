"""The fingerprint: a digest of everything that decides the meaning of a partition's rows.

What lives here: how the parts become one digest, and the name of a generation. What does not: which parts
an asset has. Batch size, plan, workers and device are recorded with a run but are no part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

CATALOGUE_SLICE = "catalogue_slice"
"""The part for a range's rows of the catalogue."""

TEXTS = "texts"
"""The part for the texts that embeddings are made from. The descriptions' record has the same digest."""


@dataclass(frozen=True)
class Fingerprint:
    """Named parts (for people: which one changed) and their digest (for machines: same or not)."""

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """16 hex digits over the parts, whatever their order."""
        canonical = json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def generation(self, recompute_run_id: str | None = None) -> str:
        """The generation's name: the digest, and for a recomputation the root run that asked for it.

        With the run's id in its name a crashed recomputation resumes, and a finished one is not repeated.
        """
        return self.digest if recompute_run_id is None else f"{self.digest}-{recompute_run_id[:8]}"


def digest_of(value: object) -> str:
    """A digest of any JSON value, for one part."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
