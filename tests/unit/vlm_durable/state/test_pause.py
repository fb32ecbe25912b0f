"""The pause: durable, and kept through a second pause. (What becomes of a damaged one: test_database.py.)"""

import pytest

from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import pause, pause_of, resume


@pytest.fixture
def state(tmp_path):
    return ControlState(tmp_path / "state")


def test_nothing_is_paused_at_first(state):
    """A new home is not paused; lifting no pause is no error."""
    assert pause_of(state) is None
    assert resume(state) is None


def test_a_pause_says_since_when_and_why_until_it_is_lifted(state):
    """What a person gave as reason is what the pages say."""
    pause(state, "a new disk", now=1_800_000_000.0)
    standing = pause_of(ControlState(state.directory))
    assert (standing.since, standing.reason) == (1_800_000_000.0, "a new disk")
    assert "because a new disk" in standing.sentence()
    assert resume(state) == standing
    assert pause_of(state) is None


def test_a_second_pause_keeps_the_beginning(state):
    """Paused twice is paused since the first time; a new reason replaces the old, none keeps it."""
    pause(state, "a new disk", now=1.0)
    assert pause(state, "", now=2.0).reason == "a new disk"
    assert pause(state, "and memory", now=3.0).since == 1.0
    assert pause_of(state).reason == "and memory"


def test_a_pause_outlives_the_database_and_its_end_does_too(state):
    """Both are copied at once: a restored database neither starts what stood still nor stops what goes on."""
    pause(state, "a new disk", now=1.0)
    (state.directory / "state.db").unlink()
    assert pause_of(state).reason == "a new disk"
    resume(state)
    (state.directory / "state.db").unlink()
    assert pause_of(state) is None
