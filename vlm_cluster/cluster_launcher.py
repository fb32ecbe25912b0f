"""Who launches the runs of a cluster: Dagster's settings with Ray's launcher; the devices of all nodes."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_assets.config.extensions import KnownDevice, Launcher
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_durable.mirror.bucket import S3Folder
from vlm_durable.state.nodes import Nodes
from vlm_durable.state.workers import Workers
from vlm_engine.devices.left_out import LeftOutDevices

_TEMPLATE = Path(__file__).with_name("dagster-cluster.yaml")


def filled_in(store: S3Folder, *, devices_of_a_run: int) -> str:
    """The template with the folder of the store in which the output of runs is kept."""
    text = _TEMPLATE.read_text()
    text = text.replace("BUCKET #", f"{json.dumps(store.bucket)} #")
    text = text.replace("PREFIX\n", f"{json.dumps(logs_prefix(store))}\n")
    return text.replace("gpus: 1", f"gpus: {devices_of_a_run}")


def logs_prefix(store: S3Folder) -> str:
    """The prefix under which the store's bucket keeps the output of runs."""
    return f"{store.prefix}dagster-logs"


@dataclass(frozen=True)
class ClusterLauncher(Launcher):
    """Hands partitions to Ray, on nodes that beat.

    A run owns its devices, which the next run may be given on another node: model servers end at once. A
    launch by Ray takes 4 to 11 s, by Dagster's own launcher 2.1 to 2.7 s.
    """

    node: str = field(default_factory=socket.gethostname)
    has_sensors: bool = True
    idle_seconds: float = 1.0
    added_seconds: float = 8.0

    def dagster_settings(self, settings: Settings) -> str:
        """With the launcher that hands partitions to Ray."""
        assert settings.store is not None, "ClusterSettings has no address without a store"
        return filled_in(settings.store, devices_of_a_run=settings.devices_per_model)

    def devices(self, settings: Settings) -> tuple[Sequence[KnownDevice], tuple[str, ...]]:
        """Those of all nodes, of dead ones last."""
        nodes = Nodes(control_state(settings)).snapshot().nodes.values()
        devices = [
            KnownDevice(
                device.id,
                node.name,
                is_here=not node.is_dead,
                temperature=device.temperature,
                trouble="; ".join(filter(None, ("" if node.takes_runs else node.sentence(), device.trouble))),
            )
            for node in sorted(nodes, key=lambda node: node.is_dead)
            for device in node.record.devices
        ]
        silent = [node for node in nodes if not node.takes_runs and node.record.slots]
        return devices, tuple(f"Node {node.name}: {node.sentence()}." for node in silent)

    def listed_devices(self, settings: Settings) -> Sequence[Mapping[str, Any]]:
        """Those of all nodes, with who works on them."""
        state = control_state(settings)
        records = LeftOutDevices(state).records()
        at_work = {worker.device: worker for worker in Workers(state).living() if worker.device}
        listed = []
        for name, node in Nodes(state).snapshot().nodes.items():
            for device in node.record.devices:
                record, worker = records.get(device.id), at_work.get(device.id)
                use = "held" if worker is not None else "free" if node.takes_runs else "not used"
                if record is not None and record.left_out_at is not None:
                    use = "left out"
                sentences = [f"{name} {node.sentence()}."]
                if worker is not None:
                    sentences.append(f"It works on {worker.partition}, run {worker.run_id}.")
                if device.temperature is not None:
                    sentences.append(f"{device.temperature} °C.")
                if device.trouble:
                    sentences.append(device.trouble)
                if record is not None:
                    sentences.append(record.sentence(device.id))
                listed.append(
                    {
                        "id": device.id,
                        "node": name,
                        "name": device.name,
                        "state": use,
                        "temperature": device.temperature,
                        "sentences": sentences,
                    }
                )
        return listed
