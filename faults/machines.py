"""Machines on this machine, made of namespaces: each has a network, processes, a name and a disk of its own.

What lives here: the network between them, starting one, running programs on it, a power cut, a cut cable.
Root is needed, or a system that gives user namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "10.77.0"
"""The first three numbers of every address."""

OUTSIDE = f"{NETWORK}.1"
"""The address of what is no machine of the cluster: database and store. It is never cut off."""

_INSIDE = "FAULTS_INSIDE_NAMESPACES"
_BRIDGE = "bridge"
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_END_SECONDS = 20.0

# Arguments: name, its folder, the place where each machine has its disk.
_BOOT = """
set -e
hostname "$1"
mount --bind "$2/disk" "$3"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind /dev/null /etc/resolv.conf; fi
mount --bind "$2/boot_id" /proc/sys/kernel/random/boot_id
ip link set lo up
echo up
exec >/dev/null
sleep infinity & wait
"""


class NoMachinesError(RuntimeError):
    """This system gives no namespaces; the message says what is missing."""


def missing() -> str | None:
    """What is missing here for machines, in a few words; None where nothing is."""
    if absent := [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]:
        return f"{', '.join(absent)} (Debian: util-linux, iproute2)"
    tried = subprocess.run(
        ["unshare", *_as_root(), *_NAMESPACES, "ip", "link", "add", "tried", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode == 0:
        return None
    why = (tried.stderr.strip().splitlines() or ["no reason is given"])[-1]
    return f"root, or user namespaces ({why}; sysctl kernel.unprivileged_userns_clone=1 allows them)"


def go_inside() -> None:
    """Go on as the first process of new namespaces, with all that it starts. Raises NoMachinesError.

    What is started there ends with it, and its network and mounts are seen by nobody else.
    """
    if os.getpid() != 1 or _INSIDE not in os.environ:
        if (why := missing()) is not None:
            raise NoMachinesError(f"No machines can be made here without {why}.")
        os.environ[_INSIDE] = "yes"
        os.execvp("unshare", ["unshare", *_as_root(), *_NAMESPACES, sys.executable, *sys.orig_argv[1:]])
    # The first process of a namespace is deaf to signals that it does not handle.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "address", "add", f"{OUTSIDE}/24", "dev", _BRIDGE)
    _run("ip", "link", "set", _BRIDGE, "up")


def enter(init: int) -> None:
    """Move this process, which has one thread, onto the machine whose first process this is.

    It keeps its place among the processes outside; only its children are processes of the machine.
    Raises OSError, also where the machine has lost its power.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    opened = [os.open(f"/proc/{init}/ns/{kind}", os.O_RDONLY) for kind in ("uts", "ipc", "net", "pid", "mnt")]
    for descriptor in opened:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"the machine of process {init} cannot be entered")
        os.close(descriptor)


@dataclass
class Machine:
    """One machine. folder: what only it has; place: where it sees its disk, the same path on each machine.

    number: from 2 on, the last of its address. environment: all that its programs see of one; this
    process's where it is empty.
    """

    name: str
    number: int
    folder: Path
    place: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    is_reachable: bool = False
    """Whether it has power, and its cable."""
    init: int = 0
    """Its first process, as seen from outside."""
    _unshare: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """Its address in the network."""
        return f"{NETWORK}.{self.number}"

    @property
    def disk(self) -> Path:
        """Its disk, as seen from outside."""
        return self.folder / "disk"

    def start(self) -> None:
        """Switch it on, with the disk that it had."""
        self.disk.mkdir(parents=True, exist_ok=True)
        self.place.mkdir(exist_ok=True)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self._unshare = subprocess.Popen(
            [
                *("unshare", *_NAMESPACES, "--uts", "--ipc"),
                *("bash", "-c", _BOOT, "bash", self.name, self.folder, self.place),
            ],
            stdout=subprocess.PIPE,
            stderr=(self.folder / "boot.log").open("w"),
            text=True,
            start_new_session=True,
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "up\n":
            raise NoMachinesError(f"The machine {self.name} does not start; see {self.folder}/boot.log.")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self.init = int(children.read_text().split()[0])
        inside = ("nsenter", f"--net=/proc/{self.init}/ns/net", "ip")
        _run(
            "ip",
            "link",
            "add",
            "name",
            self.name,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(self.init),
        )
        _run("ip", "link", "set", self.name, "master", _BRIDGE, "up")
        # As a real machine it keeps its hardware address, which others remember.
        _run(*inside, "link", "set", "eth0", "address", f"02:00:00:00:00:{self.number:02x}")
        _run(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "route", "add", "default", "via", OUTSIDE)
        self.is_reachable = True

    def popen(self, *command: str | Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a program on it; ``end`` ends it. log: where its output is added."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [
                    *("nsenter", f"--target={self.init}", "--net", "--mount", "--pid", "--uts", "--ipc"),
                    *("env", f"--chdir={self.place}", *command),
                ],
                env=dict(self.environment) or None,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def run(self, *command: str | Path, log: Path) -> int:
        """Run a program on it to its end; gives its exit code."""
        return self.popen(*command, log=log).wait()

    def cut_off(self) -> None:
        """Pull its cable: nothing arrives and nothing is refused, and all on it goes on."""
        self.is_reachable = False
        _run("ip", "link", "set", self.name, "down")

    def reconnect(self) -> None:
        """Put the cable back."""
        _run("ip", "link", "set", self.name, "up")
        self.is_reachable = True

    def cut_power(self) -> None:
        """End all on it at once. The cable goes first: no connection is closed, as with a real one."""
        if self._unshare is None:
            return
        self.is_reachable = False
        _run("ip", "link", "delete", self.name)
        os.kill(self.init, signal.SIGKILL)
        self._unshare.wait()
        self._unshare = None


def end(process: subprocess.Popen[bytes], *, seconds: float = _END_SECONDS) -> None:
    """End a program that runs on a machine, by force where it does not end by itself.

    The program alone is told: what entered the machine for it takes its end, or its machine never ends whole.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def _as_root() -> Sequence[str]:
    return () if os.geteuid() == 0 else ("--user", "--map-root-user")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoMachinesError(f"{' '.join(command)}: {done.stderr.strip()}")
