"""Whether a GPU is sound enough to be trusted with work, and whether it is too hot: sentences that say why.

find.py reads the driver. leases.py passes a refused device over, and asks again while the wait lasts. Terms:
ECC, clock event reasons, GPU recovery action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlm_engine.devices.find import Device, GpuReading, Nvml

_GIB = 1 << 30

# Other software reasons (power cap, application clocks, idle) are a GPU in normal use.
_SOFTWARE_THERMAL_SLOWDOWN = 0x20
_HARDWARE_THROTTLES = {
    0x40: "it is too hot and its hardware has slowed it down: look at its cooling",
    0x80: "its power brake has slowed it down: look at the power supply",
}
_HARDWARE_SLOWDOWN = 0x08  # Set together with each of the two above, and alone for other causes.

_RECOVERY_ACTIONS = {
    1: "a reset (nvidia-smi --gpu-reset)",
    2: "a reboot of this machine",
    3: "its peer-to-peer traffic to be drained",
    4: "to be drained and reset",
    5: "its IMEX domain to be recovered",
    6: "a reset of its bus",
    7: "a reboot of the whole system",
}


@dataclass(frozen=True)
class DeviceHealth:
    """The reasons against a device, a sentence each. refused: why it should not be used now.

    hot: why it is slower than it could be. It computes correctly and is used: refused it would do nothing at
    all.
    """

    refused: tuple[str, ...] = ()
    hot: tuple[str, ...] = ()


@dataclass(frozen=True)
class HealthCheck:
    """Judges devices by what NVML says at the moment. ``min_free_bytes``: refuse with less free memory."""

    nvml: Nvml
    min_free_bytes: int = 0

    def __call__(self, device: Device) -> Sequence[str]:
        """Why ``device`` should not be used now, one sentence a reason; none if nothing speaks against it."""
        return self.judge_all([device])[device.id].refused

    def judge_all(self, devices: Sequence[Device]) -> dict[str, DeviceHealth]:
        """The health of several devices, by id, from one reading: to open the driver may take a second."""
        listed: dict[str, GpuReading] = {}
        if any(device.kind != "cpu" for device in devices):
            listed = {reading.uuid: reading for reading in self.nvml.readings()}
        return {device.id: self._judge_members(device, listed) for device in devices}

    def _judge_members(self, device: Device, listed: Mapping[str, GpuReading]) -> DeviceHealth:
        """The health of one device, or of several together, with the reasons against each of them."""
        refused: list[str] = []
        hot: list[str] = []
        for member in device.members:
            if member in listed:
                health = self.judge(listed[member])
                refused += health.refused
                hot += health.hot
            elif device.kind != "cpu" and not device.given:  # NVML need not list what a cluster gave.
                refused.append(
                    f"{member} is no longer listed by the driver: look at `nvidia-smi` and the kernel log."
                )
        return DeviceHealth(tuple(refused), tuple(hot))

    def judge(self, reading: GpuReading) -> DeviceHealth:
        """The health by one reading. Values that a GPU does not report are no reason against it."""
        uuid = reading.uuid
        if reading.fault:
            return DeviceHealth((f"{uuid} ({reading.name}) cannot be used: {reading.fault}.",))
        reasons = []
        if reading.uncorrected_ecc:
            reasons.append(
                f"{uuid} has had {reading.uncorrected_ecc} uncorrected memory errors (ECC) since its driver "
                "was loaded: what it computes cannot be trusted until it is reset."
            )
        if reading.recovery_action:
            action = _RECOVERY_ACTIONS.get(reading.recovery_action, f"action {reading.recovery_action}")
            reasons.append(f"{uuid} needs {action}, says its driver.")
        heat = f" (at {reading.temperature} °C)" if reading.temperature is not None else ""
        mask = reading.throttle_reasons or 0
        throttles = _throttles(mask)
        reasons += [f"{uuid} is throttled{heat}: {why}." for why in throttles]
        if reading.free_bytes is not None and reading.free_bytes < self.min_free_bytes:
            reasons.append(
                f"{uuid} has {reading.free_bytes / _GIB:.1f} GiB of free memory and "
                f"{self.min_free_bytes / _GIB:.1f} GiB are asked for: see who uses it with `nvidia-smi`."
            )
        hot: tuple[str, ...] = ()
        if mask & _SOFTWARE_THERMAL_SLOWDOWN and not throttles:
            hot = (f"{uuid} is throttled{heat}: its driver slows it down, for it is too hot.",)
        return DeviceHealth(tuple(reasons), hot)


def _throttles(mask: int) -> list[str]:
    named = [why for bit, why in _HARDWARE_THROTTLES.items() if mask & bit]
    if mask & _HARDWARE_SLOWDOWN and not named:
        return ["its hardware has slowed it down: look at its cooling and its power supply"]
    return named
