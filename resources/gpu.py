"""The GPU resource: settings in, a leased and pinned device out.

A plain object, not a configurable Dagster resource: run config cannot set any of its fields.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vlm_durable.state.database import ControlState, open_state
from vlm_engine.devices.find import Device, DriverNvml, find_devices, grouped
from vlm_engine.devices.health import HealthCheck
from vlm_engine.devices.leases import (
    DeviceLeases,
    Lease,
    LeaseHolder,
    NoDeviceFreeError,
    WillBeFree,
    lease_for_process,
)
from vlm_engine.devices.left_out import LeftOutDevices, at_work_on, device_failure, is_impossible_result
from vlm_engine.devices.loaded_servers import LoadedServerError, LoadedServers

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuResource:
    """Leases one device to the process that materializes, and makes it the only one that CUDA sees there.

    leases_directory: folder of the locks, on a local disk, the same for all runs. devices: auto, given, cpu,
    cpu:N, or a list of numbers or UUIDs. wait_seconds: how long to wait for a device that nobody works on.
    min_free_memory_gib: refuse a GPU with less free memory. per_model: GPUs that work on one model and count
    as one device. state: the database that lists the devices left out; None: the one beside the leases'
    folder. node: this machine's name in a cluster, else empty.
    """

    leases_directory: str
    devices: str = "auto"
    wait_seconds: float = 600.0
    min_free_memory_gib: float = 0.0
    per_model: int = 1
    state: ControlState | None = None
    node: str = ""

    def find(self) -> list[Device]:
        """The devices of this machine that the settings name. Raises DeviceError."""
        return grouped(find_devices(self.devices, os.environ, node=self.node), self.per_model)

    def left_out_devices(self) -> LeftOutDevices:
        """The devices that failed twice."""
        return LeftOutDevices(self._control_state)

    @property
    def home(self) -> str:
        """The home that a lease is for, as its record names it."""
        return str(self._control_state.directory.resolve())

    @property
    def _control_state(self) -> ControlState:
        return self.state or open_state(Path(self.leases_directory).parent)

    def usable(self) -> list[Device]:
        """The devices of this machine that are not left out. Raises DeviceError, ControlStateError."""
        left_out = self.left_out_devices().left_out()
        return [device for device in self.find() if left_out.keys().isdisjoint({device.id, *device.members})]

    def loaded_servers(self) -> LoadedServers:
        """The model servers that stay loaded on the devices, kept beside the leases' folder."""
        return LoadedServers(Path(self.leases_directory).parent)

    def leases(self, *, server_digest: str | None = None, log: logging.Logger = _log) -> DeviceLeases:
        """The leases of those devices; a sick device is refused. ``holders()`` says who holds which device.

        Devices that have failed before come last; those that failed twice are refused. server_digest: of the
        model server that the run will use. A device on which it is loaded comes first, and its memory counts
        as the run's. Any other server is ended before the free memory of its device is measured.
        """
        health = HealthCheck(DriverNvml(), min_free_bytes=round(self.min_free_memory_gib * (1 << 30)))
        left_out = self.left_out_devices()
        records = left_out.records()
        servers = self.loaded_servers()
        loaded = {server.device: server.digest for server in servers.living()}

        def refusals(device: Device) -> Sequence[str]:
            records_left_out = left_out.left_out()
            ids = dict.fromkeys((device.id, *device.members))
            sentences = [records_left_out[id_].sentence(id_) for id_ in ids if id_ in records_left_out]
            if sentences:
                return sentences
            try:
                stays = servers.end_unless(device.id, server_digest, log)
            except LoadedServerError as error:
                return [str(error)]
            check = replace(health, min_free_bytes=0) if stays else health
            return check(device)

        def preference(device: Device) -> tuple[int, bool]:
            failures = len(records[device.id].failures) if device.id in records else 0
            return failures, server_digest is not None and loaded.get(device.id) != server_digest

        devices = sorted(self.find(), key=preference)
        at_once = len(devices)
        if self.node:
            # A run of a cluster is shown only its own devices: the others of the machine count too.
            at_once = max(at_once, len(find_devices("auto", {})) // self.per_model)
        devices = [replace(device, at_once=at_once) for device in devices]
        return DeviceLeases(Path(self.leases_directory), devices, refusals)

    def lease(
        self,
        *,
        run_id: str,
        partition: str,
        step: str,
        log: logging.Logger,
        server_digest: str | None = None,
        will_be_free: WillBeFree | None = None,
    ) -> Lease:
        """This process's device, pinned; the same at every call, and held until the process ends.

        server_digest: see ``leases``. will_be_free: see ``DeviceLeases.acquire``.

        Raises NoDeviceFreeError after ``wait_seconds``. It waits that long even if every device is left out:
        a device may be taken back meanwhile, and a backfill's queue must not fail run by run at once. Raises
        DeviceError if torch already runs CUDA on another device, and the other children of DeviceError.
        """
        holder = LeaseHolder(run_id, partition, step, self.home)
        try:
            return lease_for_process(
                partial(self.leases, server_digest=server_digest, log=log),
                holder,
                wait_seconds=self.wait_seconds,
                log=log,
                will_be_free=will_be_free,
            )
        except NoDeviceFreeError:
            reasons = self.why_all_left_out()
            if reasons is None:
                raise
            raise NoDeviceFreeError(
                f"No device is left to work on, and none was taken back within {self.wait_seconds:.0f} s."
                f" {reasons}"
            ) from None

    @contextlib.contextmanager
    def blame(self, device: Device, *, asset: str, partition: str, log: logging.Logger) -> Iterator[None]:
        """Record device errors and impossible results against the device, once per partition, then re-raise.

        An impossible result that another device repeats counts only against the first device.
        """
        try:
            yield
        except Exception as error:
            why = device_failure(error)
            if why is not None and self.left_out_devices().note_failure(
                device.id,
                occurrence=at_work_on(asset, partition),
                why=why,
                on_one_device=is_impossible_result(error),
            ):
                log.error("%s has failed twice and is left out from now on.", device.id)
            raise

    def why_all_left_out(self) -> str | None:
        """Why each device is left out, if every device is; else None. Raises DeviceError.

        A device that a cluster gave counts as usable, whatever is recorded against it.
        """
        left_out = self.left_out_devices().left_out()
        if not left_out:
            return None
        devices = self.find()
        if any(device.id not in left_out or device.given for device in devices):
            return None
        return " ".join(left_out[device.id].sentence(device.id) for device in devices)
