"""What stands in the catalogue for a withdrawn property: a keyed digest in the place of its id."""

import hashlib
from pathlib import Path

WITHDRAWN = "withdrawn"
"""The kind of failure of a withdrawn property's row, and how its id begins."""

_DIGITS = 32


def tombstone_id(catalog_id: str, property_id: str) -> str:
    """The id of a withdrawn property's row. Nobody can tell the property from it but by trying ids."""
    return f"{WITHDRAWN}-{hashlib.sha256(f'{catalog_id} {property_id}'.encode()).hexdigest()[:_DIGITS]}"


def is_tombstone(property_id: str) -> bool:
    """Whether an id of the catalogue is that of a withdrawn property's row."""
    return property_id.startswith(f"{WITHDRAWN}-") and len(property_id) == len(WITHDRAWN) + 1 + _DIGITS


def withdrawal_note(state_directory: Path) -> Path:
    """The file that says what a withdrawal has to do; it stands there until all is done."""
    return state_directory / "withdrawal.json"
