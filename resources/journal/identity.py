"""Whose rows a journal holds: key, generation, fingerprints, schema and expected ids.

A journal is only ever continued by the identity that began it; comparing the two lives here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from resources.journal.journal_errors import JournalMismatchError

STATUS, OK = "status", "ok"
TRIES = "tries"
"""Columns by which a row says that it may be superseded: it failed, and this was its n-th try (from 1)."""


@dataclass(frozen=True)
class JournalIdentity:
    """What decides that rows belong together. ``schema`` is a pyarrow schema; its metadata is ignored."""

    key: str
    generation: str
    fingerprints: Mapping[str, str]
    schema: Any
    id_column: str
    order_column: str
    expected_ids: frozenset[str]
    described: Mapping[str, Any] = field(init=False)
    """The same as plain JSON values: what stands in manifests and in each segment's footer."""

    def __post_init__(self) -> None:
        for column, wanted in ((self.id_column, pa.types.is_string), (self.order_column, pa.types.is_int64)):
            if column not in self.schema.names or not wanted(self.schema.field(column).type):
                raise JournalMismatchError(
                    f"{self.key}: the schema needs {self.id_column!r} as string and {self.order_column!r} "
                    f"as int64; it has {self.schema.names}"
                )
        described = {
            "key": self.key,
            "generation": self.generation,
            "fingerprints": dict(sorted(self.fingerprints.items())),
            "schema": self.schema.remove_metadata().to_string(show_field_metadata=False),
            "id_column": self.id_column,
            "order_column": self.order_column,
            "expected_rows": len(self.expected_ids),
            "expected_ids_sha256": key_set_digest(self.expected_ids),
        }
        object.__setattr__(self, "described", described)

    def failed_tries(self, table: Any) -> list[int]:
        """Of each row: 0 where it is final, else the number of the try that failed.

        Without the two columns every row is final. Raises ValueError for a failed row without a number.
        """
        if STATUS not in self.schema.names or TRIES not in self.schema.names:
            return [0] * table.num_rows
        rows = zip(table.column(STATUS).to_pylist(), table.column(TRIES).to_pylist(), strict=True)
        numbers = [0 if status == OK else tries for status, tries in rows]
        if any(number is None or number < 0 for number in numbers):
            raise ValueError(f"a failed row does not say in {TRIES!r} which try it was")
        return numbers

    @property
    def segment_metadata(self) -> bytes:
        """What a segment's footer says about its owner: enough to adopt it without a manifest."""
        names = ("key", "generation", "fingerprints", "expected_ids_sha256")
        return json.dumps({name: self.described[name] for name in names}, sort_keys=True).encode()

    def check(self, found: Mapping[str, Any], where: str) -> None:
        """Compare with what stands on disk. Raises JournalMismatchError naming every difference."""
        differences = []
        for name, wanted in self.described.items():
            have = found.get(name)
            if have == wanted:
                continue
            if isinstance(wanted, dict) and isinstance(have, dict):
                differences += [
                    f"{part} is {have.get(part)!r} there and {wanted.get(part)!r} here"
                    for part in sorted({*wanted, *have})
                    if have.get(part) != wanted.get(part)
                ]
            else:
                differences.append(f"{name} is {have!r} there and {wanted!r} here")
        if differences:
            raise JournalMismatchError(
                f"{where} belongs to other work than {self.key} (generation {self.generation}): "
                f"{'; '.join(differences)}. Nothing was mixed. Open another generation for other settings, "
                "or put the settings and the catalogue back that began this one."
            )


def key_set_digest(ids: Iterable[str]) -> str:
    """SHA-256, in hex, over the sorted ids: equal counts hide a swapped id, equal digests do not.

    Each id is prefixed by its length, so none can imitate two.
    """
    return hashlib.sha256("".join(f"{len(i)}:{i}" for i in sorted(ids)).encode()).hexdigest()
