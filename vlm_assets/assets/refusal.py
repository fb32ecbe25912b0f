"""The note that checks refused the finished rows of a partition. Without it they were not published yet."""

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
    """generation: of the rows. checks: what each check that refused them found, in a sentence."""

    generation: str
    checks: Mapping[str, str]

    @classmethod
    def read(cls, paths: PartitionPaths, generations: Collection[str]) -> Self | None:
        """The refusal of the rows of one of these generations; None where none was written down."""
        try:
            content = read_sealed(paths.refusal)
            refusal = cls(content["generation"], content["checks"])
        except (OSError, BrokenSealError, KeyError):
            return None
        return refusal if refusal.generation in generations else None

    def write(self, paths: PartitionPaths) -> None:
        """Write it down, durably. Raises OSError."""
        write_sealed(paths.refusal, {"about": _ABOUT, **asdict(self)})


def clear_refusal(paths: PartitionPaths) -> None:
    """Rows change, or their checks have passed: nothing is refused any more. Raises OSError."""
    if paths.refusal.exists():
        paths.refusal.unlink()
        sync_directory(paths.refusal.parent)
