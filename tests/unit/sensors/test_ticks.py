"""The last tick of each sensor, on disk."""

import errno
import logging
from pathlib import Path

import pytest

from sensors.ticks import Tick, last_ticks, note_tick, record_tick


def test_the_last_tick_of_each_is_kept_whatever_writes(tmp_path):
    """Whoever looks sees when each ticked last, and how often it means to."""
    record_tick(tmp_path / "ticks", "one", 100.0, interval_seconds=30)
    record_tick(tmp_path / "ticks", "one", 200.0, interval_seconds=30)
    record_tick(tmp_path / "ticks", "other", 150.0)
    assert last_ticks(tmp_path / "ticks") == {
        "one": Tick("one", 200.0, 30.0, since=100.0),
        "other": Tick("other", 150.0, 60.0, since=150.0),
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


def test_after_a_gap_it_ticks_since_then(tmp_path):
    """Who comes back with the daemon is not taken for one that ticked all the while."""
    for now in (100.0, 400.0, 701.0, 720.0):
        record_tick(tmp_path, "one", now, interval_seconds=600)
    assert last_ticks(tmp_path)["one"].since == 701.0


def test_with_a_full_disk_a_tick_is_not_undone_and_nothing_is_left_behind(tmp_path, monkeypatch, caplog):
    """The work is done; the note alone is missing, and the log says so."""
    record_tick(tmp_path, "one", 100.0)

    def full(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        record_tick(tmp_path, "one", 200.0)
    note_tick(tmp_path, "one", 200.0, interval_seconds=60.0, log=lambda: logging.getLogger("tick"))
    assert "could not be noted" in caplog.text
    assert last_ticks(tmp_path)["one"].at == 100.0
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
