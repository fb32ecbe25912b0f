"""The one lease of this process, pinned for CUDA, taken once and given again to every later step.

How a device is locked is leases.py's, how CUDA is told is pinning.py's.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from resources.devices.lease_records import LeaseHolder
from resources.devices.leases import DeviceLeases, Lease
from resources.devices.pinning import pin

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


def _renew_in_forked_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_in_forked_child)
