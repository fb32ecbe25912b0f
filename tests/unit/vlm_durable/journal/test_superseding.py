"""A failed row may be superseded by a later try of its property; an ok row by nothing."""

import hashlib
import shutil

import pyarrow as pa
import pytest

from vlm_durable.journal.commits import newest_manifest
from vlm_durable.journal.high_water_mark import read_mark
from vlm_durable.journal.journal_errors import (
    JournalLossError,
    RowsRefusedError,
    SegmentUnreadableError,
)
from vlm_durable.journal.segments import encode, segment_name, verify_unlisted

SCHEMA = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("property_id", pa.string()),
        ("status", pa.string()),
        ("tries", pa.int32()),
    ]
)


def tried(ordinals, status, tries=1):
    """Rows of these ordinals, all with one status and try."""
    rows = [{"ordinal": n, "property_id": f"p{n}", "status": status, "tries": tries} for n in ordinals]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def open_journal(home):
    return home.open(schema=SCHEMA)


def commit(home, *tables):
    with open_journal(home) as journal:
        for table in tables:
            journal.submit(table)
            journal.flush()


def found(home):
    """What an open restores: status and try by ordinal, in the order that is read."""
    with open_journal(home) as journal:
        rows = [row for batch in journal.read_ordered(2) for row in batch.to_pylist()]
    return [(row["ordinal"], row["status"], row["tries"]) for row in rows]


@pytest.fixture
def retried(home):
    """Ordinals 0 to 3: 1 and 2 failed at their first try; 1 came right at its second, 2 failed again."""
    commit(
        home,
        tried([0, 3], "ok"),
        tried([1, 2], "failed"),
        pa.concat_tables([tried([1], "ok", 2), tried([2], "failed", 2)]),
    )
    return home


def test_the_last_try_counts_and_is_restored(retried):
    """One row an id, that of its last try, in the order of the catalogue, counted once."""
    assert found(retried) == [(0, "ok", 1), (1, "ok", 2), (2, "failed", 2), (3, "ok", 1)]
    with open_journal(retried) as journal:
        assert journal.failed_tries == {"p2": 2}
        assert journal.committed_rows == len(journal.done_ids) == 4
        assert journal.recovery.rows == 4
    assert newest_manifest(retried.directory).rows == 4
    mark = read_mark(retried.mark, key="KEY", generation="generation").mark
    assert (mark.rows, mark.rows_written) == (4, 6)


@pytest.mark.parametrize(
    ("ordinal", "status", "tries"),
    [(0, "ok", 2), (0, "failed", 2), (1, "ok", 3), (1, "failed", 3), (2, "failed", 2), (2, "failed", 1)],
)
def test_an_ok_row_and_an_equal_or_earlier_try_are_refused(retried, ordinal, status, tries):
    """Never an ok row, whatever the try; never a failed row by a try that is not later."""
    before = found(retried)
    with open_journal(retried) as journal, pytest.raises(RowsRefusedError, match=f"p{ordinal}"):
        journal.submit(tried([ordinal], status, tries))
    assert found(retried) == before


def test_a_row_that_is_not_committed_yet_is_not_superseded(home):
    """Two tries of one property never meet in one segment."""
    with open_journal(home) as journal:
        journal.submit(tried([1], "failed"))
        with pytest.raises(RowsRefusedError, match="p1"):
            journal.submit(tried([1], "ok", 2))


@pytest.mark.parametrize("tries", [None, -1])
def test_a_failed_row_says_which_try_it_was(home, tries):
    """Without a number nobody could tell a later try from an earlier one."""
    with open_journal(home) as journal:
        with pytest.raises(RowsRefusedError, match="which try"):
            journal.submit(tried([1], "failed", tries))
        assert not journal.done_ids
        journal.submit(tried([1], "ok", None))


def test_a_segment_of_a_failed_row_without_a_try_is_not_adopted(home):
    """A file that a journal could not have written does not count."""
    home.directory.mkdir(parents=True)
    identity = home.identity(SCHEMA)
    data = encode(tried([1], "failed"), identity)
    data = data.replace(b'[["p1"],[1],[1]]', b'[["p1"],[1],[9]]')
    path = home.directory / segment_name(epoch=1, number=1, sha256=hashlib.sha256(data).hexdigest())
    path.write_bytes(data)
    with pytest.raises(SegmentUnreadableError, match="names other ids"):
        verify_unlisted(path, identity)


def test_a_superseding_segment_is_adopted(retried):
    """Killed before its manifest, a commit of a second try is found like any other."""
    for path in retried.manifests():
        path.unlink()
    assert found(retried) == [(0, "ok", 1), (1, "ok", 2), (2, "failed", 2), (3, "ok", 1)]


def test_a_superseding_segment_that_is_gone_is_a_loss(retried):
    """Though every id still has a row, an older one: it must not come back in silence."""
    for path in retried.manifests():
        path.unlink()
    commit(retried, tried([4], "ok"))
    second_try = retried.segments()[2]
    for path in (*retried.manifests(), second_try):
        path.unlink()
    with pytest.raises(JournalLossError, match="2 rows of 7"):
        open_journal(retried)


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_an_unlisted_segment_never_supersedes_an_ok_row(home, tmp_path, status):
    """What two writers made of one property counts once: the committed ok row stays."""
    commit(home, tried([0, 1], "ok"))
    twin = type(home)(tmp_path / "twin")
    commit(twin, tried([2], "ok"), tried([1], status, 2))
    shutil.copy(twin.segments()[1], home.directory)
    assert found(home) == [(0, "ok", 1), (1, "ok", 1)]
    assert len(home.quarantined()) == 1


def test_a_retired_journal_counts_each_id_once(retried):
    """Superseded rows go with the journal; the mark that stays names the rows of the catalogue."""
    with open_journal(retried) as journal:
        journal.submit(tried(range(4, 12), "ok"))
        journal.flush()
        journal.retire()
    assert read_mark(retried.mark, key="KEY", generation="generation").mark.rows == 12
