"""The verdict that an answer is no description, apart from the schema that gives it (schema.py).

Needs no pydantic, so that what feeds an engine runs where there is none (benchmarks/gpu.py).
"""

from __future__ import annotations

_MESSAGE_LIMIT = 300


class InvalidDescription(ValueError):  # noqa: N818 - an answer's verdict, named as people read it in a row
    """An answer is no description of this schema.

    kind: ``invalid_json`` (does not parse as one strict JSON object) or ``schema_mismatch`` (parses, but the
    model refuses it, or Arrow could not hold it).
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        long = len(message) > _MESSAGE_LIMIT
        self.message = message[: _MESSAGE_LIMIT - 1] + "…" if long else message
        super().__init__(f"{kind}: {self.message}")
