"""The lines on disk: durable, whole, and never run into each other."""

import errno
import json
import os
import random

import pytest

from resources.alerts.alert_log import LINES, AlertLog, AlertLogError


@pytest.fixture
def log(tmp_path) -> AlertLog:
    return AlertLog(tmp_path / "alerts")


def append(log, *entries):
    with log.locked():
        log.append(entries)


def read(log, since=None):
    with log.locked():
        return log.read(since)


def test_a_position_reads_on_from_there(log):
    """What was read is not read again: a look costs what is new."""
    append(log, {"event": "a"}, {"event": "b"})
    first = read(log)
    append(log, {"event": "c"})
    assert [one["event"] for one in first.entries] == ["file", "a", "b"][1:]
    assert [one["event"] for one in read(log, first.end).entries] == ["c"]


def test_every_line_is_json_for_people_and_their_tools(log):
    """The file is what it is called: JSON, a line each, whatever is in the texts."""
    append(log, {"event": "a", "text": 'ümlaut \n newline "quoted" \udcff ,"seal":"0123456789abcdef"}'})
    lines = log.path.read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 2
    assert read(log).damaged == 0
    assert len(read(log).entries) == 1


@pytest.mark.parametrize("cut", range(1, 60, 3))
def test_a_torn_last_line_is_passed_over_and_never_runs_into_the_next(log, cut):
    """A power cut or a kill in the middle of a write: the lines before and after it are whole."""
    append(log, {"event": "before"})
    whole = log.path.read_bytes()
    append(log, {"event": "torn", "text": "x" * 40})
    torn = log.path.read_bytes()[: len(whole) + cut]
    log.path.write_bytes(torn)
    position = read(log).end
    append(log, {"event": "after"})
    found = read(log)
    assert [one["event"] for one in found.entries] == ["before", "after"]
    assert found.damaged == 0
    assert [one["event"] for one in read(log, position).entries] == ["after"]


def test_every_flipped_bit_costs_one_line_and_is_counted(log):
    """A damaged line is never taken for another alert; the others are read."""
    append(log, *({"event": "e", "number": number} for number in range(5)))
    whole = log.path.read_bytes()
    start = whole.index(b"\n") + 1
    choose = random.Random(1)
    for _ in range(300):
        data = bytearray(whole)
        data[choose.randrange(start, len(whole))] ^= 1 << choose.randrange(8)
        log.path.write_bytes(data)
        numbers = [one["number"] for one in read(log).entries]
        assert numbers == sorted(set(numbers) & set(range(5)))
        assert len(numbers) >= 3


def test_a_failed_write_promises_nothing_and_leaves_nothing(log, monkeypatch):
    """After an error of fsync the lines are gone: the same ones are then written anew, not called known."""
    append(log, {"event": "before"})
    whole = log.path.read_bytes()

    def failing(_):
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        with pytest.raises(AlertLogError, match="Make room"):
            append(log, {"event": "lost"})
    assert log.path.read_bytes() == whole
    append(log, {"event": "after"})
    assert [one["event"] for one in read(log).entries] == ["before", "after"]


def test_a_new_file_keeps_the_old_one_and_is_read_from_its_start(log):
    """A long file is put aside whole; a reader of the old one finds the new one's lines, all of them."""
    append(log, {"event": "old"})
    position = read(log).end
    with log.locked():
        log.start_anew([{"event": "carried"}])
    append(log, {"event": "new"})
    assert [one["event"] for one in read(log, position).entries] == ["carried", "new"]
    assert b'"old"' in (log.directory / "alerts.1.jsonl").read_bytes()
    assert log.path.name == LINES
