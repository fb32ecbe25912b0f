"""The driver, the verdict and the pinning against a real GPU. Not collected by `make test`; run with
`pytest tests/gpu` on a machine that has one (without one these tests fail, they are never skipped).

CUDA is asked through its driver library, so that no CUDA build of torch is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_engine.devices.find import DriverNvml, find_devices
from vlm_engine.devices.health import HealthCheck

LEASE_AND_ASK_CUDA = """
import ctypes, json, logging, sys, uuid
from resources.gpu import GpuResource

gpu = GpuResource(leases_directory=sys.argv[1], wait_seconds=0)
lease = gpu.lease(run_id="run", partition="p", step="s", log=logging.getLogger())
cuda = ctypes.CDLL("libcuda.so.1")
count, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
assert cuda.cuDeviceGetUuid_v2(ctypes.byref(raw), 0) == 0
print(json.dumps({"leased": lease.device.id, "count": count.value, "cuda": str(uuid.UUID(bytes=bytes(raw)))}))
"""


def smi(fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line.split(", ") for line in lines]


@pytest.mark.needs_gpu("tests/unit/vlm_engine/devices/test_nvml.py::test_a_gpu_is_read_whole")
def test_readings_agree_with_nvidia_smi() -> None:
    """Ids, names and memory are what nvidia-smi shows, in its order (GPUs that are not in MIG mode)."""
    readings = [reading for reading in DriverNvml().readings() if reading.uuid.startswith("GPU-")]
    assert [[str(r.index), r.uuid, r.name] for r in readings] == smi("index,uuid,name")
    for reading, (total,) in zip(readings, smi("memory.total"), strict=True):
        assert reading.memory_bytes is not None
        assert reading.free_bytes is not None
        assert abs(reading.memory_bytes / (1 << 20) - int(total)) < 1024
        assert 0 < reading.free_bytes <= reading.memory_bytes


@pytest.mark.needs_gpu("tests/unit/vlm_engine/devices/test_nvml.py::test_what_a_gpu_does_not_report_is_none")
def test_a_data_centre_gpu_reports_what_a_verdict_needs() -> None:
    """ECC, recovery action and throttle reasons are read, not silently None, where the GPU has them."""
    readings = DriverNvml().readings()
    assert readings
    for reading in readings:
        assert reading.fault is None
        assert reading.throttle_reasons is not None
        if any(name in reading.name for name in ("A100", "H100", "H200", "B200")):
            assert reading.uncorrected_ecc is not None
            assert reading.recovery_action is not None


@pytest.mark.needs_gpu(
    "tests/unit/vlm_engine/devices/test_health.py::test_a_sick_gpu_is_refused_in_one_sentence"
)
def test_the_memory_limit_refuses_a_real_gpu() -> None:
    """Asked for more than there is, each device is refused in a sentence; else none is, for memory."""
    for device in find_devices("auto", {}):
        assert device.memory_bytes is not None
        greedy = HealthCheck(DriverNvml(), min_free_bytes=device.memory_bytes + 1)
        assert any("GiB of free memory" in sentence for sentence in greedy(device))
        assert not any("memory and" in sentence for sentence in HealthCheck(DriverNvml())(device))


@pytest.mark.needs_gpu(
    "tests/unit/vlm_engine/devices/test_process_lease.py::test_a_gpu_is_the_only_one_that_cuda_sees"
)
def test_cuda_sees_only_the_leased_device(tmp_path: Path) -> None:
    """After the lease CUDA has one device, and it is the one whose lock is held."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    answer = subprocess.run(
        [sys.executable, "-c", LEASE_AND_ASK_CUDA, tmp_path], env=environment, check=True, capture_output=True
    )
    said = json.loads(answer.stdout)
    assert said["count"] == 1
    assert said["leased"].partition("-")[2] == said["cuda"]
