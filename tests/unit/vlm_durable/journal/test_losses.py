"""The four losses this journal was built after, each made impossible, by name."""

import pytest

from vlm_durable.journal.journal_errors import JournalLossError


@pytest.mark.promise("What is done is derived from committed rows")
def test_loss_1_a_checkpoint_that_reads_less_than_is_done(committed):
    """Progress comes from verified segments: no counter, index or manifest can make it read 18% of 98%."""
    for path in committed.manifests()[1:]:
        path.unlink()
    with committed.open() as journal:
        assert journal.committed_rows == 9
        assert journal.missing_ids == {"p9", "p10", "p11"}


def test_loss_2_backups_at_paths_nobody_had_looked_at(committed):
    """A refusal lists every path a copy may be at, the quarantine included, and the command that decides."""
    damaged = committed.segments()[1]
    damaged.write_bytes(damaged.read_bytes()[:-40])
    with pytest.raises(JournalLossError) as refused:
        committed.open()
    assert damaged in refused.value.copies
    assert str(damaged) in str(refused.value)
    assert refused.value.command == "`vlm-assets repair --accept-loss KEY`"
    assert (refused.value.promised_rows, refused.value.restorable_rows) == (9, 6)
    assert damaged.exists(), "a refusal changes nothing"


@pytest.mark.promise("Every start is a resume")
def test_loss_3_a_restart_that_overwrites(committed):
    """There is no way to open without resuming: a plain start keeps every committed file, byte for byte."""
    before = {path: path.read_bytes() for path in committed.segments()}
    with committed.open() as journal:
        assert journal.done_ids == {f"p{n}" for n in range(9)}
        journal.submit(committed.rows(9, 10, 11))
    assert {path: path.read_bytes() for path in before} == before
    assert committed.restored() == list(range(12))


def test_loss_4_a_resume_that_restores_the_position_but_not_the_data(committed):
    """The mark says nine rows and the data is gone: it stops before the first property."""
    for path in committed.segments():
        path.unlink()
    with pytest.raises(JournalLossError, match="0 rows can be restored, 9 were committed"):
        committed.open()


def test_loss_4_the_whole_folder_is_gone(committed):
    """The journal's folder deleted: the mark, kept apart, still promises nine rows: refused."""
    for path in sorted(committed.directory.rglob("*"), reverse=True):
        path.unlink()
    committed.directory.rmdir()
    with pytest.raises(JournalLossError, match="9 rows of 9 that the high-water mark promises"):
        committed.open()
