"""Leases within one process: who gets what, what is said while waiting, what is refused.

What happens when processes die is in tests/faults.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from resources.gpu import GpuResource
from resources.text_embedding import TextEmbeddingModel
from resources.vision_language_model import VisionLanguageModel
from vlm_durable.files.files import temporary_name
from vlm_durable.files.lock_files import LockFile
from vlm_durable.files.processes import process_start
from vlm_engine.devices.find import Device, DeviceError, GpuReading, find_devices, grouped
from vlm_engine.devices.leases import (
    DeviceLeases,
    Lease,
    LeaseDirectoryError,
    LeaseHolder,
    LeaseRecord,
    NoDeviceFreeError,
    refuse_another_gpu,
)

LOG = logging.getLogger("test_leases")
ALICE = LeaseHolder("run-alice", "000000000-000000999", "property_descriptions")
BOB = LeaseHolder("run-bob", "000001000-000001999", "property_embeddings")


class SimulatedClock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def slots(tmp_path: Path) -> DeviceLeases:
    return DeviceLeases(tmp_path / "leases", find_devices("cpu:2", {}))


@pytest.fixture
def both_taken(slots: DeviceLeases) -> Iterator[DeviceLeases]:
    with slots.acquire(ALICE, wait_seconds=0, log=LOG), slots.acquire(BOB, wait_seconds=0, log=LOG):
        yield slots


def test_a_leased_device_knows_how_many_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a node of a cluster, where a run is shown its own GPU alone."""
    gpus = [GpuReading(number, f"GPU-{number}", "A100", 80 << 30, 80 << 30) for number in range(4)]
    for where in ("resources.gpu.DriverNvml", "vlm_engine.devices.find.DriverNvml"):
        monkeypatch.setattr(where, lambda: SimpleNamespace(readings=lambda: gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = GpuResource(str(tmp_path / "leases"), devices="0,1")
    with machine.leases().acquire(ALICE, wait_seconds=0, log=LOG) as lease:
        assert lease.device.at_once == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3")
    monkeypatch.setenv("VLM_RAY_RUN", "run")
    node = GpuResource(str(tmp_path / "leases"), node="n")
    with node.leases().acquire(BOB, wait_seconds=0, log=LOG) as lease:
        assert (lease.device.id, lease.device.at_once) == ("GPU-3", 4)


def test_two_holders_get_two_devices_and_a_third_none(slots: DeviceLeases) -> None:
    """No device is leased twice, and a released one is there again."""
    first = slots.acquire(ALICE, wait_seconds=0, log=LOG)
    second = slots.acquire(BOB, wait_seconds=0, log=LOG)
    assert {first.device.id, second.device.id} == {"cpu-0", "cpu-1"}
    with pytest.raises(NoDeviceFreeError):
        slots.acquire(BOB, wait_seconds=0, log=LOG)
    first.release()
    first.release()
    assert not first.held
    with slots.acquire(BOB, wait_seconds=0, log=LOG) as third:
        assert third.device == first.device


def test_a_wait_says_who_holds_at_once_then_each_minute_and_lasts_as_long_as_they_work(
    both_taken: DeviceLeases, caplog: pytest.LogCaptureFixture
) -> None:
    """The run that is prepared for the next device waits for hours; its limit counts once nobody works."""
    clock, asked = SimulatedClock(), []

    def they_work(holders: Collection[str]) -> bool:
        asked.append(holders)
        return clock.now < 1600

    with caplog.at_level(logging.INFO), pytest.raises(NoDeviceFreeError, match="within 600 s") as raised:
        both_taken.acquire(ALICE, wait_seconds=600, log=LOG, clock=clock, will_be_free=they_work)
    assert asked[0] == {"run-alice", "run-bob"}
    assert clock.now == pytest.approx(2200, abs=1)
    notices = [record.message for record in caplog.records if "No device is free" in record.message]
    assert len(notices) == 20
    at_work, limited = notices[:10], notices[10:]
    assert all("waiting until one is." in notice for notice in at_work)
    seconds = [int(re.findall(r"up to (\d+) s", notice)[0]) for notice in limited]
    assert seconds == pytest.approx(range(600, 0, -60), abs=1)
    assert f"cpu-0 is held by run run-alice (partition {ALICE.partition}, {ALICE.step})" in notices[0]
    assert (
        f"cpu-1 is held by run run-bob (partition {BOB.partition}, {BOB.step}), pid {os.getpid()}"
        in (notices[0])
    )
    assert "cpu-0 is held by run run-alice" in str(raised.value)


def test_a_run_of_another_home_counts_as_at_work(slots: DeviceLeases) -> None:
    """Its heartbeats are in its own home, which ends it if it hangs: a wait for it is no failure."""
    clock, others = SimulatedClock(), [replace(holder, home="/houses/.state") for holder in (ALICE, BOB)]
    with (
        slots.acquire(others[0], wait_seconds=0, log=LOG),
        slots.acquire(others[1], wait_seconds=0, log=LOG) as second,
    ):

        def nobody_works_here(_: Collection[str]) -> bool:
            if clock.now > 1030:
                second.release()
            return False

        own = LeaseHolder("run-carol", "k", "s", "/flats/.state")
        with slots.acquire(
            own, wait_seconds=10, log=LOG, clock=clock, will_be_free=nobody_works_here
        ) as lease:
            assert lease.device == second.device
            assert "(partition k, s) of /flats/.state, pid" in slots.holders()[1].sentence()


def test_a_record_of_format_1_is_read(slots: DeviceLeases) -> None:
    """It names no home, and counts as the reader's own."""
    with slots.acquire(ALICE, wait_seconds=0, log=LOG):
        path = slots.directory / "cpu-0.json"
        fields = json.loads(path.read_bytes())
        del fields["holder"]["home"]
        path.write_text(json.dumps(fields | {"format": 1}))
        (held,) = slots.holders()
        assert held.record is not None
        assert held.record.holder == ALICE
        assert held.record.holder.is_of("/flats/.state")


def test_without_patience_who_finds_no_device_is_told_who_has_it(both_taken: DeviceLeases) -> None:
    """With a limit of 0 nobody waits, though a device is at work; nor does a person's command for hours."""
    with pytest.raises(NoDeviceFreeError, match="cpu-0 is held by run run-alice"):
        both_taken.acquire(ALICE, wait_seconds=0, log=LOG, will_be_free=lambda _: True)
    clock = SimulatedClock()
    with pytest.raises(NoDeviceFreeError, match="cpu-1 is held by run run-bob"):
        both_taken.acquire(ALICE, wait_seconds=600, log=LOG, clock=clock)
    assert clock.now == 1600


def test_a_device_that_comes_free_ends_the_wait(slots: DeviceLeases) -> None:
    """A waiting run goes on soon after a device is freed."""

    class FreesAfter42Seconds(SimulatedClock):
        def sleep(self, seconds: float, /) -> None:
            super().sleep(seconds)
            if self.now >= 1042:
                second.release()

    clock = FreesAfter42Seconds()
    with slots.acquire(ALICE, wait_seconds=0, log=LOG):
        second = slots.acquire(BOB, wait_seconds=0, log=LOG)
        with slots.acquire(ALICE, wait_seconds=600, log=LOG, clock=clock) as lease:
            assert lease.device == second.device
            assert 1042 <= clock.now <= 1043


def test_a_refused_device_is_passed_over_and_taken_when_it_is_well(tmp_path: Path) -> None:
    """A sick device gives its place to the next; while nothing else is free it is looked at again."""
    sick = {"cpu-0": ["cpu-0 is too hot."]}
    leases = DeviceLeases(tmp_path, find_devices("cpu:2", {}), lambda device: sick.get(device.id, []))
    with leases.acquire(ALICE, wait_seconds=0, log=LOG) as lease:
        assert lease.device.id == "cpu-1"
        with pytest.raises(NoDeviceFreeError, match=r"cpu-1 is held by run run-alice.*cpu-0 is too hot"):
            leases.acquire(BOB, wait_seconds=0, log=LOG)
        sick.clear()
        with leases.acquire(BOB, wait_seconds=0, log=LOG) as spare:
            assert spare.device.id == "cpu-0"


def test_a_given_device_is_taken_with_its_troubles_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cluster's choice is not judged, but what NVML has against it stands in the log."""
    given = Device("GPU-a", "cuda", "A100", None, "0", given=True)
    leases = DeviceLeases(tmp_path, [given], lambda _: ["GPU-a needs a reset, says its driver."])
    with leases.acquire(ALICE, wait_seconds=0, log=LOG) as lease:
        assert lease.device == given
    assert "taken as it is. GPU-a needs a reset" in caplog.text


def test_a_health_check_that_fails_frees_the_device(tmp_path: Path) -> None:
    """An error while a device is judged does not leave it locked."""

    def broken(_: Device) -> list[str]:
        raise RuntimeError("no answer")

    devices = find_devices("cpu:1", {})
    with pytest.raises(RuntimeError):
        DeviceLeases(tmp_path, devices, broken).acquire(ALICE, wait_seconds=0, log=LOG)
    with DeviceLeases(tmp_path, devices).acquire(ALICE, wait_seconds=0, log=LOG) as lease:
        assert lease.held


def test_the_record_says_who_for_people(slots: DeviceLeases) -> None:
    """Beside a held lock stands who holds it: process, run, partition, step; it goes with the lease."""
    with slots.acquire(ALICE, wait_seconds=0, log=LOG) as lease:
        path = slots.directory / "cpu-0.json"
        written = json.loads(path.read_text())
        assert written["holder"] == {
            "run_id": "run-alice",
            "partition": ALICE.partition,
            "step": "property_descriptions",
            "home": "",
        }
        assert (written["pid"], written["process_start"]) == (os.getpid(), process_start(os.getpid()))
        assert "may be deleted" in written["about"]
        lease.hand_to(BOB, LOG)
        (held,) = slots.holders()
        assert held.record is not None
        assert held.record.holder == BOB
    assert not path.exists()
    assert slots.holders() == []


@pytest.mark.parametrize("left_behind", [None, b"", b"[]", b'{"holder": 3}', b"dead"])
def test_a_record_is_never_believed_over_the_lock(slots: DeviceLeases, left_behind: bytes | None) -> None:
    """A record of a dead process, a torn one or none: the lock alone says held or free."""
    slots.acquire(ALICE, wait_seconds=0, log=LOG).release()
    record = slots.directory / "cpu-0.json"
    if left_behind == b"dead":
        LeaseRecord("cpu-0", ALICE, os.getpid(), -1, os.uname().nodename, "yesterday").write(record)
    elif left_behind is not None:
        record.write_bytes(left_behind)
    assert slots.holders() == []
    lock = os.open(slots.directory / "cpu-0.lock", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (held,) = slots.holders()
        assert held.sentence() == "cpu-0 is held by a process that has not said who it is."
    finally:
        os.close(lock)
    with slots.acquire(BOB, wait_seconds=0, log=LOG) as lease:
        assert lease.device.id == "cpu-0"


def test_what_killed_holders_left_of_their_records_goes(slots: DeviceLeases) -> None:
    """The next holder removes it, and nothing of another device, whose holder may be writing."""
    slots.directory.mkdir()
    left_behind, of_another = (temporary_name(slots.directory / f"cpu-{slot}.json") for slot in range(2))
    left_behind.touch()
    of_another.touch()
    with slots.acquire(ALICE, wait_seconds=0, log=LOG) as lease:
        assert lease.device.id == "cpu-0"
        assert not left_behind.exists()
        assert of_another.exists()


def test_a_record_that_cannot_be_written_costs_no_lease(
    slots: DeviceLeases, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes the note for people, not the device."""

    def full(path: Path, data: bytes) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vlm_engine.devices.leases.write_replacing", full)
    with slots.acquire(ALICE, wait_seconds=0, log=LOG):
        assert len(slots.holders()) == 1
    assert "No space left" in caplog.text


def test_a_file_system_without_locks_is_refused(slots: DeviceLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where flock lets everyone pass (some network mounts) no device is handed out at all."""
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    with pytest.raises(LeaseDirectoryError, match="does not keep locks"):
        slots.acquire(ALICE, wait_seconds=0, log=LOG)


def test_a_file_system_that_cannot_lock_is_refused(
    slots: DeviceLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount whose flock fails is named, with what to do."""

    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(LeaseDirectoryError, match="put them on a local disk"):
        slots.acquire(ALICE, wait_seconds=0, log=LOG)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A wrong directory ends by name."""
    (tmp_path / "file").write_text("")
    leases = DeviceLeases(tmp_path / "file" / "leases", find_devices("cpu:1", {}))
    with pytest.raises(LeaseDirectoryError, match="name another directory"):
        leases.acquire(ALICE, wait_seconds=0, log=LOG)


def test_ids_that_are_no_file_names_are_leased_too(tmp_path: Path) -> None:
    """MIG ids of older drivers hold slashes."""
    device = Device("MIG-GPU-a/1/0", "cuda", "A100 MIG", None, "MIG-GPU-a/1/0")
    with DeviceLeases(tmp_path, [device]).acquire(ALICE, wait_seconds=0, log=LOG) as lease:
        assert lease.device == device
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "MIG-GPU-a%2F1%2F0.json",
            "MIG-GPU-a%2F1%2F0.lock",
        ]


GPUS = [Device(f"GPU-{at}", "cuda", "H100", None, f"GPU-{at}") for at in range(4)]


def test_two_for_one_model_are_leased_together_or_not_at_all(tmp_path: Path) -> None:
    """One of them is held: the other stays free for others, and who holds the one is named."""
    singles, pairs = DeviceLeases(tmp_path, GPUS[:2]), DeviceLeases(tmp_path, grouped(GPUS[:2], 2))
    for held in (0, 1):
        with DeviceLeases(tmp_path, [GPUS[held]]).acquire(ALICE, wait_seconds=0, log=LOG):
            with pytest.raises(NoDeviceFreeError, match=r"GPU-0\+GPU-1 is held by run run-alice"):
                pairs.acquire(BOB, wait_seconds=0, log=LOG)
            with singles.acquire(BOB, wait_seconds=0, log=LOG) as other:
                assert other.device == GPUS[1 - held]
    with pairs.acquire(BOB, wait_seconds=0, log=LOG) as both:
        assert both.device.visible == "GPU-0,GPU-1"
        assert [one.device.id for one in singles.holders()] == ["GPU-0", "GPU-1"]
        assert pairs.lock_path(both.device).name == "GPU-0.lock"
        with pytest.raises(NoDeviceFreeError):
            singles.acquire(ALICE, wait_seconds=0, log=LOG)
    assert singles.holders() == []


def test_runs_that_each_want_two_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Six runs at once on four GPUs, two for each: all of them get theirs, one after the other."""
    done = []

    def run(number: int) -> None:
        leases = DeviceLeases(tmp_path, grouped(GPUS, 2))
        with leases.acquire(ALICE, wait_seconds=60, log=LOG) as lease:
            done.append(lease.device.id)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(done) == 6
    assert set(done) <= {"GPU-0+GPU-1", "GPU-2+GPU-3"}


@pytest.mark.parametrize(
    ("leased", "computed_on", "refused"),
    [
        ("GPU-aa", ["aa"], False),
        ("GPU-aa", ["GPU-aa"], False),
        ("GPU-aa", ["bb"], True),
        ("GPU-aa", ["aa", "bb"], True),
        ("GPU-aa+GPU-bb", ["aa", "bb"], False),
        ("MIG-aa", ["bb"], False),
        ("given-17-0", ["bb"], False),
        ("GPU-aa", [None], False),
        ("cpu-0", ["bb"], False),
    ],
)
def test_torch_computes_on_what_is_leased(
    monkeypatch: pytest.MonkeyPatch, leased: str, computed_on: list[str | None], refused: bool
) -> None:
    """Where a container shows this process another GPU, two runs would share one: refused before a row."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(computed_on),
        get_device_properties=lambda at: SimpleNamespace(uuid=computed_on[at]),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    device = Device(leased, "cpu" if leased == "cpu-0" else "cuda", "A100", None, leased)
    with pytest.raises(DeviceError, match="Nothing was described") if refused else nullcontext():
        refuse_another_gpu(device)


@pytest.mark.parametrize("kind", ["describer", "embedder"])
def test_nothing_is_loaded_on_another_gpu(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Both models compare as soon as torch has a GPU."""
    monkeypatch.setattr("vlm_engine.transformers.transformers_engine.TransformersEngine", Mock())
    monkeypatch.setattr("resources.text_embedding.TextEmbedder", Mock())
    properties = SimpleNamespace(uuid="bb")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda at: properties)
    device = Device("GPU-aa", "cuda", "A100", None, "GPU-aa")
    with pytest.raises(DeviceError, match="GPU-aa is leased, and torch computes on GPU-bb"):
        if kind == "describer":
            VisionLanguageModel("m").load(device, schema=Mock(), prompt=Mock())
        else:
            TextEmbeddingModel("m").load(device)


def test_the_next_holders_record_is_never_taken_away(
    slots: DeviceLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes the device in the instant in which it is given back is named from then on."""
    lease = slots.acquire(ALICE, wait_seconds=0, log=LOG)
    close = LockFile.close
    later: list[Lease] = []

    def closed_and_taken(file: LockFile) -> None:
        close(file)
        if not later:
            monkeypatch.undo()
            later.append(slots.acquire(BOB, wait_seconds=0, log=LOG))

    monkeypatch.setattr(LockFile, "close", closed_and_taken)
    lease.release()
    (bob,) = later
    (held,) = slots.holders()
    assert (held.device, held.record and held.record.holder) == (bob.device, BOB)
    bob.release()


def test_a_device_comes_free_though_the_note_cannot_be_removed(
    slots: DeviceLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sick disk, or a folder that is read-only now, keeps a note for people, and no device."""
    lease = slots.acquire(ALICE, wait_seconds=0, log=LOG)

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        lease.release()
    assert not lease.held
    assert slots.holders() == []
    with slots.acquire(BOB, wait_seconds=0, log=LOG) as next_lease:
        assert next_lease.device.id == "cpu-0"
