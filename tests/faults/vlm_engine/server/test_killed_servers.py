"""Fault 18 for a model server of ours: whatever dies, nothing of it is left, and the next lessee goes on.

The server is a small real one, with a child and with a child that left its session.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from resources.gpu import GpuResource
from tests.support.waiting import wait_until
from vlm_durable.files.lock_files import is_held
from vlm_engine.devices import loaded_servers
from vlm_engine.devices.find import Device, find_devices
from vlm_engine.devices.leases import DeviceLeases, LeaseHolder
from vlm_engine.devices.loaded_servers import LoadedServers, ServerRecord, end_loaded_servers
from vlm_engine.protocol import EngineLostError
from vlm_engine.server import owned_server
from vlm_engine.server.model_server import MOST_RESTARTS, ServerDownError, ServerStartError
from vlm_engine.server.owned_server import OwnedServer
from vlm_engine.server.server_plan import ServerPlan

LOG = logging.getLogger("test_killed_servers")
HERE = Path(__file__).parent
DEVICE = find_devices("cpu:1", {})[0]
SOON = 60.0
"""Seconds, for what takes a tenth of one on a quiet machine."""


class Home:
    """A state directory, the stub's folder, and everything that was ever started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / ".state"
        self.servers = LoadedServers(self.state)

    def plan(self, how: str = "serves", **changes: object) -> ServerPlan:
        plan = ServerPlan(self.command(how), "a-model", None, "exact", idle_seconds=60.0, grace_seconds=0.5)
        return replace(plan, **changes)  # type: ignore[arg-type]

    def command(self, how: str = "serves") -> str:
        return f"{sys.executable} -I -S {HERE / 'stub_server.py'} {{port}} {self.folder} {how}"

    def start(self, plan: ServerPlan | None = None, device: Device = DEVICE) -> OwnedServer:
        return OwnedServer(device, plan or self.plan(), state_directory=self.state)

    def record(self, device: str = DEVICE.id) -> ServerRecord:
        record = self.servers.living_on(device)
        assert record is not None
        return record

    def stub_pids(self) -> list[int]:
        """The server, its child, and the child that left."""
        return list(json.loads((self.folder / "pids.json").read_text()))

    def everyone(self, device: str = DEVICE.id) -> list[int]:
        """All living processes of the server that was started last, and of its keeping."""
        record = self.record(device)
        return [record.supervisor.pid, record.reaper.pid, *self.stub_pids()]


def gone(pids: Sequence[int], seconds: float = SOON) -> bool:
    """Whether all processes have ended in time; waits in the kernel."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    return False
            finally:
                os.close(descriptor)
    return True


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    assert end_loaded_servers(home.state, LOG) == []


@pytest.fixture
def lessee(home: Home) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def start(how: str = "serves", idle_seconds: float = 60.0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, HERE / "lessee.py", home.state, home.command(how), str(idle_seconds)],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_server_outlives_its_run_and_is_used_by_the_next(
    home: Home, lessee: Callable[..., subprocess.Popen[str]]
) -> None:
    """A run and its whole process group killed: device free at once, server alive, adopted unchanged."""
    run = lessee()
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    os.killpg(run.pid, signal.SIGINT)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    leases = DeviceLeases(home.state / "leases", [DEVICE])
    with leases.acquire(LeaseHolder("next", "p", "s"), wait_seconds=0, log=LOG):
        server = home.start()
        server.check()
        assert home.stub_pids()[0] == pid
        server.release()


def test_a_killed_supervisor_takes_everything_with_it(home: Home) -> None:
    """SIGKILL of the supervisor: all processes die, one that left the session too; a restart heals."""
    server = home.start()
    record, everyone = home.record(), home.everyone()
    os.kill(record.supervisor.pid, signal.SIGKILL)
    assert gone(everyone)
    with pytest.raises(ServerDownError):
        server.check()
    server.restart("its supervisor was killed")
    server.check()
    assert home.stub_pids()[0] != everyone[2]
    server.release()


@pytest.mark.parametrize("victim", ["server", "reaper"])
def test_a_killed_server_or_reaper_leaves_nothing_and_says_so(home: Home, victim: str) -> None:
    """SIGKILL of the server or of its reaper: the rest dies, the cause and the log's end are told, no key."""
    server = home.start()
    key = server.address.api_key
    everyone, record = home.everyone(), home.record()
    os.kill(everyone[2] if victim == "server" else record.reaper.pid, signal.SIGKILL)
    assert gone(everyone)
    with pytest.raises(ServerDownError) as raised:
        server.check()
    assert ("killed by SIGKILL" if victim == "server" else "reaper was killed") in str(raised.value)
    assert "its first words (key)" in str(raised.value)
    assert key is not None and key not in str(raised.value)
    assert not home.servers.files(DEVICE.id).key.exists()
    server.release()


def test_supervisor_and_reaper_killed_at_once_leave_nothing_to_the_next_lessee(home: Home) -> None:
    """Both protectors killed together: who comes next finds the process group and ends it first."""
    server = home.start()
    record = home.record()
    stub, child, left_session = home.stub_pids()
    # Stopped, neither can act before both are dead.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (record.supervisor.pid, record.reaper.pid):
            os.kill(pid, number)
    assert gone([record.supervisor.pid, record.reaper.pid, stub])
    os.kill(child, 0)
    server.release()
    assert not home.servers.end_unless(DEVICE.id, None, LOG)
    assert gone([child])
    os.kill(left_session, signal.SIGKILL)


def test_a_server_of_two_devices_makes_way_for_a_run_on_one_of_them(home: Home) -> None:
    """Two devices had one server: who leases either alone next finds it ended, and nobody else ends it."""
    both = replace(DEVICE, id="cpu-0+cpu-1")
    home.start(device=both).release()
    everyone = home.everyone(both.id)
    assert not home.servers.end_unless("cpu-2", None, LOG)
    assert home.servers.end_unless(both.id, home.plan().digest, LOG)
    assert not home.servers.end_unless("cpu-1", home.plan().digest, LOG)
    assert gone(everyone)


@pytest.mark.parametrize("stopped", ["supervisor", "reaper"])
def test_a_stopped_supervisor_or_reaper_does_not_keep_the_device(
    home: Home, stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP of either: whoever leases the device next waits for its grace, and then kills it."""
    monkeypatch.setattr(loaded_servers, "_SLACK_SECONDS", 1.0)
    home.start().release()
    everyone = home.everyone()
    os.kill(getattr(home.record(), stopped).pid, signal.SIGSTOP)
    assert not home.servers.end_unless(DEVICE.id, None, LOG)
    assert gone(everyone)


def test_a_run_killed_while_the_server_starts_leaves_it_to_idle_away(
    home: Home, lessee: Callable[..., subprocess.Popen[str]]
) -> None:
    """SIGKILL of the lessee during start-up: the server that nobody waits for ends when it has been idle."""
    run = lessee("hangs", idle_seconds=0.2)
    wait_until((home.folder / "pids.json").exists, "the file", seconds=SOON)
    everyone = home.everyone()
    run.kill()
    assert gone(everyone)
    record = ServerRecord.read(home.servers.files(DEVICE.id).record)
    assert record is not None and "nobody used it" in record.why


def test_a_start_is_waited_for_by_whoever_comes_next(
    home: Home, lessee: Callable[..., subprocess.Popen[str]]
) -> None:
    """SIGKILL of the lessee right after its supervisor began: the next one waits for the same server."""
    run = lessee()
    wait_until(home.servers.files(DEVICE.id).record.exists, "the file", seconds=SOON)
    supervisor = home.record().supervisor
    run.kill()
    server = home.start()
    assert home.record().supervisor == supervisor
    server.check()
    server.release()


def test_a_server_that_does_not_come_up_is_an_error_and_leaves_nothing(home: Home) -> None:
    """Bounded start-up: a server that exits, hangs or is not installed is told with cause and log's end."""
    (home.folder / "broken").touch()
    with pytest.raises(ServerStartError, match=r"(?s)exit code 3.*its first words \(key\)"):
        home.start()
    (home.folder / "broken").unlink()
    with pytest.raises(ServerStartError, match="not ready within 0 s"):
        home.start(home.plan("hangs", start_seconds=0.2))
    assert gone(home.stub_pids())
    with pytest.raises(ServerStartError, match="there is no program no-such-program"):
        home.start(home.plan(command="no-such-program --port {port}"))


def test_a_server_with_a_key_of_its_own_is_told_at_once(home: Home) -> None:
    """A server that takes another key than ours will not come round: it is said now, not in 20 minutes."""
    with pytest.raises(ServerStartError, match=r"does not take our key \(401\).*VLLM_API_KEY.*--api-key"):
        home.start(home.plan("keyed", start_seconds=SOON))
    assert gone(home.stub_pids())


THIEF = """
import os, socket
if os.geteuid() == 0:
    os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection = listener.accept()[0]
    print(connection.recv(65536), flush=True)
    connection.sendall(b"HTTP/1.1 401 No\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""


def test_a_port_that_another_user_took_gets_no_key(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's process took the chosen port: the start ends by name, and it was sent not a byte.

    Only root can become another user; else it is told by its answer.
    """
    root = os.geteuid() == 0
    thief = subprocess.Popen([sys.executable, "-I", "-S", "-c", THIEF], stdout=subprocess.PIPE, text=True)
    assert thief.stdout is not None
    try:
        port = int(thief.stdout.readline())
        monkeypatch.setattr(owned_server, "_free_port", lambda: port)
        said = "another user answers at its port" if root else "does not take our key"
        with pytest.raises(ServerStartError, match=said):
            home.start(home.plan("hangs", start_seconds=SOON))
    finally:
        thief.kill()
        got, _ = thief.communicate()
    assert not root or set(got.split()) <= {"b''"}


def test_a_supervisor_killed_while_the_server_starts_is_an_error_and_leaves_nothing(home: Home) -> None:
    """SIGKILL of the supervisor during start-up ends the wait for it."""
    pid = os.fork()
    if pid == 0:
        try:
            wait_until((home.folder / "pids.json").exists, "the file", seconds=SOON)
            os.kill(home.record().supervisor.pid, signal.SIGKILL)
        finally:
            os._exit(0)
    with pytest.raises(ServerStartError, match="its supervisor is gone"):
        home.start(home.plan("hangs"))
    os.waitpid(pid, 0)
    assert gone(home.stub_pids())


def test_an_idle_server_ends_and_the_next_lessee_gets_a_new_one(home: Home) -> None:
    """Nobody uses it for the time set: it ends by itself; whoever waits meanwhile starts anew."""
    server = home.start(home.plan("deaf", idle_seconds=0.1))
    everyone = home.everyone()
    server.release()
    lessee_lock = home.servers.files(DEVICE.id).lessee
    wait_until(lambda: is_held(lessee_lock), "the supervisor has the lock", seconds=SOON)
    # Deaf to SIGTERM, it is still being ended: the supervisor has the lock, and the next lessee waits for it.
    again = home.start(home.plan("deaf", idle_seconds=60.0))
    assert gone(everyone, 0.0)
    again.check()
    again.release()


def test_another_model_or_argument_is_not_adopted(home: Home) -> None:
    """A server of another model, revision, weights or argument is ended; the lessee gets its own."""
    server = home.start()
    server.release()
    before = home.everyone()
    other = home.start(home.plan(exact="other weights"))
    assert gone(before, 0.0)
    other.check()
    other.release()


def test_a_server_that_is_pinned_otherwise_or_knows_another_key_is_not_adopted(home: Home) -> None:
    """Other threads, or an answer that is not ours: the server is ended, and a new one started."""
    home.start().release()
    before = home.everyone()
    home.servers.files(DEVICE.id).key.write_text("another")
    home.start().release()
    assert gone(before, 0.0)
    before = home.everyone()
    home.start(device=replace(DEVICE, visible="7")).release()
    assert gone(before, 0.0)


def test_a_server_with_another_environment_is_not_adopted(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable that was set, changed or taken back makes another server; its value is told to nobody."""
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    home.start().release()
    before = home.everyone()
    monkeypatch.setenv("SSH_TTY", "/dev/pts/7")
    home.start().release()
    assert home.everyone() == before
    assert "hunter2" not in home.servers.files(DEVICE.id).record.read_text()
    for change in (
        lambda: monkeypatch.setenv("HF_TOKEN", "hunter3"),
        lambda: monkeypatch.setenv("VLLM_USE_V1", "1"),
        lambda: monkeypatch.delenv("VLLM_USE_V1"),
    ):
        change()
        with caplog.at_level(logging.INFO, "vlm_engine.server"):
            home.start().release()
        assert gone(before, 0.0)
        before = home.everyone()
    told = [one for one in caplog.messages if "its environment is another" in one]
    assert [("HF_TOKEN" in one, "VLLM_USE_V1" in one) for one in told] == [
        (True, False), (False, True), (False, True),
    ]  # fmt: skip
    assert "hunter" not in caplog.text


def test_restarts_are_counted_and_end_by_name(home: Home) -> None:
    """After three new starts in one materialization the engine is lost, with the log's end in the message."""
    server = home.start()
    (home.folder / "broken").touch()
    for _ in range(MOST_RESTARTS):
        with pytest.raises(ServerStartError, match=r"(?s)exit code 3.*its first words"):
            server.restart("for the test")
    with pytest.raises(EngineLostError, match=r"(?s)3 times.*for the test.*its first words"):
        server.restart("for the test")
    server.release()


def test_a_new_start_that_finds_no_room_ends_the_run_by_name(home: Home) -> None:
    """A full disk or a refused file is everyone's trouble: an interruption, and no property's failure."""
    server = home.start()
    home.servers.files(DEVICE.id).log.with_suffix(".log.1").mkdir()  # the old log cannot be put aside
    with pytest.raises(EngineLostError, match=r"cannot be started anew: .*Is a directory"):
        server.restart("for the test")
    server.release()


def test_the_key_is_nobody_elses(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is in the server's environment and a private file, on no command line; our secrets stay out."""
    monkeypatch.setenv("VLM_ASSETS_ALERT_TARGETS", "secret")
    server = home.start()
    key = server.address.api_key
    paths = home.servers.files(DEVICE.id)
    assert key is not None and paths.key.read_text() == key
    assert [path.stat().st_mode & 0o77 for path in (paths.key, paths.log, paths.key.parent)] == [0, 0, 0]
    for pid in home.everyone():
        assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    environment = json.loads((home.folder / "environment.json").read_text())
    assert environment["VLLM_API_KEY"] == key
    assert (environment["CUDA_VISIBLE_DEVICES"], "VLM_ASSETS_ALERT_TARGETS" in environment) == ("", False)
    assert key not in repr(server.address) + paths.record.read_text()
    server.release()


def test_the_end_of_all_spares_what_is_in_use(home: Home) -> None:
    """Shutting down ends idle servers, a deaf one after its grace, and names those that are still used."""
    slots = find_devices("cpu:2", {})
    idle, used = home.start(home.plan("deaf"), slots[0]), home.start(device=slots[1])
    idle.release()
    staying = end_loaded_servers(home.state, LOG)
    assert len(staying) == 1
    assert staying[0].startswith("cpu-1 is in use: A server of a-model lives there")
    assert [record.device for record in home.servers.living()] == ["cpu-1"]
    used.check()
    used.release()


def test_a_lessee_gets_the_device_where_its_server_lives_and_ends_others(home: Home) -> None:
    """The lease prefers a fitting server's device, whose memory is the lessee's; any other makes way."""
    gpu = GpuResource(leases_directory=str(home.state / "leases"), devices="cpu:2")
    slots = gpu.find()
    home.start(device=slots[1]).release()
    before = home.everyone(slots[1].id)
    holder = LeaseHolder("run", "p", "s")
    with gpu.leases(server_digest=home.plan().digest).acquire(holder, wait_seconds=0, log=LOG) as lease:
        assert lease.device.id == "cpu-1"
        assert not gone(before[:1], 0.0)
    with (
        gpu.leases().acquire(holder, wait_seconds=0, log=LOG) as lease,
        gpu.leases().acquire(holder, wait_seconds=0, log=LOG) as other,
    ):
        assert (lease.device.id, other.device.id) == ("cpu-0", "cpu-1")
        assert gone(before, 0.0)


def test_a_record_that_was_removed_or_damaged_is_written_again(home: Home) -> None:
    """A lost record does not hide a living server: its supervisor writes it again, and it is adopted."""
    home.start().release()
    before = home.everyone()
    record = home.servers.files(DEVICE.id).record
    for lose in (record.unlink, lambda: record.write_text("{")):
        lose()
        home.start().release()
        assert home.everyone() == before
