"""The verdict over a device, against recorded readings of sound and sick GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from vlm_engine.devices.find import Device, GpuReading
from vlm_engine.devices.health import HealthCheck

GIB = 1 << 30
SOUND = GpuReading(
    0,
    "GPU-a",
    "NVIDIA A100-SXM4-80GB",
    memory_bytes=80 * GIB,
    free_bytes=79 * GIB,
    uncorrected_ecc=0,
    recovery_action=0,
    throttle_reasons=0,
)
DEVICE = Device("GPU-a", "cuda", SOUND.name, SOUND.memory_bytes, "GPU-a")


@dataclass
class Recorded:
    """What NVML said once."""

    answer: GpuReading
    asked: int = 0

    def readings(self) -> list[GpuReading]:
        """The recorded answer."""
        self.asked += 1
        return [self.answer]


def verdict(reading: GpuReading, device: Device = DEVICE) -> Sequence[str]:
    return HealthCheck(Recorded(reading), min_free_bytes=16 * GIB)(device)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"uncorrected_ecc": None, "recovery_action": None, "throttle_reasons": None, "free_bytes": None},
        {"throttle_reasons": 0x1 | 0x2 | 0x4 | 0x10 | 0x20},
        {"free_bytes": 16 * GIB},
    ],
    ids=["idle", "consumer card that reports little", "software clocks", "just enough memory"],
)
def test_a_sound_gpu_is_not_refused(changes: dict[str, int | None]) -> None:
    """A GPU in normal use, or one that reports little, is never lost to a false alarm."""
    assert verdict(replace(SOUND, **changes)) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"uncorrected_ecc": 3}, "GPU-a has had 3 uncorrected memory errors"),
        ({"recovery_action": 2}, "GPU-a needs a reboot of this machine"),
        ({"recovery_action": 42}, "GPU-a needs action 42"),
        ({"throttle_reasons": 0x48}, "GPU-a is throttled: it is too hot"),
        ({"throttle_reasons": 0x48, "temperature": 91}, r"GPU-a is throttled \(at 91 °C\): it is too hot"),
        ({"throttle_reasons": 0x88}, "power brake"),
        ({"throttle_reasons": 0x08}, "its hardware has slowed it down"),
        ({"free_bytes": 15 * GIB}, "GPU-a has 15.0 GiB of free memory and 16.0 GiB are asked for"),
        ({"fault": "NVML says: GPU is lost"}, r"GPU-a \(NVIDIA A100-SXM4-80GB\) cannot be used.*GPU is lost"),
    ],
)
def test_a_sick_gpu_is_refused_in_one_sentence(changes: dict[str, int | str], words: str) -> None:
    """Each sickness gives one sentence that names the device and what is wrong with it."""
    (sentence,) = verdict(replace(SOUND, **changes))
    assert re.search(words, sentence)


def test_a_gpu_that_its_driver_slows_down_is_named_and_not_refused() -> None:
    """It is slower and computes what it should: refused, a warm room would stop the whole job."""
    hot = HealthCheck(Recorded(SOUND)).judge(replace(SOUND, throttle_reasons=0x24, temperature=87))
    assert hot.refused == ()
    assert hot.hot == ("GPU-a is throttled (at 87 °C): its driver slows it down, for it is too hot.",)
    worse = HealthCheck(Recorded(SOUND)).judge(replace(SOUND, throttle_reasons=0x20 | 0x48))
    assert (len(worse.refused), worse.hot) == (1, ()), "its hardware has the last word"
    cool = HealthCheck(Recorded(SOUND)).judge(replace(SOUND, throttle_reasons=0x1 | 0x2 | 0x4 | 0x10))
    assert (cool.refused, cool.hot) == ((), ())


def test_every_reason_is_told() -> None:
    """A GPU with two troubles says both, so that the second is no surprise after the first is mended."""
    assert len(verdict(replace(SOUND, uncorrected_ecc=1, recovery_action=1, throttle_reasons=0xC8))) == 4


def test_a_gpu_that_fell_off_the_bus_is_refused() -> None:
    """A device that was found and is no longer listed is not handed out."""
    (sentence,) = verdict(replace(SOUND, uuid="GPU-b"))
    assert "GPU-a is no longer listed by the driver" in sentence


def test_what_nvml_never_knew_has_nothing_against_it() -> None:
    """CPU slots, and devices that a cluster gave under a name of its own, pass."""
    assert verdict(SOUND, Device("cpu-0", "cpu", "CPU slot", None, "")) == ()
    assert verdict(SOUND, Device("given-17-0", "cuda", "given by Slurm job 17", None, "0", given=True)) == ()


def test_all_devices_are_judged_by_one_reading() -> None:
    """A look at eight GPUs every few seconds opens the driver once, and not at all for CPU slots."""
    nvml = Recorded(SOUND)
    devices = [DEVICE, replace(DEVICE, id="GPU-b"), Device("cpu-0", "cpu", "CPU slot", None, "")]
    verdicts = HealthCheck(nvml).judge_all(devices)
    assert {id_: bool(one.refused) for id_, one in verdicts.items()} == {
        "GPU-a": False,
        "GPU-b": True,
        "cpu-0": False,
    }
    assert nvml.asked == 1
    HealthCheck(nvml).judge_all(devices[2:])
    assert nvml.asked == 1


def test_one_sick_gpu_speaks_against_all_that_work_together() -> None:
    """A model on two GPUs computes nothing sound if one of them does not; it is the one that is named."""
    pair = Device("GPU-a+GPU-b", "cuda", "2 x A100", SOUND.memory_bytes, "GPU-a,GPU-b")
    assert verdict(SOUND, pair) == (
        "GPU-b is no longer listed by the driver: look at `nvidia-smi` and the kernel log.",
    )
    (sick, _) = verdict(replace(SOUND, uncorrected_ecc=3), pair)
    assert sick.startswith("GPU-a has had 3 uncorrected")
