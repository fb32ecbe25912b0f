"""Which devices the ranks of a training see."""

import logging
from types import SimpleNamespace

from resources.devices import find, process_lease, resource
from resources.devices.leases import LeaseHolder
from resources.devices.nvml import GpuReading
from resources.devices.resource import GpuResource
from vlm_assets.assets.description_model import TrainingWork

LOG = logging.getLogger("test_description_model")


def test_each_rank_has_a_gpu_of_its_own_and_none_is_waited_for(tmp_path, monkeypatch, caplog):
    """The lease of the run hides the other GPUs from it, not from its ranks; too few only warn."""
    gpus = [GpuReading(number, f"GPU-{number}", "H100", 80 << 30) for number in range(2)]
    for module in (find, resource):
        monkeypatch.setattr(module.DriverNvml, "readings", lambda _: gpus)
    monkeypatch.setattr(process_lease, "_lease", None)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "as before")  # put back afterwards
        monkeypatch.delenv(name)
    gpu = GpuResource(leases_directory=str(tmp_path / "leases"))
    work = SimpleNamespace(name="tiny", plan=SimpleNamespace(ranks=3))
    context = SimpleNamespace(log=LOG)
    try:
        with TrainingWork.devices(work, gpu, LeaseHolder("run", "tiny", "train"), context) as devices:
            assert devices == ["GPU-0", "GPU-1"]
    finally:
        process_lease._lease.release()
    assert "Going on with 2 of 3 ranks: No device came free" in caplog.text
