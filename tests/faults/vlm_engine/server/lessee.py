"""A process that leases a device and its model server, and keeps both until it is killed.

Usage: lessee.py STATE COMMAND IDLE_SECONDS. It writes one line when it has begun, and one (the server's pid)
when the server answers.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

from vlm_engine.devices.find import find_devices
from vlm_engine.devices.leases import DeviceLeases, LeaseHolder
from vlm_engine.devices.loaded_servers import LoadedServers
from vlm_engine.server.owned_server import OwnedServer
from vlm_engine.server.server_plan import ServerPlan

if __name__ == "__main__":
    state, command, idle_seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    log = logging.getLogger()
    leases = DeviceLeases(state / "leases", find_devices("cpu:1", {}))
    lease = leases.acquire(LeaseHolder("run", "partition", "step"), wait_seconds=0, log=log)
    plan = ServerPlan(command, "a-model", None, "exact", idle_seconds=idle_seconds, grace_seconds=0.5)
    print("begun", flush=True)
    server = OwnedServer(lease.device, plan, state_directory=state)
    record = LoadedServers(state).living_on(lease.device.id)
    assert record is not None and record.server is not None
    print(record.server.pid, flush=True)
    while True:
        signal.pause()
