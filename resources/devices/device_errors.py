"""What can go wrong between wanting a device and holding one; nothing else lives here.

Each message says what happened, where, and what to do.
"""

from __future__ import annotations


class DeviceError(Exception):
    """Any failure to find, lease or pin a device; its children are what callers catch."""


class LeaseDirectoryError(DeviceError):
    """The directory of the lease files cannot be used, or its file system does not keep locks."""


class NoDeviceFreeError(DeviceError):
    """No device came free in time. The message names who holds them, and why others are not used."""
