"""A process that leases a device again and again and fails where it meets another, for test_contention.

Usage: contender.py DIRECTORY WITNESSES ROUNDS. While it holds a device it keeps a file of the device's name
that may not exist before: its creation (O_EXCL) fails where two processes hold one device.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from vlm_engine.devices.find import find_devices
from vlm_engine.devices.leases import DeviceLeases, LeaseHolder

if __name__ == "__main__":
    directory, witnesses, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    leases = DeviceLeases(directory, find_devices("cpu:2", {}))
    holder = LeaseHolder(run_id=f"run-{os.getpid()}", partition="p", step="s")
    for _ in range(rounds):
        with leases.acquire(holder, wait_seconds=60, log=logging.getLogger()) as lease:
            witness = witnesses / lease.device.id
            witness.touch(exist_ok=False)
            os.sched_yield()
            witness.unlink()
