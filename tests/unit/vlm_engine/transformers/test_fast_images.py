"""Images are resized by torch, to the same pixels on any machine."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import ModelLoadError
from vlm_engine.transformers import fast_images
from vlm_engine.transformers.model_loading import load_processor


def test_each_kind_of_cpu_makes_the_same_pixels():
    """torch has a kernel for each kind of CPU: rows of one fingerprint come from the same pixels by all.

    A filter with other pixels raises; one that an older torch lacks (lanczos) is not asked.
    """
    flags = Path("/proc/cpuinfo").read_text()
    kinds = ["default", *(kind for kind in ("avx2", "avx512") if kind in flags)]
    # Torch chooses its kernels at the first call: each child of a process without one chooses anew.
    program = (
        "import os, sys, torch\n"
        "from vlm_engine.transformers import fast_images\n"
        "for kind in sys.argv[1:]:\n"
        "    os.environ['ATEN_CPU_CAPABILITY'] = kind\n"
        "    if os.fork() == 0:\n"
        "        alike = [number for number in fast_images._FILTERS if fast_images._resizes_alike(number)]\n"
        "        print(torch.backends.cpu.get_cpu_capability(), {2, 3} <= set(alike), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *kinds],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines() == [f"{kind.upper()} True" for kind in kinds]


@pytest.fixture(autouse=True)
def look_anew():
    """What this torch can do is looked at once a process."""
    fast_images._resizes_alike.cache_clear()
    yield
    fast_images._resizes_alike.cache_clear()


def test_a_filter_that_torch_lacks_is_left_to_pillow(model_folder, monkeypatch):
    """torch 2.11 has no lanczos: Idefics and SmolVLM are resized by Pillow, and other families do not ask."""
    import torch
    from transformers import Idefics3ImageProcessorPil, Qwen2VLImageProcessorPil

    asked, interpolate = [], torch.nn.functional.interpolate

    def older(image, *, mode, **options):
        asked.append(mode)
        if mode == "lanczos":
            raise ValueError("Anti-alias option is restricted to bilinear and bicubic modes")
        return interpolate(image, mode=mode, **options)

    monkeypatch.setattr(torch.nn.functional, "interpolate", older)
    images = [Image.effect_noise((90, 60), 80).convert("RGB")]
    options = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}}
    shown = [
        made(Idefics3ImageProcessorPil(**options, do_rescale=False, do_normalize=False))(images)
        for made in (fast_images.made_fast, lambda one: one)
    ]
    assert np.array_equal(*(np.asarray(one["pixel_values"]) for one in shown))
    asked.clear()
    fast_images.made_fast(Qwen2VLImageProcessorPil())(images)
    assert set(asked) == {"bicubic"}


def test_other_pixels_are_refused(model_folder, monkeypatch):
    """A torch that resizes otherwise does not add rows that count as the same."""
    monkeypatch.setattr(fast_images, "resized_digest", lambda mode: "other")
    with pytest.raises(ModelLoadError, match="resizes an image to other pixels"):
        load_processor(ModelSource(str(model_folder)))
