"""Whether a directory's storage gives the guarantees that the commit protocol needs.

Mount type and devices are read; locks, links, fsync and reading back are tried, in seconds. Nothing in the
directory is touched but one new folder, which is removed again.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vlm_durable.files.layout import Home, UnusableHomeError

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "glusterfs", "lustre", "gpfs"}
    | {"beegfs", "afs", "ncpfs", "orangefs"}
    | {
        f"fuse.{kind}"
        for kind in ("sshfs", "glusterfs", "ceph", "s3fs", "rclone", "gcsfuse", "mount-s3", "juicefs")
    }
)
"""Types of file systems as the kernel names them, whose files another machine may write."""
MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs"})
NO_BARRIERS = frozenset({"nobarrier", "barrier=0"})
_FAST_FSYNC_SECONDS = 50e-6
_SYNCED = 30


@dataclass
class FileSystemVerdict:
    """Sentences about one directory: ``against`` are reasons not to trust it, ``notes`` are neutral."""

    directory: Path
    against: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def trusted(self) -> bool:
        """Whether there is no reason against it."""
        return not self.against

    def sentences(self) -> str:
        """The verdict for people, the decision first."""
        if self.trusted:
            head = f"{self.directory}: this storage kept every promise that was tried."
            tail = "Not tried: whether the drive itself keeps what it acknowledges when the power goes."
        else:
            head = f"{self.directory}: do not trust this storage with the home directory."
            tail = "Put VLM_ASSETS_HOME on a local disk with ext4 or XFS."
        return "\n".join([head, *(f"- {sentence}" for sentence in (*self.against, *self.notes)), tail])


@dataclass(frozen=True)
class MountEntry:
    """One line of /proc/self/mounts."""

    device: str
    path: Path
    kind: str
    options: frozenset[str]


def examine(
    directory: Path, *, further: Callable[[Path, FileSystemVerdict], None] | None = None
) -> FileSystemVerdict:
    """Examine a directory (which must exist), and try it in a new folder, which is removed again.

    further: more trials in that folder, run where there is no reason against the directory so far.
    """
    verdict = FileSystemVerdict(directory)
    if not directory.is_dir():
        verdict.against.append("It is not a directory that exists: create it first.")
        return verdict
    judge_mount(mount_of(directory), verdict)
    _judge_devices(directory, verdict)
    try:
        with tempfile.TemporaryDirectory(prefix=".tried-", dir=directory) as folder:
            scratch = Path(folder)
            for trial in (_links, _locks, _syncs_and_reads_back):
                _tried(trial, scratch, verdict)
            if verdict.trusted and further is not None:
                further(scratch, verdict)
    except OSError as error:
        verdict.against.append(f"It cannot be written: {error.strerror} ({error.filename}).")
    return verdict


def mount_of(directory: Path, table: Path = MOUNTS) -> MountEntry:
    """The mount that a directory is on: the longest mount point above it, the last of equal ones."""
    whole = directory.resolve()
    best = MountEntry("?", Path("/"), "?", frozenset())
    for line in table.read_text().splitlines():
        device, point, kind, options = line.split()[:4]
        path = Path(point.encode().decode("unicode_escape"))
        if whole.is_relative_to(path) and len(path.parts) >= len(best.path.parts):
            best = MountEntry(device, path, kind, frozenset(options.split(",")))
    return best


def judge_mount(mount: MountEntry, verdict: FileSystemVerdict) -> None:
    """Judge a mount by the kind of file system and its options."""
    if mount.kind in NETWORK:
        verdict.against.append(
            f"It is a network file system ({mount.kind}, mounted at {mount.path}): locks may not exclude, "
            "replies may be lost, and errors may come up only at close."
        )
    elif mount.kind in IN_MEMORY:
        verdict.against.append(f"It is memory ({mount.kind}): nothing survives a restart of the machine.")
    elif mount.kind == "overlay":
        verdict.notes.append(
            "It is a container's own layer (overlay): it goes when the container goes. Mount a volume there."
        )
    else:
        verdict.notes.append(f"File system: {mount.kind} on {mount.device}.")
    if weak := sorted(NO_BARRIERS & mount.options):
        verdict.against.append(f"It is mounted with {', '.join(weak)}: an fsync does not reach the medium.")
    if "ro" in mount.options:
        verdict.against.append("It is mounted read-only.")


def _judge_devices(directory: Path, verdict: FileSystemVerdict) -> None:
    """Folders between which files move by rename or link must be on one device (EXDEV)."""
    try:
        Home(directory).refuse_unusable()
    except UnusableHomeError as error:
        verdict.against.append(str(error))


def _tried(
    trial: Callable[[Path, FileSystemVerdict], None], scratch: Path, verdict: FileSystemVerdict
) -> None:
    try:
        trial(scratch, verdict)
    except OSError as error:
        name = trial.__name__.strip("_").replace("_", " ")
        verdict.against.append(f"{name.capitalize()}: {error.strerror} ({error.errno}).")


def _links(scratch: Path, verdict: FileSystemVerdict) -> None:
    """A hard link gives a new name and fails on one that exists; a rename replaces in one step."""
    first, second = scratch / "first", scratch / "second"
    first.write_bytes(b"1")
    second.write_bytes(b"2")
    try:
        os.link(first, scratch / "linked")
    except OSError as error:
        verdict.against.append(
            f"It has no hard links ({error.strerror}): a new file cannot be published without a chance to "
            "overwrite another."
        )
        return
    try:
        os.link(first, second)
    except FileExistsError:
        pass
    else:
        verdict.against.append("A hard link took over a name that existed: it could overwrite.")
    first.replace(second)
    if second.read_bytes() != b"1" or first.exists():
        verdict.against.append("A rename over an existing name did not replace it.")


def _locks(scratch: Path, verdict: FileSystemVerdict) -> None:
    """flock keeps a second process out, and is free again when the first one has closed it."""
    path = scratch / "lock"
    held = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if _another_process_locks(path):
        verdict.against.append("flock does not exclude: two processes could write one partition at a time.")
    os.close(held)
    if not _another_process_locks(path):
        verdict.against.append("flock stays after its holder let go: a partition could never be resumed.")


def _another_process_locks(path: Path) -> bool:
    child = os.fork()
    if child == 0:
        try:
            fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _syncs_and_reads_back(scratch: Path, verdict: FileSystemVerdict) -> None:
    """fsync of files and of the directory succeeds, and the bytes then read are the bytes written."""
    spent = []
    for number in range(_SYNCED):
        path, data = scratch / f"synced-{number}", os.urandom(1 << 16)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(descriptor, data)
            started = time.perf_counter()
            os.fsync(descriptor)
            spent.append(time.perf_counter() - started)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.pread(descriptor, len(data) + 1, 0) != data:
                verdict.against.append("What was read back after an fsync is not what was written.")
                return
        finally:
            os.close(descriptor)
    folder = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    median = sorted(spent)[len(spent) // 2]
    verdict.notes.append(f"An fsync of 64 KiB takes {1000 * median:.2f} ms (median of {_SYNCED}).")
    if median < _FAST_FSYNC_SECONDS:
        verdict.notes.append(
            "That is faster than a medium can be: something below keeps it in memory. With a battery or "
            "capacitors that is fine; otherwise a power cut can take what was acknowledged."
        )
