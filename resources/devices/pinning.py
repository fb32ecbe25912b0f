"""Makes the leased device the only one that CUDA can see in this process; nothing about leasing lives here.

CUDA reads CUDA_VISIBLE_DEVICES once, when it is initialised: pin before torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from resources.devices.errors import PinnedElsewhereError
from resources.devices.find import Device


def pin(device: Device, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set CUDA_VISIBLE_DEVICES (and the order that numbers count in), for this process and its children.

    A CPU slot hides every GPU, and bounds the threads that torch will compute with. Raises
    PinnedElsewhereError where torch already runs CUDA here with another CUDA_VISIBLE_DEVICES.
    """
    torch = sys.modules.get("torch")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if torch is not None and torch.cuda.is_initialized() and visible != device.visible:
        before = "not set" if visible is None else f"= {visible!r}"
        raise PinnedElsewhereError(
            f"torch has already initialised CUDA in this process (pid {os.getpid()}), with "
            f"CUDA_VISIBLE_DEVICES {before}: it cannot be moved to {device.id} any more. Lease the device "
            "before anything uses CUDA, or start a new process."
        )
    environment["CUDA_VISIBLE_DEVICES"] = device.visible
    if device.kind == "cuda":
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if device.threads is not None:
        # A number that a person has set stays.
        environment.setdefault("OMP_NUM_THREADS", str(device.threads))
