"""What can go wrong between wanting a device and holding one; nothing else lives here.

Each message says what happened, where, and what to do.
"""

from __future__ import annotations


class DeviceError(Exception):
    """Any failure to find, lease or pin a device; its children are what callers catch."""


class DeviceSettingError(DeviceError):
    """The setting that names the devices cannot be read."""


class DeviceNotFoundError(DeviceError):
    """A device that the settings or the environment name is not there."""


class DriverUnavailableError(DeviceError):
    """There is an NVIDIA driver and it does not answer: nothing is known about the devices."""


class LeaseDirectoryError(DeviceError):
    """The directory of the lease files cannot be used, or its file system does not keep locks."""


class NoDeviceFreeError(DeviceError):
    """No device came free in time. The message names who holds them and why others were refused."""


class PinnedElsewhereError(DeviceError):
    """CUDA already runs in this process on another device than the one that was leased."""


class AllLeftOutError(DeviceError):
    """Every device has failed twice and is left out; the message says why each, and how to take one back."""
