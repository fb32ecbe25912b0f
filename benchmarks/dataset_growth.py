"""What more partitions cost: python -m benchmarks.dataset_growth [--sizes 100 1000 10000]

Homes of so many partitions of one property, all of them published, and for each in fresh processes:
importing the definitions, and ``vlm-assets status``, its first look and a later one. CPU seconds and peak
memory, and at the end what a thousand partitions more cost. Ticks of sensors: sensor_ticks.py and
health_ticks.py with ``--partitions``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.health_ticks import make_home

IMPORT = ("-c", "import vlm_assets.definitions")
STATUS = ("-c", "from vlm_assets.commands.main import main; main()", "status")
CASES = {
    "importing the definitions": IMPORT,
    "status, first look": STATUS,
    "status, nothing new": STATUS,
}


def main() -> None:
    """Print one line a size and case, then the slopes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000])
    sizes = parser.parse_args().sizes
    measured = {size: _measure(size) for size in sizes}
    first, last = sizes[0], sizes[-1]
    if last > first:
        for name in CASES:
            (cpu, memory), (least_cpu, least_memory) = measured[last][name], measured[first][name]
            thousands = (last - first) / 1000
            print(
                f"{name}: {1000 * (cpu - least_cpu) / thousands:.0f} ms of CPU and"
                f" {(memory - least_memory) / thousands:.1f} MiB for a thousand partitions more"
            )


def _measure(partitions: int) -> dict[str, tuple[float, float]]:
    """CPU seconds and peak MiB of each case."""
    with tempfile.TemporaryDirectory() as folder:
        settings = make_home(Path(folder), partitions)
        environment = {"VLM_ASSETS_HOME": str(settings.home), "DAGSTER_HOME": folder}
        measured = {}
        for name, command in CASES.items():
            measured[name] = spent(command, environment)
            cpu, memory = measured[name]
            print(f"{partitions:6d} partitions, {name}: {cpu:.2f} s of CPU, {memory:.0f} MiB", flush=True)
        return measured


def spent(command: tuple[str, ...], environment: dict[str, str]) -> tuple[float, float]:
    """CPU seconds and peak MiB of this Python with these arguments."""
    environment = {**os.environ, **environment}
    process = subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
