"""What stands beside a figure of a GPU."""

import sys
from types import SimpleNamespace

from benchmarks.gpu_facts import gpu_readings


class OldDriver(SimpleNamespace):
    """nvidia-ml-py with a driver that knows few questions."""

    NVMLError = RuntimeError

    def __getattr__(self, name):
        def ask(*_):
            raise TypeError(f"{name} is unknown")

        return ask


def test_a_reading_that_fails_costs_no_figure(monkeypatch):
    """Guards: an unforeseen error of an optional reading is None, and the others are told."""
    driver = OldDriver(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda gpu: "H200",
        nvmlDeviceGetPowerUsage=lambda gpu: 69_500,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    (gpu,) = gpu_readings()
    assert (gpu["name"], gpu["watts"], gpu["celsius"], gpu["driver"]) == ("H200", 69.5, None, None)
