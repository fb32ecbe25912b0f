"""Damage to files, as a disk does it."""

from pathlib import Path


def damage_rows(path: Path) -> None:
    """Overwrite the middle of a parquet file's rows, all before its footer."""
    data = bytearray(path.read_bytes())
    footer = 8 + int.from_bytes(data[-8:-4], "little")
    for at in range(4, len(data) - footer):
        data[at] ^= 0xFF
    path.write_bytes(bytes(data))


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    """The same bytes, but for one bit of the byte at ``at``."""
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def flip_bit(path: Path, at: int | None = None, bit: int = 0) -> None:
    """Flip one bit of the byte at ``at``, or of the one in the middle of the file."""
    data = path.read_bytes()
    path.write_bytes(flipped(data, len(data) // 2 if at is None else at, bit))
