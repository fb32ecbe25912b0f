"""File systems of the campaign's own: loop-mounted ext4 and XFS, and memory. Needs root.

What lives here: making, mounting, shutting down (a power cut), filling. What does not: what is done on them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOG_FLUSHED, LOG_LOST = 1, 2
"""What of the file system's own log reaches the disk before a cut: all that was logged, or nothing more."""
_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN: _IOR('X', 125, __u32)
_MS_RDONLY, _MS_REMOUNT = 1, 32
_MAKE = {
    # XFS is refused below 300 MB; images are sparse.
    "ext4": (64, ["mkfs.ext4", "-q", "-F", "-m", "0"]),
    "xfs": (320, ["mkfs.xfs", "-q", "-f"]),
}
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Why file systems cannot be mounted here, in a few words; None where they can."""
    if os.geteuid() != 0:
        return "root (for mounts)"
    programs = ["losetup", *(make[0] for _, make in _MAKE.values())]
    if absent := [name for name in programs if shutil.which(name) is None]:
        return ", ".join(absent)
    try:
        with tempfile.TemporaryDirectory() as folder, Mount.in_memory(Path(folder), mib=1):
            pass
    except OSError as error:
        return f"permission to mount ({error.strerror})"
    if not Path("/dev/loop-control").exists():
        return "loop devices"
    return None


@dataclass
class Mount:
    """A mounted file system. A context manager, which unmounts."""

    kind: str
    device: str
    path: Path
    options: str = ""

    @classmethod
    def in_memory(cls, path: Path, *, mib: int) -> Mount:
        """A tmpfs of so many MiB."""
        mount = cls("tmpfs", "none", path, f"size={mib}m")
        mount.mount()
        return mount

    def mount(self, flags: int = 0) -> None:
        """Mount it; a file system that was cut off recovers here."""
        self.path.mkdir(exist_ok=True)
        names = (self.device, str(self.path), self.kind)
        _check(_libc.mount(*map(str.encode, names), flags, self.options.encode()), self.path)

    def remount(self, *, read_only: bool) -> None:
        """Change between reading only and writing, in place."""
        self.mount(_MS_REMOUNT | (_MS_RDONLY if read_only else 0))

    def unmount(self) -> None:
        """Unmount it; what had not been written to a shut-down file system is gone."""
        _check(_libc.umount2(str(self.path).encode(), 0), self.path)

    def cut(self, how: int) -> None:
        """The power goes: from here on nothing reaches the disk."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(descriptor)

    def again(self) -> None:
        """Unmount and mount: what a machine does that comes up after a power cut."""
        self.unmount()
        self.mount()

    def __enter__(self) -> Mount:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.unmount()


def _check(result: int, path: Path) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


@contextmanager
def loop_mounted(kind: str, folder: Path) -> Iterator[Mount]:
    """A new file system of its own (``ext4`` or ``xfs``) in an image file in ``folder``."""
    mib, make = _MAKE[kind]
    image = folder / f"{kind}.image"
    with image.open("wb") as stream:
        stream.truncate(mib << 20)
    subprocess.run([*make, image], check=True, capture_output=True, text=True)
    shown = subprocess.run(["losetup", "--find", "--show", image], check=True, capture_output=True, text=True)
    device = shown.stdout.strip()
    try:
        mount = Mount(kind, device, folder / kind)
        mount.mount()
        with mount:
            yield mount
    finally:
        subprocess.run(["losetup", "--detach", device], check=True, capture_output=True)
        image.unlink()
