"""The high-water mark: how many rows were ever committed, kept apart from the rows.

It has two slots, written in turn: if one is damaged, the other is one commit behind. The mark is never the
truth about what is done (the segments are). It reveals a loss: fewer rows than were committed before.
"""

from __future__ import annotations

import glob
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vlm_durable.files import files
from vlm_durable.files.sealed_json import BrokenSealError, refuse_newer_format, seal, unseal
from vlm_durable.journal.journal_errors import FencedError

FORMAT = 1


@dataclass(frozen=True)
class HighWaterMark:
    """The last commit that was acknowledged. One file (two slots) for each key and generation.

    rows: rows that count, one for each id. superseded: failed rows beside them that others superseded.
    """

    key: str
    generation: str
    rows: int
    sequence: int
    epoch: int
    last_segment: str | None
    given_up: tuple[str, ...] = ()
    """Names of segments whose loss a person accepted, so that the decision outlives one manifest."""
    retired: bool = False
    superseded: int = 0

    @property
    def rows_written(self) -> int:
        """All rows that must be on disk."""
        return self.rows + self.superseded


@dataclass(frozen=True)
class MarkReading:
    """The highest mark of a journal in the two slots, and the damaged slots."""

    mark: HighWaterMark | None
    damaged: tuple[Path, ...]


def slots(path: Path) -> tuple[Path, Path]:
    """The two files of a mark: ``path`` itself and one beside it."""
    return path, path.with_name(f"{path.name}.other")


def read_mark(path: Path, *, key: str, generation: str) -> MarkReading:
    """Read both slots. A mark of another key or generation counts as damaged: its file is in the wrong place.

    The other slot and the journal's manifests then say how much there was. Raises FormatVersionError where a
    newer version wrote a slot.
    """
    marks, damaged = [], []
    for slot in slots(path):
        try:
            content = unseal(slot.read_bytes())
            refuse_newer_format(content.pop("format"), FORMAT, slot)
            mark = HighWaterMark(**content)
        except FileNotFoundError:
            continue
        except (BrokenSealError, OSError, TypeError, KeyError):
            damaged.append(slot)
            continue
        if (mark.key, mark.generation) == (key, generation):
            marks.append(mark)
        else:
            damaged.append(slot)
    return MarkReading(max(marks, key=lambda mark: mark.sequence, default=None), tuple(damaged))


def read_marks(folder: Path, key: str) -> list[HighWaterMark]:
    """The high-water marks of all generations of a partition; ``folder`` holds nothing else."""
    marks = []
    for generation in sorted({path.name.partition(".json")[0] for path in folder.glob("*.json*")}):
        mark = read_mark(folder / f"{generation}.json", key=key, generation=generation).mark
        if mark is not None:
            marks.append(mark)
    return marks


def write_mark(path: Path, mark: HighWaterMark) -> None:
    """Write the mark into the slot of its sequence number, durably; a retired mark into both slots.

    The other slot of a retired journal must not promise rows: they are gone. Raises FencedError where either
    slot is ahead: another writer has gone on. A damaged slot is overwritten only in its turn;
    ``read_mark`` names it.
    """
    current = read_mark(path, key=mark.key, generation=mark.generation).mark
    if current is not None and current.sequence > mark.sequence:
        raise FencedError(
            f"{path} is at sequence {current.sequence} where this writer is at {mark.sequence}: another "
            "writer took over"
        )
    content = json.dumps({"format": FORMAT, **asdict(mark)}, separators=(",", ":")).encode()
    own, other = slots(path)[mark.sequence % 2], slots(path)[1 - mark.sequence % 2]
    for slot in (own, other) if mark.retired else (own,):
        files.write_replacing(slot, seal(content))


def clear_temporaries(path: Path) -> None:
    """Remove temporary files of killed writers of this mark. Only for the journal's one writer."""
    for slot in slots(path):
        for temporary in path.parent.glob(f".{glob.escape(slot.name)}.*{files.TEMPORARY_SUFFIX}"):
            temporary.unlink(missing_ok=True)
