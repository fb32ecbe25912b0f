"""The one lease of this process: taken once, given again to every later step, and all that CUDA sees.

CUDA reads CUDA_VISIBLE_DEVICES once, when it is initialised: pin before torch is imported. How a device is
locked is leases.py's.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, MutableMapping

from resources.devices.device_errors import DeviceError
from resources.devices.find import Device
from resources.devices.leases import DeviceLeases, Lease, LeaseHolder

_lock = threading.Lock()
_lease: Lease | None = None


def lease_for_process(
    open_leases: Callable[[], DeviceLeases],
    holder: LeaseHolder,
    *,
    wait_seconds: float,
    log: logging.Logger,
) -> Lease:
    """Lease and pin at the first call; the same lease at every later one, with ``holder`` as its new use.

    One a process, because torch cannot move to another device once it runs. ``open_leases`` is asked only
    where there is none yet: pinning narrows what the environment shows. Raises as ``DeviceLeases.acquire``
    and ``pin`` do; a device that cannot be pinned is given back.
    """
    global _lease
    with _lock:
        if _lease is not None and _lease.held:
            _lease.hand_to(holder, log)
            return _lease
        lease = open_leases().acquire(holder, wait_seconds=wait_seconds, log=log)
        try:
            pin(lease.device)
        except BaseException:
            lease.release()
            raise
        _lease = lease
        return lease


def pin(device: Device, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set CUDA_VISIBLE_DEVICES (and the order that numbers count in), for this process and its children.

    A CPU slot hides every GPU, and bounds the threads that torch will compute with. Raises
    DeviceError where torch already runs CUDA here with another CUDA_VISIBLE_DEVICES.
    """
    torch = sys.modules.get("torch")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if torch is not None and torch.cuda.is_initialized() and visible != device.visible:
        before = "not set" if visible is None else f"= {visible!r}"
        raise DeviceError(
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


def _renew_in_forked_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_in_forked_child)
