"""What a cluster of 100 nodes costs the machine that serves: python -m benchmarks.cluster_ticks

``[--partitions 20000] [--nodes 100] [--devices 8]``. A real catalogue, published files, a Dagster instance
(SQLite), a control state in Postgres, nodes that beat and a run under way on each of their devices. CPU
seconds of the ticks that a cluster adds or that look at runs (who lives, alerts), and of `vlm-assets status`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

import dagster as dg

from benchmarks.dataset_growth import STATUS, spent
from benchmarks.health_ticks import Ticking, keys, make_home
from benchmarks.sensor_ticks import write_history, write_runs_under_way
from faults.postgres_server import PostgresServer
from resources.alerts.outbox import Outbox
from sensors.dagster_internals.runs import LAUNCHER_JOB, first_launcher_job
from sensors.ticks import Ticks
from vlm_assets.automation.sensors import build_alerts
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings, load_settings
from vlm_cluster.cluster_watch import build_cluster_sensor
from vlm_durable.files.processes import boot_id
from vlm_durable.state.nodes import NodeDevice, NodeRecord, Nodes
from vlm_durable.state.workers import Phase, Worker, Workers

POOL = "gpu"


def main() -> None:
    """Print a line a tick."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=20_000)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--devices", type=int, default=8)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, PostgresServer() as postgres:
        folder = Path(name)
        cluster_of = {
            "VLM_ASSETS_STATE_URL": postgres.url,
            "VLM_ASSETS_RAY_ADDRESS": "http://127.0.0.1:1",
            "VLM_ASSETS_STORE": "s3://bucket/prefix",
        }
        make_home(folder, chosen.partitions)
        os.environ |= cluster_of
        settings = load_settings(home=folder / "home")
        (folder / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        runs = [str(uuid.uuid4()) for _ in range(chosen.nodes * chosen.devices)]
        with dg.DagsterInstance.from_config(name) as instance:
            write_history(instance, keys(settings), failed=False)
            write_runs_under_way(
                instance,
                {
                    run: {"dagster/partition": key, LAUNCHER_JOB: first_launcher_job(run)}
                    for run, key in zip(runs, keys(settings), strict=False)
                },
            )
        write_workers(settings, runs)
        state = control_state(settings)
        nodes, ticks = Nodes(state), Ticks(state)
        cluster = build_cluster_sensor(nodes, Outbox(state), pool=POOL, ticks=ticks)
        alerts = build_alerts(settings, [cluster], schedules={})
        for sensor in (cluster, alerts):
            ticking = Ticking(sensor, name)
            for title in ("first look", "nothing new", "nothing new"):
                beat(nodes, runs, chosen.devices)
                ticking.tick(title)
        environment = {**cluster_of, "VLM_ASSETS_HOME": str(settings.home), "DAGSTER_HOME": name}
        for title in ("first look", "nothing new"):
            beat(nodes, runs, chosen.devices)
            cpu, memory = spent(STATUS, environment)
            print(f"status, {title}: {cpu:.2f} s of CPU, {memory:.0f} MiB", flush=True)


def beat(nodes: Nodes, runs: list[str], devices: int) -> None:
    """Each node says that it lives, with its devices and the runs on them."""
    began = time.process_time()
    for first in range(0, len(runs), devices):
        name, its = f"node-{first // devices:03d}", runs[first : first + devices]
        record = NodeRecord(
            name,
            boot_id="boot",
            process=1,
            address=name,
            slots=devices,
            devices=tuple(NodeDevice(f"GPU-{name}-{number}", "H100", 60) for number in range(devices)),
            runs=frozenset(its),
            workers=frozenset(f"{run}.property_descriptions" for run in its),
        )
        nodes.beat(record)
    print(f"{len(runs) // devices} heartbeats: {time.process_time() - began:.2f} s of CPU", flush=True)


def write_workers(settings: Settings, runs: list[str]) -> None:
    """A materialization under way for each run, on a machine that is not this one."""
    workers, now = Workers(control_state(settings)), time.time()
    worker = Worker(
        run_id="", asset=settings.descriptions.name, partition="", device=None, pid=1, process_start=1,
        host="elsewhere", boot_id=f"not {boot_id()}", started_at=now, beat_at=now, expected=1000, restored=0,
        computed=10, committed=10, committed_at=now, rate=1.0, batch_seconds=1.0, phase=Phase.WORKING,
        moved=now,
    )  # fmt: skip
    for number, (run, key) in enumerate(zip(runs, keys(settings), strict=False)):
        workers.write_record(replace(worker, run_id=run, partition=key, device=f"GPU-{number}"))


if __name__ == "__main__":
    main()
