"""The figures of status for Prometheus, as gauges in its text format: ``vlm-assets status --prometheus``.

docs/operations.md lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from resources.alerts.outbox import Outbox
from vlm_assets.assets.partition_state import State
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.progress import doing
from vlm_assets.services.status import DeviceStatus, read_status
from vlm_assets.webserver.api import DagsterApi, DagsterApiError
from vlm_catalog.catalog import Catalog

DEVICE_STATES = ("working", "free", "left out", "away")
RUN_STATUSES = ("QUEUED", "STARTING", "STARTED")
SEVERITIES = ("error", "warning")


def metrics_of(settings: Settings) -> CollectorRegistry:
    """All figures of a home at this moment. Raises what status raises: none are better than wrong ones.

    A figure that is not known (a rate before the first row, the queue without Dagster) is left out.
    """
    advance = partial(doing, "reading where partitions stand")
    status = read_status(settings, Catalog.open(settings.home), advance=advance)
    open_alerts = Outbox(control_state(settings)).open_subjects().values()
    alerts: Counter[str] = Counter(alert.severity for alert in open_alerts)
    runs = _runs(status.dagster, settings.dagster_home)
    gauges = _Gauges(str(settings.home))
    gauges.add("status_timestamp_seconds", "When these figures were read, in unix time.", status.at)
    gauges.add("properties", "Properties in the catalogue.", status.properties)
    gauges.add("properties_in_tail", "Properties that are in no partition yet.", status.waiting_in_tail)
    gauges.add_each(
        "properties_done",
        "Properties whose row of the asset is committed or published, failed ones included.",
        ("asset",),
        {
            (asset,): sum(
                partition.usable_rows for partition in status.partitions if partition.asset == asset
            )
            for asset in status.assets
        },
    )
    gauges.add("properties_ok", "Published descriptions that came out right.", status.ok)
    gauges.add_each(
        "properties_failed",
        "Published rows of properties that could not be described, by kind of failure.",
        ("kind",),
        {(kind,): count for kind, count in status.failed_by_kind.items()},
    )
    gauges.add_each(
        "partitions",
        "Partitions of the asset in each state.",
        ("asset", "state"),
        {(asset, str(state)): status.counts(asset)[state] for asset in status.assets for state in State},
    )
    images_left = Counter[str]()
    for partition in status.partitions:
        images_left[partition.key] = max(images_left[partition.key], partition.images_left or 0)
    gauges.add("images_left", "Images that are still to be looked at.", images_left.total())
    gauges.add(
        "properties_per_second",
        "Descriptions committed per second of wall time, all devices together.",
        status.properties_per_second,
    )
    gauges.add(
        "left_seconds", "Seconds that the remaining descriptions take at this rate.", status.seconds_left
    )
    gauges.add_each(
        "device_state",
        "1 for the state that the device is in: working, free, left out (of use) or away (of this machine, or"
        " on a node that is silent). node: its machine in a cluster.",
        ("device", "node", "state"),
        {
            (device.id, device.node or "", state): float(state == _state_of(device))
            for device in status.devices
            for state in DEVICE_STATES
        },
    )
    gauges.add_each(
        "device_properties_per_second",
        "The device's share of the rate.",
        ("device", "node"),
        {(device.id, device.node or ""): device.properties_per_second or 0.0 for device in status.devices},
    )
    gauges.add_each(
        "device_temperature_celsius",
        "As its driver says, of the devices of a cluster.",
        ("device", "node"),
        {
            (device.id, device.node or ""): device.temperature
            for device in status.devices
            if device.temperature is not None
        },
    )
    gauges.add("uncopied_segments", "Committed segments that the store does not have yet.", status.uncopied)
    gauges.add("copy_lag_seconds", "How long the oldest of them has waited.", status.uncopied_seconds)
    gauges.add_each(
        "alerts_open",
        "Alerts that stand.",
        ("severity",),
        {(severity,): alerts[severity] for severity in SEVERITIES},
    )
    gauges.add("warnings", "What status could not read, or found odd.", len(status.warnings))
    gauges.add("paused", "1 while a person has paused everything.", status.paused is not None)
    gauges.add("dagster_up", "1 if Dagster's pages answer.", runs is not None)
    gauges.add_each("runs", "Runs by status; queued ones wait for a device.", ("status",), runs or {})
    return gauges.registry


class _Gauges:
    """Gauges of one home, each with its folder as the first label: one node exporter may serve several."""

    def __init__(self, home: str) -> None:
        self.registry = CollectorRegistry()
        self._home = home

    def add(self, name: str, meaning: str, value: float | None) -> None:
        self.add_each(name, meaning, (), {} if value is None else {(): value})

    def add_each(
        self, name: str, meaning: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> None:
        """One value for each tuple of labels' values."""
        gauge = Gauge(f"vlm_assets_{name}", meaning, ("home", *labels), registry=self.registry)
        for label_values, value in values.items():
            gauge.labels(self._home, *label_values).set(value)


def _state_of(device: DeviceStatus) -> str:
    if device.left_out is not None:
        return "left out"
    return "working" if device.partition is not None else "free" if device.is_here else "away"


def _runs(address: str | None, dagster_home: Path) -> dict[tuple[str, ...], float] | None:
    """How many runs Dagster has in each status; None where it does not answer."""
    if address is None:
        return None
    api = DagsterApi(address, dagster_home)
    try:
        return {(status.lower(),): api.runs_in(status) for status in RUN_STATUSES}
    except DagsterApiError:
        return None
