"""Seconds from a worker's hang to its freed device, by its learned time, with the real daemon and sensor.

``python -m benchmarks.stuck_workers [--learned 5 15 30]``. For each learned time two workers that commit at
that pace: one stops like a hung device, which lets no SIGTERM through, the other stands still in Python. All
of them stop once after a commit, at different moments of the sensor's interval.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sensors.worker_health import INTERVAL_SECONDS
from vlm_assets.automation.sensors import worker_limits
from vlm_assets.config.resource_settings import build_gpu
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import dagster_server
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Phase, Workers

COMMITS = 3
DEVICE, PYTHON = "device", "python"


def work(home: Path, devices: str, name: str, learned: float) -> None:
    """The worker: leases, commits COMMITS times, and then never again."""
    settings = load_settings(home=home, devices=devices)
    gpu = build_gpu(settings)
    workers = Workers(open_state(settings.state_directory))
    with workers.begin(run_id=name, asset="a", partition=name, expected=100) as beat:
        lease = gpu.lease(run_id=name, partition=name, step="a", log=logging.getLogger())
        beat.enter(Phase.WORKING, device=lease.device.id)
        for batch in range(1, COMMITS + 1):
            time.sleep(learned)
            beat.beat(computed=batch, committed=batch)
        print("hangs", flush=True)
        signal.pause()


def measure(settings: Settings, kind: str, learned: float) -> None:
    """Start a worker, wait for its hang and for its end, and print a line."""
    limits = worker_limits(settings)
    allowed = max(limits.learned_times * learned, limits.least)
    # The tick that finds it, and, for one that does not end when told to, the first after the grace.
    ticks = 1 + (math.ceil(settings.grace_seconds / INTERVAL_SECONDS) if kind == DEVICE else 0)
    promise = allowed + ticks * INTERVAL_SECONDS
    name = f"{kind} {learned:.0f}"
    module = [sys.executable, "-m", "benchmarks.stuck_workers", "--worker"]
    order = [str(settings.home), settings.devices, name, str(learned)]
    with subprocess.Popen([*module, *order], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        hung = time.monotonic()
        if kind == DEVICE:
            process.send_signal(signal.SIGSTOP)
        leases = build_gpu(settings).leases()
        while any(held.record is not None and held.record.holder.run_id == name for held in leases.holders()):
            time.sleep(0.1)
        freed = time.monotonic() - hung
        print(
            f"hung in {kind}: learned {learned:.0f} s, allowed {allowed:.0f} s, freed after {freed:.1f} s"
            f" (promised {promise:.0f} s)",
            flush=True,
        )


def main() -> None:
    """Print the limits, and a line a worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learned", type=float, nargs="+", default=[5.0, 15.0, 30.0])
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        home, devices, name, pace = options.worker
        work(Path(home), devices, name, float(pace))
        return
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "listing.jsonl"
        listing.write_text(json.dumps({"property_id": "p", "images": ["p.jpg"]}) + "\n")
        devices = f"cpu:{2 * len(options.learned)}"
        settings = load_settings(home=Path(folder) / "home", devices=devices)
        ingest(listing, settings.home, range_size=1)
        dagster_home = settings.home / "dagster"
        catalog = Catalog.open(settings.home)
        prepare_dagster_home(dagster_home, catalog_id=catalog.catalog_id, slots=1)
        limits = worker_limits(settings)
        print(
            f"interval {INTERVAL_SECONDS} s, grace {settings.grace_seconds:.0f} s, stuck after"
            f" {limits.learned_times:.0f} learned times, {limits.least:.0f} s at least",
            flush=True,
        )
        environment = {"VLM_ASSETS_DEVICES": devices}
        with dagster_server(settings.home, dagster_home, port=3700, environment=environment) as server:
            server.start_pages()
            server.start_daemon()
            pairs = [(kind, learned) for kind in (DEVICE, PYTHON) for learned in options.learned]
            with ThreadPoolExecutor(len(pairs)) as pool:
                for done in [pool.submit(measure, settings, *pair) for pair in pairs]:
                    done.result()


if __name__ == "__main__":
    main()
