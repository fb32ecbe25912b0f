"""Network file systems, on which SQLite's locks and its write-ahead log cannot be trusted."""

from __future__ import annotations

from pathlib import Path

from resources.state.sqlite_file import ControlStateError

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "afs", "ceph", "fuse.ceph", "fuse.glusterfs",
     "glusterfs", "lustre", "gpfs", "beegfs", "fuse.s3fs", "fuse.rclone", "fuse.juicefs"}
)  # fmt: skip
"""Types of file systems as the kernel names them, whose files another machine may write."""

MOUNTS = Path("/proc/self/mounts")


def file_system_of(path: Path, mounts: str) -> str | None:
    """The type of the file system that holds ``path``; None where the mounts do not say.

    mounts: the text of /proc/self/mounts: device, mount point, type and more, one mount a line.
    """
    found: tuple[int, str] | None = None
    resolved = path.resolve()
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # Blanks and the like are written as octal.
        point = Path(fields[1].encode("latin-1", "replace").decode("unicode_escape"))
        deeper = found is None or len(point.parts) >= found[0]
        if deeper and (resolved == point or point in resolved.parents):
            found = (len(point.parts), fields[2])
    return found[1] if found else None


def refuse_network_file_system(directory: Path, mounts: Path | None = None) -> None:
    """Raise ControlStateError where ``directory`` is on a network file system."""
    try:
        text = (mounts or MOUNTS).read_text()
    except OSError:
        return  # Not Linux: the system does not say.
    kind = file_system_of(directory, text)
    if kind in NETWORK:
        raise ControlStateError(
            f"{directory} is on a network file system ({kind}), where SQLite loses what it was told. Set"
            " VLM_ASSETS_HOME to a folder on a local disk, or VLM_ASSETS_STATE_URL to a Postgres database"
            " (postgresql+psycopg2://USER@HOST/DATABASE), which several machines can share. Nothing was"
            " changed."
        )
