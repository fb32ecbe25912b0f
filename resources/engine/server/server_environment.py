"""The environment of a server that we start: what it finds there, and whether a living one has the same.

What lives here: the variables, pinned to a device, and digests of them that can be kept on disk. What does
not: the server's key, which each start makes anew (``keeper.py``), and its arguments (``server_plan.py``).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from typing import Final

from resources.devices.find import Device
from resources.devices.nvml import DriverNvml, Nvml
from resources.devices.process_lease import pin

PINS: Final[tuple[str, ...]] = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")
"""What chooses device and threads, and is no secret."""

_OF_A_SHELL: Final = frozenset(
    {
        "_", "COLORTERM", "COLUMNS", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "INVOCATION_ID", "JOURNAL_STREAM",
        "LINES", "OLDPWD", "PWD", "SHLVL", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "STY",
        "SYSTEMD_EXEC_PID", "TERM", "TMUX", "TMUX_PANE", "WINDOWID", "XDG_SESSION_ID",
    }
)  # fmt: skip
"""What tells one terminal, or one start of a service, from another, and changes nothing for a server."""


def server_environment(
    device: Device, environment: Mapping[str, str], *, nvml: Nvml | None = None
) -> dict[str, str]:
    """The environment of a server that is pinned to a device. Raises PinnedElsewhereError.

    A whole GPU is named by its number in PCI order where the driver lists it, not by its UUID: vLLM up to
    0.23 at least reads numbers alone. Settings of this project and of Dagster are left out: some are secret.
    """
    pinned = {
        name: value for name, value in environment.items() if not name.startswith(("VLM_ASSETS_", "DAGSTER_"))
    }
    pin(device, pinned)
    if device.visible.startswith("GPU-"):
        matches = [one for one in (nvml or DriverNvml()).readings() if one.uuid.startswith(device.visible)]
        if len(matches) == 1:
            pinned["CUDA_VISIBLE_DEVICES"] = str(matches[0].index)
    return pinned


def variable_digests(environment: Mapping[str, str], key: str) -> dict[str, str]:
    """A digest of each variable that may matter to a server, by name, without the pins.

    Keyed with the server's random key, which is deleted when it ends: no secret can be guessed from them.
    """
    return {
        name: hmac.digest(key.encode(), os.fsencode(f"{name}={value}"), "sha256").hex()
        for name, value in environment.items()
        if name not in _OF_A_SHELL and name not in PINS
    }
