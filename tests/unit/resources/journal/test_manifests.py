"""resources/journal/manifests.py: of two writers at one number, one is fenced."""

import dataclasses

import pytest

from resources.journal import manifests
from resources.journal.errors import FencedError
from resources.journal.manifests import newest_manifest, publish


def test_a_number_taken_between_the_look_and_the_link_fences(committed, monkeypatch):
    """Both writers looked, both found the number free; the link decides, and the first one's file stays."""
    standing = newest_manifest(committed.directory)
    before = committed.manifests()[-1].read_bytes()
    monkeypatch.setattr(manifests, "refuse_if_overtaken", lambda directory, sequence: None)
    with pytest.raises(FencedError, match="taken over"):
        publish(committed.directory, dataclasses.replace(standing, epoch=standing.epoch + 1))
    assert committed.manifests()[-1].read_bytes() == before
    assert not list(committed.directory.glob(".*.tmp"))


def test_a_writer_that_was_overtaken_leaves_no_segment_behind(committed):
    """Fault 14: where the lock does not hold, the newer manifest alone says that another writer went on."""
    with pytest.raises(FencedError, match="another writer"), committed.open() as journal:
        standing = newest_manifest(committed.directory)
        following = dataclasses.replace(standing, sequence=standing.sequence + 1, epoch=standing.epoch + 1)
        publish(committed.directory, following)
        before = committed.segments()
        journal.submit(committed.rows(9))
        journal.flush()
    assert committed.segments() == before
