"""vlm_durable/journal/commits.py: of two writers, the one that was overtaken is fenced."""

import dataclasses

import pytest

from faults.file_operations import FileOperations, strike_at
from vlm_durable.journal import commits
from vlm_durable.journal.commits import newest_manifest, prune, publish_manifest
from vlm_durable.journal.journal_errors import FencedError


def test_a_number_taken_between_the_look_and_the_link_fences(committed, monkeypatch):
    """Both writers looked, both found the number free; the link decides, and the first one's file stays."""
    standing = newest_manifest(committed.directory)
    before = committed.manifests()[-1].read_bytes()
    monkeypatch.setattr(commits, "refuse_if_overtaken", lambda directory, sequence: None)
    with pytest.raises(FencedError, match="taken over"):
        publish_manifest(committed.directory, dataclasses.replace(standing, epoch=standing.epoch + 1))
    assert committed.manifests()[-1].read_bytes() == before
    assert not list(committed.directory.glob(".*.tmp"))


def test_a_writer_that_was_overtaken_leaves_no_segment_behind(committed):
    """Fault 14: where the lock does not hold, the newer manifest alone says that another writer went on."""
    with pytest.raises(FencedError, match="another writer"), committed.open() as journal:
        standing = newest_manifest(committed.directory)
        following = dataclasses.replace(standing, sequence=standing.sequence + 1, epoch=standing.epoch + 1)
        publish_manifest(committed.directory, following)
        before = committed.segments()
        journal.submit(committed.rows(9))
        journal.flush()
    assert committed.segments() == before


def test_a_writer_whose_number_was_taken_and_pruned_leaves_no_manifest_behind(committed):
    """Promise 10: an overtaken writer finds its number free again, and yet writes no manifest under it."""
    following = following_of(committed)
    go_on(committed, states=5)
    before = committed.manifests()
    with pytest.raises(FencedError, match="another writer"):
        publish_manifest(committed.directory, following)
    assert committed.manifests() == before
    assert not list(committed.directory.glob(".*.tmp"))


def test_a_number_taken_and_pruned_between_the_look_and_the_link_fences(committed):
    """Promise 10: paused just before its manifest has its name, the overtaken writer acknowledges nothing."""
    following = following_of(committed)
    paused = strike_at(1, lambda: go_on(committed, states=5), only="link")
    with FileOperations(committed.root, paused).watched(), pytest.raises(FencedError, match="another writer"):
        publish_manifest(committed.directory, following)
    assert newest_manifest(committed.directory).sequence == following.sequence + 4


def test_a_resume_is_told_how_the_work_was_divided(committed):
    """What the first rows were divided by is durable with them; before that nothing is said."""
    with committed.open() as journal:
        assert journal.plan is None
        journal.plan = {"cost": 64, "tried": [128]}
        journal.submit(committed.rows(9))
    for _ in range(2):
        with committed.open() as journal:
            assert journal.plan == {"cost": 64, "tried": [128]}


def following_of(home):
    """The next manifest of a writer that knows the newest one."""
    standing = newest_manifest(home.directory)
    return dataclasses.replace(standing, sequence=standing.sequence + 1)


def go_on(home, states):
    """Another writer takes over and publishes so many manifests; the oldest ones are pruned."""
    for _ in range(states):
        following = dataclasses.replace(following_of(home), epoch=9)
        publish_manifest(home.directory, following)
        prune(home.directory, following.sequence)
