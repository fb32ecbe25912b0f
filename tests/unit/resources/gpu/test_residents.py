"""Records of residents that cannot be believed. Living residents are in tests/faults/resources/vlm/server."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from resources.gpu import residents as module
from resources.gpu.residents import ResidentError, ResidentRecord, Residents, end_residents
from resources.lock_files import taken
from resources.processes import ProcessIdentity

LOG = logging.getLogger("test_residents")


def record(**changes: object) -> ResidentRecord:
    own = ProcessIdentity.of(os.getpid())
    fields = {
        "device": "cpu-0",
        "what": "A server of m",
        "digest": "d",
        "pin": {"OMP_NUM_THREADS": "1"},
        "url": "http://127.0.0.1:1/v1",
        "command": ("serve", "m"),
        "since": "2026-01-01",
        "grace_seconds": 1.0,
        "host": os.uname().nodename,
        "keeper": own,
    }
    return ResidentRecord(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def residents(tmp_path: Path) -> Residents:
    residents = Residents(tmp_path)
    residents.directory.mkdir()
    return residents


def test_a_record_reads_back(residents: Residents) -> None:
    """What is written is what is read, and it says in itself what it is."""
    path = residents.paths("cpu-0").record
    written = record(server=ProcessIdentity(1, 2, "b"), state="ready")
    written.write(path)
    assert ResidentRecord.read(path) == written
    assert "may be deleted" in path.read_text()


def test_a_record_without_a_living_keeper_is_no_resident(residents: Residents) -> None:
    """The lock decides: a record left behind, however true it sounds, is nobody's."""
    record(group=ProcessIdentity.of(os.getpid())).write(residents.paths("cpu-0").record)
    assert residents.of("cpu-0") is None
    assert list(residents.living()) == []
    assert end_residents(residents.directory.parent, LOG) == []


@pytest.mark.parametrize("left_behind", [None, b"", b"[]", b'{"keeper": 3}', b"dead"])
def test_a_keeper_that_says_nothing_is_an_error_not_an_empty_device(
    residents: Residents, left_behind: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds the lock and no record tells who: the device is refused, never taken as empty."""
    monkeypatch.setattr(module, "_SPEAKING_SECONDS", 0.0)
    paths = residents.paths("cpu-0")
    if left_behind == b"dead":
        record(keeper=ProcessIdentity(os.getpid(), -1, "another boot")).write(paths.record)
    elif left_behind is not None:
        paths.record.write_bytes(left_behind)
    lock = taken(paths.keeper)
    assert lock is not None
    try:
        with pytest.raises(ResidentError, match="something lives on cpu-0"):
            residents.make_way("cpu-0", "d", LOG)
    finally:
        lock.close()
    assert not residents.make_way("cpu-0", "d", LOG)


def test_a_home_that_never_had_a_server_is_left_alone(tmp_path: Path) -> None:
    """Without model servers nothing is looked for, and no folder is made."""
    assert not Residents(tmp_path).make_way("cpu-0", None, LOG)
    assert end_residents(tmp_path, LOG) == []
    assert list(tmp_path.iterdir()) == []
