"""Records of loaded servers that cannot be believed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from resources.gpu import GpuResource
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.files.processes import ProcessIdentity
from vlm_engine.devices import loaded_servers as module
from vlm_engine.devices.find import GpuReading
from vlm_engine.devices.leases import LeaseHolder, NoDeviceFreeError
from vlm_engine.devices.loaded_servers import (
    LoadedServerError,
    LoadedServers,
    ServerRecord,
    end_loaded_servers,
)

LOG = logging.getLogger("test_loaded_servers")
HOLDER = LeaseHolder("run", "partition", "step")


def record(**changes: object) -> ServerRecord:
    own = ProcessIdentity.from_pid(os.getpid())
    fields = {
        "device": "cpu-0",
        "what": "A server of m",
        "digest": "d",
        "pin": {"OMP_NUM_THREADS": "1"},
        "variables": {},
        "url": "http://127.0.0.1:1/v1",
        "command": ["serve", "m"],
        "since": "2026-01-01",
        "grace_seconds": 1.0,
        "host": os.uname().nodename,
        "reaper": own,
        "supervisor": own,
    }
    return ServerRecord(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def servers(tmp_path: Path) -> LoadedServers:
    servers = LoadedServers(tmp_path)
    servers.directory.mkdir()
    return servers


def test_a_record_reads_back(servers: LoadedServers) -> None:
    """What is written is what is read, and it says in itself what it is."""
    path = servers.files("cpu-0").record
    written = record(server=ProcessIdentity(1, 2, "b"), state="ready")
    written.write(path)
    assert ServerRecord.read(path) == written
    assert "may be deleted" in path.read_text()


def test_a_record_without_a_living_supervisor_is_no_server(servers: LoadedServers) -> None:
    """The lock decides: a record left behind, however true it sounds, is nobody's."""
    record(server=ProcessIdentity.from_pid(os.getpid())).write(servers.files("cpu-0").record)
    assert servers.living_on("cpu-0") is None
    assert list(servers.living()) == []
    assert end_loaded_servers(servers.directory.parent, LOG) == []


@pytest.mark.parametrize("left_behind", [None, b"", b"[]", b'{"supervisor": 3}', b"dead"])
def test_a_supervisor_that_says_nothing_is_an_error_not_an_empty_device(
    servers: LoadedServers, left_behind: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds the lock and no record tells who: the device is refused, never taken as empty."""
    monkeypatch.setattr(module, "_SPEAKING_SECONDS", 0.0)
    files = servers.files("cpu-0")
    if left_behind == b"dead":
        record(supervisor=ProcessIdentity(os.getpid(), -1, "another boot")).write(files.record)
    elif left_behind is not None:
        files.record.write_bytes(left_behind)
    lock = acquire_lock(files.supervisor)
    assert lock is not None
    try:
        with pytest.raises(LoadedServerError, match="something lives on cpu-0"):
            servers.end_unless("cpu-0", "d", LOG)
    finally:
        lock.close()
    assert not servers.end_unless("cpu-0", "d", LOG)


@pytest.mark.parametrize(
    ("wanted", "sentence"), [("d", None), ("another", "does not end")], ids=["its own", "another's"]
)
def test_the_memory_of_its_own_server_is_not_held_against_a_device(
    servers: LoadedServers, wanted: str, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server fills its GPU: who uses it may lease that GPU; for anybody else it must have ended first."""
    full = GpuReading(0, "GPU-a", "A100", memory_bytes=80 << 30, free_bytes=1 << 30)
    for where in ("resources.gpu.DriverNvml", "vlm_engine.devices.find.DriverNvml"):
        monkeypatch.setattr(where, lambda: SimpleNamespace(readings=lambda: [full]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "_SLACK_SECONDS", 0.0)
    # This process plays the supervisor; told to end, it does not.
    monkeypatch.setattr(ProcessIdentity, "send", lambda *_: True)
    record(device="GPU-a", grace_seconds=0.0, state="ready").write(servers.files("GPU-a").record)
    lock = acquire_lock(servers.files("GPU-a").supervisor)
    assert lock is not None
    gpu = GpuResource(
        leases_directory=str(servers.directory.parent / "leases"), devices="GPU-a", min_free_memory_gib=16.0
    )
    try:
        if sentence is None:
            gpu.leases(server_digest=wanted).acquire(HOLDER, wait_seconds=0, log=LOG).release()
        else:
            with pytest.raises(NoDeviceFreeError, match=sentence):
                gpu.leases(server_digest=wanted).acquire(HOLDER, wait_seconds=0, log=LOG)
    finally:
        lock.close()
    with pytest.raises(NoDeviceFreeError, match=r"16.0 GiB are asked for"):
        gpu.leases(server_digest=wanted).acquire(HOLDER, wait_seconds=0, log=LOG)


def test_a_home_that_never_had_a_server_is_left_alone(tmp_path: Path) -> None:
    """Without model servers nothing is looked for, and no folder is made."""
    assert not LoadedServers(tmp_path).end_unless("cpu-0", None, LOG)
    assert end_loaded_servers(tmp_path, LOG) == []
    assert list(tmp_path.iterdir()) == []
