"""A process that leases a device and keeps it, with children like decode workers, for test_killed_holder.py.

Usage: holder.py DIRECTORY DEVICES CHILDREN, the last one of spawn, forkserver, fork, subprocess, none.
It writes one JSON line (device, children's pids) once it holds the lease and its children run; then it lives
until it is killed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from vlm_engine.devices.find import find_devices
from vlm_engine.devices.leases import DeviceLeases, LeaseHolder


def decode_for_ever(started: Connection) -> None:
    """A child that outlives its parent: says that it runs, then does nothing until it is killed."""
    started.send(os.getpid())
    while True:
        signal.pause()


def start_children(how: str) -> list[int]:
    """Two children that certainly run, and their pids."""
    if how == "none":
        return []
    if how == "subprocess":
        command = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
        # close_fds=False: even a descriptor that nobody closes must not carry the lease along.
        servers = [subprocess.Popen(command, stdout=subprocess.PIPE, close_fds=False) for _ in range(2)]
        for server in servers:
            assert server.stdout is not None
            server.stdout.readline()
        return [server.pid for server in servers]
    context = multiprocessing.get_context(how)
    ours, theirs = context.Pipe()
    for _ in range(2):
        context.Process(target=decode_for_ever, args=(theirs,)).start()  # type: ignore[attr-defined]
    return [ours.recv() for _ in range(2)]


if __name__ == "__main__":
    directory, devices, how = sys.argv[1:]
    leases = DeviceLeases(Path(directory), find_devices(devices, {}))
    holder = LeaseHolder(run_id=f"run-{how}", partition="000000000-000000999", step="property_descriptions")
    lease = leases.acquire(holder, wait_seconds=0, log=logging.getLogger())
    print(json.dumps({"device": lease.device.id, "children": start_children(how)}), flush=True)
    while True:
        signal.pause()
