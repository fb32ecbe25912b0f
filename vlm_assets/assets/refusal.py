"""The note that checks refused a partition's finished rows. Without it the rows only wait for publication."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Self

from vlm_durable.files.files import sync_directory
from vlm_durable.files.layout import PartitionPaths
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed

_ABOUT = "May be deleted: checks refused these rows. The next start checks them again."


@dataclass(frozen=True)
class Refusal:
    """Finished rows that checks refused. checks: a sentence for each failed check, by its name."""

    generation: str
    checks: Mapping[str, str]

    @classmethod
    def read(cls, paths: PartitionPaths, generations: Collection[str]) -> Self | None:
        """The refusal of one of these generations; None where none was noted."""
        try:
            content = read_sealed(paths.refusal)
            refusal = cls(content["generation"], content["checks"])
        except (OSError, BrokenSealError, KeyError):
            return None
        return refusal if refusal.generation in generations else None

    def write(self, paths: PartitionPaths) -> None:
        """Write the note durably. Raises OSError."""
        write_sealed(paths.refusal, {"about": _ABOUT, **asdict(self)})


def clear_refusal(paths: PartitionPaths) -> None:
    """Remove the note, because rows change or the checks have passed. Raises OSError."""
    if paths.refusal.exists():
        paths.refusal.unlink()
        sync_directory(paths.refusal.parent)
