"""SIGKILL at every file operation of a commit and of a recovery: committed rows exact, none twice."""

import random

import pytest

from tests.support.shares import count_share, share_of

SHARES = 3


@pytest.mark.promise("A row counts as committed", "Finished work stays")
def test_a_kill_at_every_operation_loses_nothing_promised(writers):
    """Fault 1: whatever operation a kill comes before, what was promised is restored, the rest done once."""
    kills = 0
    for at in count_share(1, SHARES):
        home = writers.new_home()
        struck = writers.run(home, "kill", at)
        assert struck.error is None, struck.message
        writers.finish(home, set(struck.promised), again=struck.promised_again)
        if struck.finished:
            break
        assert struck.killed
        kills += 1
    assert kills > 80 / SHARES, "the sweep met fewer file operations than three commits have"


def test_a_write_torn_by_a_kill_is_never_taken_for_a_result(writers):
    """Fault 1: half a write, then the kill; the half never counts."""
    kills = 0
    for at in count_share(1, SHARES):
        home = writers.new_home()
        struck = writers.run(home, "torn", at, only="write")
        writers.finish(home, set(struck.promised), again=struck.promised_again)
        if struck.finished:
            break
        kills += struck.killed
    assert kills > 10 / SHARES - 1, "the sweep met fewer writes than three commits have"


@pytest.mark.parametrize("first", share_of([9, 24, 31, 40, 47], 5))
def test_a_kill_during_recovery_converges(writers, first):
    """Fault 6: a kill at each operation of the next open, and the one after it reaches the same rows."""
    kills = 0
    for at in count_share(1, SHARES):
        home = writers.new_home()
        struck = writers.run(home, "kill", first)
        assert struck.killed
        damage_newest_manifest(home)
        again = writers.run(home, "kill", at, batches=0)
        assert again.error is None, again.message
        writers.finish(home, set(struck.promised), again=struck.promised_again)
        if again.finished:
            break
        kills += again.killed
    assert kills > 20 / SHARES, "the sweep met fewer file operations than a recovery has"


def test_many_kills_in_a_row_at_random_points_lose_nothing(writers, rounds, seed):
    """Fault 2: kills at random operations, several in a row, restarts without end until the work is done."""
    choose = random.Random(seed)
    for number in range(12 * rounds):
        home, promised, again = writers.new_home(), set(), set()
        while True:
            struck = writers.run(home, choose.choice(["kill", "torn"]), choose.randint(1, 60), total=15)
            assert struck.error is None, (seed, number, struck.message)
            if struck.restored is not None:
                assert promised <= set(struck.restored), (seed, number)
                assert again <= set(struck.restored_again), (seed, number)
            promised |= set(struck.promised)
            again |= set(struck.promised_again)
            if struck.finished:
                break
        writers.finish(home, promised, total=15, again=again)


def damage_newest_manifest(home):
    """Cut the newest manifest short, where there is more than one."""
    standing = sorted((home / "journal").glob("manifest-*.json"))
    if len(standing) > 1:
        standing[-1].write_bytes(standing[-1].read_bytes()[:40])
