"""Devices left out: two failures within a day, durable, until a person takes them back."""

import logging

import pytest

from resources.gpu import GpuResource
from vlm_durable.state.database import ControlState
from vlm_engine.devices import leases
from vlm_engine.devices.find import DeviceError
from vlm_engine.devices.leases import LeaseHolder, NoDeviceFreeError
from vlm_engine.devices.left_out import WITHIN_SECONDS, LeftOutDevices, at_work_on, device_failure
from vlm_engine.protocol import EngineLostError

LOG = logging.getLogger("test")
LOST = RuntimeError("CUDA error: unspecified launch failure")


class Clock:
    """Seconds that stand still until they are moved."""

    now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def left_out(tmp_path, clock):
    return LeftOutDevices(ControlState(tmp_path / ".state"), clock)


def gpu(folder, devices="cpu:2", wait_seconds=0):
    return GpuResource(leases_directory=str(folder / "leases"), devices=devices, wait_seconds=wait_seconds)


def test_the_second_failure_leaves_a_device_out(left_out):
    """One failure may be chance; the second, of another run, is the device."""
    assert not left_out.note_failure("GPU-1", occurrence="r1", why="It fell off the bus.")
    assert not left_out.note_failure("GPU-1", occurrence="r1", why="It fell off the bus.")
    assert not left_out.left_out()
    assert left_out.note_failure("GPU-1", occurrence="r2", why="It fell off the bus.")
    sentence = left_out.left_out()["GPU-1"].sentence("GPU-1")
    assert "It fell off the bus." in sentence
    assert "--take-back GPU-1" in sentence
    assert not left_out.note_failure("GPU-1", occurrence="r3", why="Again."), "told once"


def test_what_is_known_is_not_written_again(left_out):
    """A sick device is noted at each look, for hours: each write would be a copy of the whole database."""
    left_out.note_failure("GPU-1", occurrence="sick since 1", why="It throttles.")

    def copies():
        folder = left_out.state.directory / "copies"
        return sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())

    before = copies()
    left_out.note_failure("GPU-1", occurrence="sick since 1", why="It throttles.")
    assert copies() == before


def test_failures_a_day_apart_are_chance(left_out, clock):
    """Weeks of work must not add up to a device left out."""
    left_out.note_failure("GPU-1", occurrence="r1", why="a")
    clock.now += WITHIN_SECONDS + 1
    assert not left_out.note_failure("GPU-1", occurrence="r2", why="b")


def test_an_occurrence_counts_anew_after_a_day(left_out, clock):
    """A partition that hung on it days ago and hangs again is one of today's failures."""
    left_out.note_failure("GPU-1", occurrence="a/k1", why="a")
    clock.now += WITHIN_SECONDS + 1
    assert not left_out.note_failure("GPU-1", occurrence="a/k1", why="b")
    assert left_out.note_failure("GPU-1", occurrence="a/k2", why="c")


def test_a_person_takes_a_device_back(left_out):
    """Its failures are forgotten with it, so that the next one does not leave it out at once."""
    for run in "12":
        left_out.note_failure("GPU-1", occurrence=run, why="a")
    left_out.take_back("GPU-1")
    assert not left_out.records()
    with pytest.raises(DeviceError, match="GPU-2"):
        left_out.take_back("GPU-2")


def test_the_others_take_over(tmp_path):
    """A device that failed once comes last, one that failed at two partitions is passed over."""
    resource = gpu(tmp_path)
    for partition in ("k1", "k2"):
        _lose(resource, partition)
        assert [device.id for device in resource.leases().devices] == ["cpu-1", "cpu-0"]
    holder = LeaseHolder("r3", "k", "s")
    with resource.leases().acquire(holder, wait_seconds=0, log=LOG) as lease:
        assert lease.device.id == "cpu-1"
        with pytest.raises(Exception, match="cpu-0 is left out since it failed 2 times"):
            resource.leases().acquire(holder, wait_seconds=0, log=LOG)


def test_the_retries_of_one_partition_leave_no_device_out(tmp_path):
    """Nor together with a worker of it that had to be killed: one partition is one failure, in any run."""
    resource = gpu(tmp_path)
    _lose(resource, "k1")
    _lose(resource, "k1")
    resource.left_out_devices().note_failure("cpu-0", occurrence=at_work_on("a", "k1"), why="stood still")
    assert not resource.left_out_devices().left_out()
    assert len(resource.left_out_devices().records()["cpu-0"].failures) == 1


def _lose(resource, partition):
    first = resource.find()[0]
    with pytest.raises(EngineLostError), resource.blame(first, asset="a", partition=partition, log=LOG):
        raise EngineLostError("the device is lost") from LOST


@pytest.fixture
def none_leased(monkeypatch):
    """A process that holds no device yet and is as it was afterwards."""
    monkeypatch.setattr(leases, "_lease", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as before")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def why_all_left_out(resource):
    for run in "12":
        resource.left_out_devices().note_failure("cpu-0", occurrence=run, why="It is lost.")
    return resource


def test_all_left_out_is_said_with_the_way_back(tmp_path, none_leased):
    """Not as if others held the devices: nobody will give one back by itself."""
    resource = why_all_left_out(gpu(tmp_path, "cpu:1"))
    with pytest.raises(NoDeviceFreeError, match=r"No device is left.*It is lost.*--take-back cpu-0"):
        resource.lease(run_id="r", partition="k", step="s", log=LOG)


def test_a_run_that_waits_uses_the_device_that_is_taken_back(tmp_path, none_leased):
    """A person takes it back and the runs that wait go on; they have not run through the queue."""
    resource = why_all_left_out(gpu(tmp_path, "cpu:1", wait_seconds=60))
    said = []

    class Person(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
            if "No device is free; waiting" in said[-1]:
                resource.left_out_devices().take_back("cpu-0")

    log = logging.Logger("waiting")
    log.addHandler(Person())
    with resource.lease(run_id="r", partition="k", step="s", log=log) as lease:
        assert lease.device.id == "cpu-0"
    assert "--take-back cpu-0" in said[0]


@pytest.mark.parametrize(
    ("error", "its_own"),
    [
        (LOST, True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), True),
        (ValueError("the answer is not JSON"), False),
        (MemoryError("CUDA error"), False),
        (EngineLostError("It is down. Its log:\nvLLM is using nccl==2.27\nunknown option --modle"), False),
        (EngineLostError("It is down. Its log:\nvLLM is using nccl==2.27\n  CUDA error: ECC"), True),
    ],
)
def test_only_a_devices_own_errors_are_held_against_it(error, its_own):
    """Memory, data and model code fail on any device: leaving one out would not help."""
    assert (device_failure(error) is not None) is its_own
    wrapped = EngineLostError("given up")
    wrapped.__cause__ = error
    assert (device_failure(wrapped) is not None) is its_own


def test_what_a_servers_log_says_of_the_device_is_what_is_told():
    """Of a long message, the line that speaks of the device is kept."""
    error = EngineLostError("It is down. Its log:\nloading\n  CUDA error: uncorrectable ECC\nbye")
    assert device_failure(error) == "EngineLostError: CUDA error: uncorrectable ECC"
