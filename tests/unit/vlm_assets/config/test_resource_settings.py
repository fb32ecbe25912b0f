"""How many runs begin at once, by what computes."""

from pathlib import Path

import pytest

from resources.gpu import GpuResource
from vlm_assets.config.resource_settings import prepared_runs, runs_at_once
from vlm_assets.config.settings import Settings
from vlm_engine.devices.find import Device, DeviceError


@pytest.mark.parametrize(
    ("kinds", "changed", "runs"),
    [
        (["cpu"], {}, 1),
        (["cpu", "cpu"], {}, 2),
        (["cpu"], {"engine": "server", "server_url": "http://127.0.0.1:9/v1"}, 2),
        (["cuda"], {"engine": "transformers"}, 2),
        (["cuda"] * 8, {"engine": "transformers"}, 9),
    ],
)
def test_one_run_is_prepared_for_the_next_device(kinds, changed, runs, tmp_path: Path, monkeypatch) -> None:
    """No device waits for a process to start; runs on the CPU's cores have them to themselves."""
    devices = [Device(f"{kind}-{number}", kind, "", None, "") for number, kind in enumerate(kinds)]
    monkeypatch.setattr(GpuResource, "find", lambda self: devices)
    assert runs_at_once(Settings(_env_file=None, home=tmp_path, **changed)) == runs


def test_a_driver_that_is_silent_moves_no_limit(tmp_path: Path, monkeypatch) -> None:
    """Else the pool's limit would look like one that a person set, and stay too low for good."""

    def silent(self: GpuResource) -> list[Device]:
        raise DeviceError("the driver does not answer")

    def one_gpu(self: GpuResource) -> list[Device]:
        return [Device("GPU-1", "cuda", "", None, "")]

    settings = Settings(_env_file=None, home=tmp_path, engine="transformers")
    for find in (silent, one_gpu, silent):
        monkeypatch.setattr(GpuResource, "find", find)
        assert prepared_runs(settings) == 1
