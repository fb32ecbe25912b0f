"""Machines made of namespaces are apart as real ones are: what is tried on them tells of real ones."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from faults.machines import missing

_LIFE = """
import json, sys
from pathlib import Path
from faults.machines import Machine, end, go_inside

go_inside()
folder = Path(sys.argv[1])
first, second = [Machine(f"node-{n}", n + 1, folder / str(n), folder / "disk") for n in (1, 2)]
log = folder / "log"
BOOT = "/proc/sys/kernel/random/boot_id"
LOOK = f"import os, socket; print(socket.gethostname(), open('{BOOT}').read(), os.listdir())"
REACH = "import socket; socket.create_connection(('10.77.0.3', 8000), 1)"

def serving():
    server = second.popen(sys.executable, "-m", "http.server", log=folder / "served")
    while first.run(sys.executable, "-c", REACH, log=log):
        pass
    return server

def reached():
    return first.run(sys.executable, "-c", REACH, log=log) == 0

found = {}
for machine in (first, second):
    machine.start()
    machine.run("touch", f"of-{machine.name}", log=log)
    machine.run(sys.executable, "-c", LOOK, log=folder / f"look-{machine.name}")
server = serving()
second.cut_off()
found["cut off"] = [reached(), server.poll()]
second.reconnect()
found["back"] = [reached(), server.poll()]
second.cut_power()
found["no power"] = [reached(), server.wait()]
second.start()
second.run(sys.executable, "-c", LOOK, log=folder / "look-again")
serving()
found["on again"] = reached()
print(json.dumps(found))
"""


@pytest.fixture
def lived(disk: Path, left_out: Callable[[str], NoReturn]) -> dict[str, Any]:
    if (why := missing()) is not None:
        left_out(why)
    # On a disk: each machine has a memory of its own.
    done = subprocess.run(
        [sys.executable, "-c", _LIFE, disk], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    looks = {path.name: path.read_text().split(maxsplit=2) for path in disk.glob("look-*")}
    return json.loads(done.stdout) | looks


def test_machines_are_apart_and_can_be_cut_off_and_lose_power(lived: dict[str, Any]) -> None:
    """A cut cable stops packets and nothing else; a power cut ends all, and only the disk stays."""
    assert lived["cut off"] == [False, None]
    assert lived["back"] == [True, None]
    assert lived["no power"] == [False, -9]
    assert lived["on again"]
    first, second, again = lived["look-node-1"], lived["look-node-2"], lived["look-again"]
    assert (first[0], second[0], again[0]) == ("node-1", "node-2", "node-2")
    assert len({first[1], second[1], again[1]}) == 3, "a boot id each, and a new one at each start"
    assert (first[2], second[2], again[2]) == ("['of-node-1']\n", "['of-node-2']\n", "['of-node-2']\n")
