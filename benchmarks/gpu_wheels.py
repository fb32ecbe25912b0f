"""Collect the wheels that a GPU machine without a network lacks, and check their size: ``make gpu-wheels``.

What the machine has is in ``gpu_machine/has.txt``. The first load (``engine.txt``) is for the engine's tests
and benchmarks. The second (``dagster.txt``), on top of it, is for whole partitions. Versions are those of
constraints.txt.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LISTS: Final = ROOT / "benchmarks" / "gpu_machine"
WHEELS: Final = ROOT / ".wheels"
LOADS: Final = ("engine", "dagster")
MOST_BYTES: Final = 60 << 20
"""Of the tree and the wheels together: 64 MiB may travel, and results of earlier calls travel too."""
_GLIBC: Final = (5, 12, 17, 24, 26, 27, 28, 31)
"""pip takes a wheel for glibc 2.N only where just this N is named."""


def collect(load: str) -> None:
    """Download one load for CPython 3.12 on x86-64, each package as it is named and nothing that it needs."""
    folder = WHEELS / load
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + [
        "manylinux1_x86_64",
        "manylinux2014_x86_64",
    ]
    command = [sys.executable, "-m", "pip", "-qq", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(folder)]
    command += [word for platform in platforms for word in ("--platform", platform)]
    command += ["-c", str(ROOT / "constraints.txt"), "-r", str(LISTS / f"{load}.txt")]
    subprocess.run(command, check=True)


def travelling_files(root: Path) -> list[Path]:
    """The files of a checkout that travel: those that git has, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in names.split("\0") if name and (root / name).is_file()]


def total_bytes(files: Iterable[Path]) -> int:
    """Bytes of files, which together must be at most MOST_BYTES."""
    return sum(file.stat().st_size for file in files)


def main() -> None:
    """Collect both loads, print their sizes, and fail where the tree with both is too large."""
    size = total_bytes(travelling_files(ROOT))
    print(f"the tree: {size / 2**20:.1f} MiB")
    for load in LOADS:
        collect(load)
        wheels = list((WHEELS / load).glob("*.whl"))
        size += total_bytes(wheels)
        print(f"{WHEELS.name}/{load}: {len(wheels)} wheels; with all before: {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        sys.exit(f"gpu-wheels: that is more than {MOST_BYTES >> 20} MiB: take something out of {LISTS}.")


if __name__ == "__main__":
    main()
