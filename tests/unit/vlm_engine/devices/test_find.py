"""Finding devices: NVML readings are recorded, the environments are what Slurm, Ray and people set."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from vlm_engine.devices.find import Device, DeviceError, GpuReading, find_devices, grouped, named


@dataclass
class Recorded:
    """What NVML said once."""

    answers: list[GpuReading] = field(default_factory=list)

    def readings(self) -> list[GpuReading]:
        """The recorded answer."""
        return self.answers


A100 = [
    GpuReading(0, "GPU-8f1c0000-aaaa", "NVIDIA A100-SXM4-80GB", 85_899_345_920, 85_000_000_000),
    GpuReading(1, "GPU-8f1d0000-bbbb", "NVIDIA A100-SXM4-80GB", 85_899_345_920, 85_000_000_000),
    GpuReading(2, "MIG-1111", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42_000_000_000, 42_000_000_000),
    GpuReading(2, "MIG-2222", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42_000_000_000, 42_000_000_000),
]


def ids(
    wanted: str, environment: dict[str, str] | None = None, readings: list[GpuReading] = A100
) -> list[str]:
    return [device.id for device in find_devices(wanted, environment or {}, nvml=Recorded(readings), cores=4)]


def test_auto_takes_every_gpu_and_mig_instance_by_uuid() -> None:
    """Every GPU is a device, and what pins it is its UUID, which means the same in any numbering."""
    devices = find_devices("auto", {}, nvml=Recorded(A100))
    assert [device.visible for device in devices] == [reading.uuid for reading in A100]
    assert devices[0] == Device(
        "GPU-8f1c0000-aaaa", "cuda", "NVIDIA A100-SXM4-80GB", 85_899_345_920, "GPU-8f1c0000-aaaa"
    )


@pytest.mark.parametrize(("cores", "slots"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4), (64, 8)])
def test_without_a_gpu_there_is_a_slot_for_every_two_cores(cores: int, slots: int) -> None:
    """A machine without a GPU works, with as many slots as its cores keep busy."""
    found = find_devices("auto", {}, nvml=Recorded(), cores=cores)
    assert [device.id for device in found] == [f"cpu-{slot}" for slot in range(slots)]
    assert {(device.kind, device.visible) for device in found} == {("cpu", "")}


def test_cpu_slots_leave_gpus_alone() -> None:
    """A person who asks for CPU slots gets them, as many as asked for, on a machine with GPUs too."""
    assert ids("cpu:3") == ["cpu-0", "cpu-1", "cpu-2"]
    assert ids("cpu") == ["cpu-0", "cpu-1"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("1,0", ["GPU-8f1d0000-bbbb", "GPU-8f1c0000-aaaa"]),
        (" GPU-8f1d , 1 ", ["GPU-8f1d0000-bbbb"]),
        ("2", ["MIG-1111", "MIG-2222"]),
        ("MIG-2222", ["MIG-2222"]),
    ],
)
def test_a_list_names_devices_by_number_or_uuid(wanted: str, expected: list[str]) -> None:
    """Numbers, UUIDs and their beginnings mean what nvidia-smi shows; none is taken twice."""
    assert ids(wanted) == expected


def test_a_device_that_is_not_there_is_named_with_what_is() -> None:
    """A wrong number or id ends by name and shows the choice, instead of working on less."""
    with pytest.raises(DeviceError, match=r"'7'.*0 \(GPU-8f1c0000-aaaa"):
        ids("0,7")
    with pytest.raises(DeviceError, match="2 devices"):
        ids("GPU-8f1")


@pytest.mark.parametrize("wanted", ["cpu:0", "cpu:x", "cpu:", "", ","])
def test_a_setting_that_says_nothing_is_refused(wanted: str) -> None:
    """A setting that cannot be read says how it is written."""
    with pytest.raises(DeviceError, match="VLM_ASSETS_DEVICES is one of"):
        ids(wanted)


def test_a_word_that_is_no_device_says_how_the_setting_is_written() -> None:
    """A misspelt setting ends with the way it is written."""
    with pytest.raises(DeviceError, match=r"'gpus'.*VLM_ASSETS_DEVICES is one of"):
        ids("gpus")


def test_cuda_visible_devices_bounds_the_choice() -> None:
    """Someone who hides GPUs from us is obeyed, whatever the setting says."""
    assert ids("auto", {"CUDA_VISIBLE_DEVICES": "1"}) == ["GPU-8f1d0000-bbbb"]
    assert ids("auto", {"CUDA_VISIBLE_DEVICES": ""}) == ["cpu-0", "cpu-1"]
    with pytest.raises(DeviceError, match="'0'"):
        ids("0", {"CUDA_VISIBLE_DEVICES": "1"})
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES names '9'"):
        ids("auto", {"CUDA_VISIBLE_DEVICES": "9"})


@pytest.mark.parametrize("marker", ["SLURM_JOB_ID", "VLM_RAY_RUN"])
def test_a_device_given_by_a_cluster_is_taken_as_it_is(marker: str) -> None:
    """What the cluster wrote stays in CUDA_VISIBLE_DEVICES; the lease goes by the UUID."""
    environment = {marker: "17", "CUDA_VISIBLE_DEVICES": "1"}
    (device,) = find_devices("auto", environment, nvml=Recorded(A100))
    assert (device.id, device.visible, device.given) == ("GPU-8f1d0000-bbbb", "1", True)
    with pytest.raises(DeviceError):
        ids("0", environment)


def test_a_given_device_that_nvml_does_not_know_is_named_with_its_job() -> None:
    """Number 0 of two Slurm jobs are two devices: they must not wait for each other."""
    found = [
        find_devices("auto", {"SLURM_JOB_ID": job, "CUDA_VISIBLE_DEVICES": "0,1"}, nvml=Recorded())
        for job in ("17", "18")
    ]
    assert [[device.id for device in devices] for devices in found] == [
        ["given-17-0", "given-17-1"],
        ["given-18-0", "given-18-1"],
    ]
    assert [(device.kind, device.visible, device.given) for device in found[0]] == [
        ("cuda", "0", True),
        ("cuda", "1", True),
    ]


@pytest.mark.parametrize("nothing", ["", "-1", "NoDevFiles"])
def test_a_job_without_a_gpu_gets_cpu_slots(nothing: str) -> None:
    """A cluster that gave no GPU is not robbed of one: the job works on CPU slots."""
    assert ids("auto", {"SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": nothing}) == ["cpu-0", "cpu-1"]


def test_given_insists_on_what_the_environment_gives() -> None:
    """With `given` a missing device is an error that says what to do, never another device."""
    assert ids("given", {"CUDA_VISIBLE_DEVICES": "GPU-8f1c0000-aaaa"}) == ["GPU-8f1c0000-aaaa"]
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES is not set"):
        ids("given")
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES is empty"):
        ids("given", {"CUDA_VISIBLE_DEVICES": ""})


FOUR = [GpuReading(at, f"GPU-{at}", "H100", (80 - at) << 30) for at in range(4)]


def test_neighbours_work_on_one_model_together() -> None:
    """Two GPUs are one device with one id, as large as the smaller one; an odd one is left over."""
    pairs = grouped(find_devices("0,1,3", {}, nvml=Recorded(FOUR)), 2)
    assert pairs == [Device("GPU-0+GPU-1", "cuda", "2 x H100", 79 << 30, "GPU-0,GPU-1")]
    assert pairs[0].members == ("GPU-0", "GPU-1")
    assert grouped(find_devices("auto", {}, nvml=Recorded(A100)), 1) == find_devices(
        "auto", {}, nvml=Recorded(A100)
    )


@pytest.mark.parametrize(
    ("wanted", "readings", "said"),
    [
        ("cpu:2", FOUR, "cpu-0 .* cannot work with others on one model"),
        ("auto", A100, "MIG|cannot work with others on one model"),
        ("0", FOUR, "DEVICES_PER_MODEL is 2, and 1 may be used here: GPU-0"),
    ],
)
def test_what_cannot_work_together_is_refused(wanted: str, readings: list[GpuReading], said: str) -> None:
    """CPU slots, MIG instances and too few GPUs are named before anything is leased."""
    with pytest.raises(DeviceError, match=said):
        grouped(find_devices(wanted, {}, nvml=Recorded(readings)), 2)


@pytest.mark.parametrize("wanted", ["1,0", "2", "cpu:3"])
def test_some_of_the_devices_can_be_named_to_another_process(wanted: str) -> None:
    """What is named is found again, alone and as a part of groups: no other device, and none twice."""
    devices = find_devices(wanted, {}, nvml=Recorded(A100), cores=4)
    assert ids(named(devices)) == [device.id for device in devices]
    if wanted == "1,0":
        assert named(grouped(devices, 2)) == named(devices)
