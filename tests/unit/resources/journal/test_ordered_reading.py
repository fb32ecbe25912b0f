"""resources/journal/ordered_reading.py: catalogue order out of any commit order, in bounded memory."""

import random

import pytest

from resources.journal import ordered_reading


@pytest.mark.parametrize("cache_bytes", [1, 64 << 20])
@pytest.mark.parametrize("batch_rows", [1, 7, 1024])
def test_any_mix_of_segments_reads_in_order(home, monkeypatch, cache_bytes, batch_rows):
    """Segments that all span the whole range, one segment cached or all: every row once, in order."""
    monkeypatch.setattr(ordered_reading, "_CACHE_BYTES", cache_bytes)
    order = list(range(12))
    random.Random(11).shuffle(order)
    home.commit(order[0:3], order[3:6], order[6:9], order[9:12])
    with home.open() as journal:
        batches = list(journal.read_ordered(batch_rows))
    assert [n for batch in batches for n in batch.column("ordinal").to_pylist()] == list(range(12))
    assert max(batch.num_rows for batch in batches) <= batch_rows


def test_segments_in_order_are_each_decoded_once(home, monkeypatch):
    """The usual case costs one pass over the files, even with the smallest cache."""
    home.commit((0, 2, 1), (3, 5, 4), (6, 7, 8), (9, 10, 11))
    monkeypatch.setattr(ordered_reading, "_CACHE_BYTES", 1)
    decoded = []
    real = ordered_reading.read_rows
    monkeypatch.setattr(
        ordered_reading, "read_rows", lambda path, record: decoded.append(path) or real(path, record)
    )
    with home.open() as journal:
        list(journal.read_ordered(2))
    assert len(decoded) == 4


def test_an_empty_journal_reads_as_nothing(home):
    """No rows, no batches, no error."""
    with home.open() as journal:
        assert list(journal.read_ordered()) == []
