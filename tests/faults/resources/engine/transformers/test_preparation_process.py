"""The process that runs the processor, with its parent killed while it reads what decode workers wrote."""

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlm_assets.settings import EXAMPLE_MODEL

pytestmark = pytest.mark.timeout(180)

PARENT = """
import sys
import torch
from resources.images.decode_workers import DecodeWorkers
from resources.images.images import PropertyJob
from resources.engine.transformers.model_loading import ModelSource
from resources.images.pixel_memory import SharedImage
from resources.engine.transformers.preparation_process import PreparationProcess
jobs = [[PropertyJob("p", 0, (sys.argv[1],) * 9)]]
process = PreparationProcess(ModelSource(sys.argv[2]), "Describe.")
with DecodeWorkers(workers=1, prefetch_batches=1, max_pixels=10**6, max_images=9) as decode:
    [[one]] = decode.feed(jobs)
    assert all(isinstance(image, SharedImage) for image in one.images)
    assert process.ready(120)
    process.tensors([one.images], torch.float32)
    print(process.pid, *decode.pids, flush=True)
    while True:
        process.tensors([one.images], torch.float32)
"""


def links(pid):
    """What its descriptors are; those that it closes meanwhile are left out."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return found


def test_nothing_outlives_a_killed_parent(tmp_path):
    """Guards: fault 21: SIGKILL of the run at work leaves no process, and no memory with a name before it."""
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (600, 900, 3), dtype=np.uint8)).save(
        tmp_path / "large.jpg"
    )
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py", tmp_path / "large.jpg", EXAMPLE_MODEL],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        for pid in (parent.pid, *pids):
            assert not any("/dev/shm" in one for one in (*links(pid), Path(f"/proc/{pid}/maps").read_text()))
        assert any("memfd:pixels" in link for link in links(pids[1]))
        watches = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
        assert parent.wait() < 0
        assert all(select.select([watch], [], [], 20)[0] for watch in watches)
        for watch in watches:
            os.close(watch)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
