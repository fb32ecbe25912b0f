"""The GPU resource as Dagster sees it: settings in, a leased and pinned device out. No logic of its own."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from dagster import ConfigurableResource
from pydantic import Field

from resources.gpu.devices import Device, find_devices
from resources.gpu.health import HealthCheck
from resources.gpu.lease_records import LeaseHolder
from resources.gpu.leases import DeviceLeases, Lease
from resources.gpu.nvml import DriverNvml
from resources.gpu.process_lease import lease_for_process


class GpuResource(ConfigurableResource["GpuResource"]):
    """Leases one device to the process that materializes, and makes it the only one that CUDA sees there."""

    leases_directory: str = Field(description="Where the locks are kept: a local disk, one for all runs.")
    devices: str = Field("auto", description="auto, given, cpu, cpu:N, or a list of numbers or UUIDs.")
    wait_seconds: float = Field(600.0, ge=0, description="How long to wait for a free device.")
    min_free_memory_gib: float = Field(0.0, ge=0, description="Refuse a GPU with less free memory.")

    def find(self) -> list[Device]:
        """The devices that the settings mean on this machine. Raises DeviceError."""
        return find_devices(self.devices, os.environ)

    def leases(self) -> DeviceLeases:
        """The leases of those devices, refusing sick ones; ``holders()`` of it says who has which."""
        health = HealthCheck(DriverNvml(), min_free_bytes=round(self.min_free_memory_gib * (1 << 30)))
        return DeviceLeases(Path(self.leases_directory), self.find(), health)

    def lease(self, *, run_id: str, partition: str, step: str, log: logging.Logger) -> Lease:
        """This process's device, pinned; the same at every call, and held until the process ends.

        Raises NoDeviceFreeError after ``wait_seconds``, PinnedElsewhereError where torch already runs CUDA
        on something else, and the other children of DeviceError.
        """
        holder = LeaseHolder(run_id=run_id, partition=partition, step=step)
        return lease_for_process(self.leases, holder, wait_seconds=self.wait_seconds, log=log)
