"""resources/journal/high_water_mark.py: two slots, the higher one counts, and it never goes backwards."""

import pytest

from resources.journal.errors import FencedError, JournalMismatchError
from resources.journal.high_water_mark import HighWaterMark, read_mark, slots, write_mark


def mark(sequence, rows=0, **more):
    return HighWaterMark("KEY", "g", rows, sequence, epoch=1, last_segment=None, **more)


def test_the_highest_readable_slot_counts(tmp_path):
    """Slots are written in turn: damage to the newest leaves the one before it, and is reported."""
    path = tmp_path / "mark.json"
    for sequence in (1, 2, 3):
        write_mark(path, mark(sequence, rows=10 * sequence))
    assert read_mark(path, key="KEY", generation="g").mark.rows == 30
    damaged = slots(path)[1]
    damaged.write_bytes(b"")
    found = read_mark(path, key="KEY", generation="g")
    assert (found.mark.rows, found.damaged) == (20, (damaged,))


def test_a_writer_that_is_behind_cannot_lower_the_mark(tmp_path):
    """A paused writer that wakes finds the mark ahead of it: fenced, and the mark stays."""
    path = tmp_path / "mark.json"
    write_mark(path, mark(7, rows=70))
    with pytest.raises(FencedError):
        write_mark(path, mark(6, rows=60))
    assert read_mark(path, key="KEY", generation="g").mark.rows == 70


def test_a_mark_is_one_journals(tmp_path):
    """Read for another generation it is refused by name."""
    path = tmp_path / "mark.json"
    write_mark(path, mark(1))
    with pytest.raises(JournalMismatchError, match=r"generation g\)"):
        read_mark(path, key="KEY", generation="other")
