"""vlm_durable/journal/segments.py: what verifies is exactly what was written, and ours."""

import dataclasses
import hashlib
import random

import pyarrow as pa
import pytest

from tests.support.damage import flip_bit, flipped
from vlm_durable.journal import segments
from vlm_durable.journal.commits import newest_manifest
from vlm_durable.journal.journal_errors import JournalError, SegmentUnreadableError
from vlm_durable.journal.segments import (
    decode,
    encode,
    later_column,
    segment_name,
    verify_listed,
    verify_unlisted,
)


def test_page_checksums_are_written_and_verified(home):
    """A flipped bit in a page is an error by itself, before any digest: never a silently wrong value."""
    table = home.rows(*range(12))
    data = encode(table, home.identity())
    choose, noticed = random.Random(5), 0
    for _ in range(200):
        damaged = flipped(data, choose.randrange(4, 700), choose.randrange(8))
        try:
            found = decode(damaged, home.directory)
        except SegmentUnreadableError:
            noticed += 1
        else:
            assert found.to_pylist() == table.to_pylist()
    assert noticed > 100


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda home: home.rows(3, 4, 3), "an id twice"),
        (lambda home: home.rows(), "no rows"),
        (lambda home: home.rows(3, 77), "does not expect"),
        (lambda home: home.rows(3).append_column("more", pa.array([1])), "another schema"),
    ],
)
def test_a_well_formed_file_that_cannot_be_ours_is_not_adopted(home, spoil, named):
    """Digest and owner fit, yet ids or schema do not: said by name, and never counted."""
    home.directory.mkdir(parents=True)
    data = encode(spoil(home), home.identity())
    path = home.directory / segment_name(epoch=1, number=1, sha256=hashlib.sha256(data).hexdigest())
    path.write_bytes(data)
    with pytest.raises(SegmentUnreadableError, match=named):
        verify_unlisted(path, home.identity())
    with home.open() as journal:
        assert journal.committed_rows == 0
    assert home.quarantined()


def test_a_listed_segment_is_to_the_byte_what_was_committed(committed):
    """Fault 10: the manifest's SHA-256 and key-set digest decide, before anything is decoded."""
    record = newest_manifest(committed.directory).segments[1]
    path = committed.directory / record.name
    assert verify_listed(path, record, committed.identity()).ids == ("p3", "p4", "p5")
    others = dataclasses.replace(record, key_set_digest="0" * 64)
    with pytest.raises(SegmentUnreadableError, match="does not hold the ids"):
        verify_listed(path, others, committed.identity())
    flip_bit(path, 40)
    with pytest.raises(SegmentUnreadableError, match="not what was committed"):
        verify_listed(path, record, committed.identity())


def test_a_footer_that_names_other_ids_than_the_rows_is_not_adopted(home, monkeypatch):
    """A re-open trusts the footer's ids, so they are compared with the rows before a segment counts."""
    home.directory.mkdir(parents=True)
    with monkeypatch.context() as wrong:
        wrong.setattr(segments, "_keys_of", lambda table, identity: (["p4"], [4], [0]))
        data = encode(home.rows(3), home.identity())
    path = home.directory / segment_name(epoch=1, number=1, sha256=hashlib.sha256(data).hexdigest())
    path.write_bytes(data)
    with pytest.raises(SegmentUnreadableError, match="names other ids"):
        verify_unlisted(path, home.identity())


@pytest.mark.parametrize("cache_bytes", [1, 64 << 20])
@pytest.mark.parametrize("batch_rows", [1, 7, 1024])
def test_any_mix_of_segments_reads_in_order(home, monkeypatch, cache_bytes, batch_rows):
    """Segments that all span the whole range, one segment cached or all: every row once, in order."""
    monkeypatch.setattr(segments, "_CACHE_BYTES", cache_bytes)
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
    monkeypatch.setattr(segments, "_CACHE_BYTES", 1)
    decoded = []
    real = segments.read_rows
    monkeypatch.setattr(
        segments, "read_rows", lambda path, record: decoded.append(path) or real(path, record)
    )
    with home.open() as journal:
        list(journal.read_ordered(2))
    assert len(decoded) == 4


def test_an_empty_journal_reads_as_nothing(home):
    """No rows, no batches, no error."""
    with home.open() as journal:
        assert list(journal.read_ordered()) == []


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_journal_of_an_earlier_version_goes_on(home, is_listed):
    """Its rows stay, null in a column that they lack, and rows with that column come after them."""
    home.commit((0, 1), (2, 3))
    if not is_listed:
        home.manifests()[-1].unlink()
    schema = home.rows().schema.insert(2, later_column("sureness", pa.float32()))
    newer = home.rows(4, 5).add_column(2, "sureness", pa.chunked_array([[0.5, 0.25]], pa.float32()))
    with home.open(schema=schema) as journal:
        assert journal.committed_rows == 4
        journal.submit(newer)
    with home.open(schema=schema) as journal:
        (rows,) = journal.read_ordered()
    assert rows.schema.equals(schema)
    assert rows["sureness"].to_pylist() == [None] * 4 + [0.5, 0.25]
    assert (
        pa.Table.from_batches([rows]).drop_columns("sureness").to_pylist() == home.rows(*range(6)).to_pylist()
    )


def test_a_column_that_was_always_there_may_not_be_missing(home):
    """Rows of other work are not mixed in as if they were of an earlier version."""
    home.commit((0, 1))
    with pytest.raises(JournalError, match="belongs to other work"):
        home.open(schema=home.rows().schema.append(pa.field("sureness", pa.float32())))
