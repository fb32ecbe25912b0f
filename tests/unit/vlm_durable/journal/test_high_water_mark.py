"""vlm_durable/journal/high_water_mark.py: two slots, the higher one counts, and it never goes backwards."""

import json

import pytest

from vlm_durable.files.sealed_json import FormatVersionError, seal, unseal
from vlm_durable.journal.high_water_mark import HighWaterMark, read_mark, slots, write_mark
from vlm_durable.journal.journal_errors import FencedError


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
    """Read for another generation or key it counts as damaged, and the other slot speaks."""
    path = tmp_path / "mark.json"
    write_mark(path, mark(1))
    for key, generation in (("KEY", "other"), ("OTHER", "g")):
        found = read_mark(path, key=key, generation=generation)
        assert (found.mark, found.damaged) == (None, (slots(path)[1],))


def test_a_mark_of_a_newer_version_is_refused(tmp_path):
    """A newer program's mark is never taken for damage."""
    path = tmp_path / "mark.json"
    write_mark(path, mark(2))
    path.write_bytes(seal(json.dumps({**unseal(path.read_bytes()), "format": 99}).encode()))
    with pytest.raises(FormatVersionError, match="newer version"):
        read_mark(path, key="KEY", generation="g")
