"""Images are resized by torch, to the same pixels on any machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resources.engine.model_source import ModelSource
from resources.engine.protocol import ModelLoadError
from resources.engine.transformers import fast_images
from resources.engine.transformers.model_loading import load_processor


def test_each_kind_of_cpu_makes_the_same_pixels():
    """torch has a kernel for each kind of CPU: rows of one fingerprint come from the same pixels by all."""
    flags = Path("/proc/cpuinfo").read_text()
    for kind in ("default", *(one for one in ("avx2", "avx512") if one in flags)):
        program = (
            "import torch\n"
            "from resources.engine.transformers.fast_images import _RESIZED, resized_digest\n"
            "print(torch.backends.cpu.get_cpu_capability(), resized_digest() == _RESIZED)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "ATEN_CPU_CAPABILITY": kind, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.split() == [kind.upper(), "True"]


def test_other_pixels_are_refused(model_folder, monkeypatch):
    """A torch that resizes otherwise does not add rows that count as the same."""
    monkeypatch.setattr(fast_images, "resized_digest", lambda: "other")
    fast_images._fast.cache_clear()
    with pytest.raises(ModelLoadError, match="resizes an image to other pixels"):
        load_processor(ModelSource(str(model_folder)))
