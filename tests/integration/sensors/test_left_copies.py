"""Committed rows reach the store though their partition is never started again."""

import pytest

from sensors.left_copies import LeftCopies
from tests.support.stored_journals import Machine, away, commit
from vlm_durable.journal import commits
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.bucket import client


@pytest.fixture
def machines(tmp_path, bucket, monkeypatch):
    """Two machines over one store, which notice an outage at the first request."""
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    client.cache_clear()
    return Machine(tmp_path / "a", bucket), Machine(tmp_path / "b", bucket)


def leave(machine, s3_proxy, *ordinals):
    """A run that ends while the store is away: the last rows wait on its disk alone."""
    with machine.at_work() as (journal, copying):
        copying.flush()
        s3_proxy.breaks(away)
        commit(journal, *ordinals)


def test_what_a_run_left_is_copied_without_another_run(machines, bucket, s3_proxy):
    """A machine that is lost weeks later, with the partition cancelled or given up, loses none of it."""
    a, b = machines
    now = [0.0]
    working = {(a.paths.asset.name, a.paths.key)}
    left = LeftCopies([a.paths.asset], bucket, lambda: working, clock=lambda: now[0])
    a.commit(0)
    leave(a, s3_proxy, 1, 2)
    assert left.copy_waiting() == [], "who works on it copies it"
    working.clear()
    (said,) = left.copy_waiting()
    assert "wait here" in said
    s3_proxy.heal()
    assert "a moment ago" in left.copy_waiting()[0], "it would hold up other sensors"
    now[0] += 300.0
    (said,) = left.copy_waiting()
    assert "is in the store now" in said
    asked = len(s3_proxy.requests)
    assert left.copy_waiting() == []
    assert len(s3_proxy.requests) == asked, "what is known to be there costs nothing"
    assert b.rows() == [0, 1, 2]


def takes_over(a, b, s3_proxy):
    """The other machine took it over, or published it: the next start sorts out whose rows count."""
    a.commit(0)
    leave(a, s3_proxy, 1)
    s3_proxy.heal()
    b.commit(2)
    return [0, 1, 2]


def loses_a_row(a, b, s3_proxy):
    """A home put back from a copy of yesterday has fewer rows than the store: the next start fetches them."""
    a.commit(0)
    a.commit(1)
    commits.manifest_path(a.folder, max(commits.sequences(a.folder))).unlink()
    return [0, 1]


@pytest.mark.parametrize("happens", [takes_over, loses_a_row])
def test_nothing_is_copied_over_what_the_store_has_more(machines, bucket, s3_proxy, happens):
    """Another machine's work, or what this disk has lost, is not written over."""
    a, b = machines
    rows = happens(a, b, s3_proxy)
    head = a.stored.read_manifest()
    assert LeftCopies([a.paths.asset], bucket, set).copy_waiting() == []
    assert a.stored.read_manifest() == head
    assert a.rows() == rows


def test_one_that_cannot_be_copied_is_left_alone_until_its_next_manifest(machines, bucket, s3_proxy):
    """A damaged segment: said once, and those behind it are copied; its bytes are not sent at each look."""
    a, _ = machines
    left = LeftCopies([a.paths.asset], bucket, set)
    a.commit(0)
    leave(a, s3_proxy, 1)
    s3_proxy.heal()
    newest = commits.newest_manifest(a.folder)
    damaged = a.folder / newest.segments[-1].name
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (said,) = left.copy_waiting()
    assert "cannot be copied" in said
    asked = len(s3_proxy.requests)
    assert left.copy_waiting() == []
    assert len(s3_proxy.requests) == asked
