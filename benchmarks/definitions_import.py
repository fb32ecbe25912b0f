"""CPU seconds of importing the definitions with many partitions: python -m benchmarks.definitions_import."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from vlm_catalog.ingest import ingest


def main() -> None:
    """Catalogue so many ranges, import the definitions in fresh processes, print the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "listing.jsonl"
        lines = (
            json.dumps({"property_id": f"p{n}", "images": [f"{n}.jpg"]}) for n in range(arguments.partitions)
        )
        listing.write_text("\n".join(lines))
        home = Path(folder) / "home"
        ingest(listing, home, range_size=1)
        environment = {**os.environ, "VLM_ASSETS_HOME": str(home), "DAGSTER_HOME": folder}
        spent = [_cpu_seconds(environment) for _ in range(arguments.repeat)]
    print(
        f"{arguments.partitions} partitions: median {statistics.median(spent):.2f} s of CPU"
        f" ({min(spent):.2f} to {max(spent):.2f})"
    )


def _cpu_seconds(environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import vlm_assets.definitions"], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
