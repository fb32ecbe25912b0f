"""The pause file: durable, kept through a second pause, and a pause even where it cannot be read."""

from resources.state.pause import NAME, pause, pause_of, resume


def test_nothing_is_paused_at_first(tmp_path):
    """No file, no pause; lifting none is no error."""
    assert pause_of(tmp_path / "state") is None
    assert resume(tmp_path / "state") is None


def test_a_pause_says_since_when_and_why_until_it_is_lifted(tmp_path):
    """What a person gave as reason is what the pages say."""
    pause(tmp_path / "state", "a new disk", now=1_800_000_000.0)
    standing = pause_of(tmp_path / "state")
    assert (standing.since, standing.reason) == (1_800_000_000.0, "a new disk")
    assert "because a new disk" in standing.sentence()
    assert resume(tmp_path / "state") == standing
    assert pause_of(tmp_path / "state") is None


def test_a_second_pause_keeps_the_beginning(tmp_path):
    """Paused twice is paused since the first time; a new reason replaces the old, none keeps it."""
    pause(tmp_path, "a new disk", now=1.0)
    assert pause(tmp_path, "", now=2.0).reason == "a new disk"
    assert pause(tmp_path, "and memory", now=3.0).since == 1.0
    assert pause_of(tmp_path).reason == "and memory"


def test_a_pause_that_does_not_read_is_a_pause(tmp_path):
    """Unreadable never counts as empty: everything stays still, and the file is named."""
    pause(tmp_path, "a new disk", now=1.0)
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes().replace(b"disk", b"desk"))
    assert str(tmp_path / NAME) in pause_of(tmp_path).reason
    resume(tmp_path)
    assert pause_of(tmp_path) is None
