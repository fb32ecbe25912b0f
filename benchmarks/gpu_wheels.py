"""Pack what a GPU machine without a network lacks into one file, and check its size: ``make gpu-wheels``.

What the machine has is in ``gpu_machine/has.txt``, what is brought along in ``gpu_machine/brought.txt``, in
the versions of constraints.txt. Packed by xz the packages take two thirds of what their wheels take.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LISTS: Final = ROOT / "benchmarks" / "gpu_machine"
PACKED: Final = ROOT / ".wheels" / "site.tar.xz"
MOST_BYTES: Final = 60 << 20
"""Of the tree and the packages together: 64 MiB may travel, and results of earlier calls travel too."""
_GLIBC: Final = (5, 12, 17, 24, 26, 27, 28, 31)
"""pip takes a wheel for glibc 2.N only where just this N is named."""


def pack() -> None:
    """Install for CPython 3.12 on x86-64 what is brought along, each as it is named, and pack it."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + [
        "manylinux1_x86_64",
        "manylinux2014_x86_64",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "-qq", "install", "--no-deps", "--only-binary=:all:"]
        command += ["--no-compile", "--python-version", "3.12", "--implementation", "cp", "--target", folder]
        command += [word for platform in platforms for word in ("--platform", platform)]
        command += ["-c", str(ROOT / "constraints.txt"), "-r", str(LISTS / "brought.txt")]
        subprocess.run(command, check=True)
        PACKED.parent.mkdir(exist_ok=True)
        with tarfile.open(PACKED, "w:xz") as packed:
            packed.add(folder, ".")


def travelling_files(root: Path) -> list[Path]:
    """The files of a checkout that travel: those that git has, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in names.split("\0") if name and (root / name).is_file()]


def total_bytes(files: Iterable[Path]) -> int:
    """Bytes of files, which together must be at most MOST_BYTES."""
    return sum(file.stat().st_size for file in files)


def main() -> None:
    """Pack, print the sizes, and fail where the tree with it is too large."""
    pack()
    size = total_bytes([*travelling_files(ROOT), PACKED])
    mib, whole = PACKED.stat().st_size / 2**20, size / 2**20
    print(f"{PACKED.relative_to(ROOT)}: {mib:.1f} MiB; with the tree {whole:.1f}")
    if size > MOST_BYTES:
        sys.exit(f"gpu-wheels: that is more than {MOST_BYTES >> 20} MiB: take something out of {LISTS}.")


if __name__ == "__main__":
    main()
