"""The last tick of each sensor, on disk."""

from sensors.ticks import Tick, last_ticks, record_tick


def test_the_last_tick_of_each_is_kept_whatever_writes(tmp_path):
    """Whoever looks sees when each ticked last, and how often it means to."""
    record_tick(tmp_path / "ticks", "one", 100.0, interval_seconds=30)
    record_tick(tmp_path / "ticks", "one", 200.0, interval_seconds=30)
    record_tick(tmp_path / "ticks", "other", 150.0)
    assert last_ticks(tmp_path / "ticks") == {
        "one": Tick("one", 200.0, 30.0),
        "other": Tick("other", 150.0, 60.0),
    }
    assert len(list((tmp_path / "ticks").iterdir())) == 2


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path):
    """A power cut in the middle of a note costs that note until the next tick."""
    record_tick(tmp_path, "one", 100.0)
    (tmp_path / "other.json").write_text('{"na')
    assert list(last_ticks(tmp_path)) == ["one"]


def test_before_the_first_tick_there_is_none(tmp_path):
    """A new home has no ticks and no error."""
    assert last_ticks(tmp_path / "ticks") == {}
