"""Two writers on one journal: one is refused, or fenced off when it wakes after a takeover."""

import itertools

import pytest


def test_a_second_writer_is_refused_while_the_first_is_paused(writers):
    """Fault 14: the lock of a stopped process still holds; the second says who holds it."""
    home = writers.new_home()
    paused = writers.run(home, "stop", 30)
    assert paused.stopped
    second = writers.run(home)
    assert second.error == "JournalLockedError"
    assert str(paused.child) in second.message
    awake = writers.ask(wake=paused.child)
    assert awake.finished
    writers.finish(home, set(awake.promised))


@pytest.mark.promise("One process writes a partition at a time")
def test_a_writer_paused_anywhere_commits_nothing_after_a_takeover(writers, stride):
    """Fault 14, at every third operation: its lock file is gone and another took over; it is fenced off."""
    fenced = 0
    for at in itertools.count(12, stride):
        home = writers.new_home()
        paused = writers.run(home, "stop", at)
        if not paused.stopped:
            break
        (home / "journal" / "writer.lock").unlink(missing_ok=True)
        other = writers.run(home)
        assert other.error is None, other.message
        awake = writers.ask(wake=paused.child)
        assert awake.finished or awake.error == "FencedError", (at, awake.error, awake.message)
        fenced += awake.error == "FencedError"
        promised = set(awake.promised) | set(other.promised)
        resumed = writers.finish(home, promised)
        assert resumed.restored == other.final
    assert fenced > 40 / stride


def test_a_writer_paused_while_another_is_half_way_through_commits_nothing(writers, stride):
    """Fault 14, every ninth operation: the other died half way; the woken one undoes and doubles nothing."""
    killed = fenced = 0
    for at in itertools.count(30, 3 * stride):
        home = writers.new_home()
        paused = writers.run(home, "stop", at)
        if not paused.stopped:
            break
        (home / "journal" / "writer.lock").unlink(missing_ok=True)
        other = writers.run(home, "kill", 40)
        killed += other.killed
        awake = writers.ask(wake=paused.child)
        assert awake.finished or awake.error == "FencedError", (at, awake.error, awake.message)
        fenced += awake.error == "FencedError"
        writers.finish(home, set(awake.promised) | set(other.promised))
    assert killed > 5, "hardly any of the other writers died half way"
    assert fenced > 5, "hardly any of the woken writers was fenced off"
