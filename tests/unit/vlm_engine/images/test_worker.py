"""Memory that has no name: what is put there comes out, and nobody who maps it dies of another's doing."""

import inspect
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from vlm_engine.images import worker
from vlm_engine.images.images import Made
from vlm_engine.images.worker import Parcel, Progress, Task, create, pack, unpack

ARRAYS = {
    "pixels": np.random.default_rng(1).standard_normal((2, 3, 5)).astype(np.float32),
    "ids": np.arange(7, dtype=np.int64),
    "turned": np.arange(12, dtype=np.int32).reshape(3, 4).T,
    "none": np.zeros((0, 4), np.float32),
    "one": np.array(True),
}


@pytest.mark.parametrize("names", [list(ARRAYS), ["none"], []])
def test_arrays_come_out_as_they_went_in(names):
    """Guards: tensors of a process are the worker's: values, types and shapes, also of what is empty."""
    descriptor, address = pack(Parcel({name: ARRAYS[name] for name in names}, {"odd": "name \udcff"}))
    found = unpack(descriptor, address)
    os.close(descriptor)
    assert list(found.arrays) == names
    assert found.note == {"odd": "name \udcff"}
    for name in names:
        assert found.arrays[name].dtype == ARRAYS[name].dtype
        np.testing.assert_array_equal(found.arrays[name], ARRAYS[name])


def test_what_a_model_writes_into_its_tensors_stays_its_own():
    """Guards: tensors can be written to, as those of a processor can; nobody else sees that."""
    descriptor, address = pack(Parcel({"ids": ARRAYS["ids"]}, None))
    unpack(descriptor, address).arrays["ids"][:] = 0
    np.testing.assert_array_equal(unpack(descriptor, address).arrays["ids"], ARRAYS["ids"])
    os.close(descriptor)


def test_no_other_process_can_take_it_away():
    """Guards: a process that reads memory which another makes smaller is not ended by a SIGBUS."""
    descriptor = create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_memory_that_can_shrink_is_refused():
    """Guards: a worker that went wrong cannot hand over memory that it could take away."""
    descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.write(descriptor, b'{"arrays": [], "note": null}')
    with pytest.raises(ValueError, match="change its size"):
        unpack(descriptor, bytes(8))
    os.close(descriptor)


@pytest.mark.parametrize(
    ("dtype", "shape", "offset"), [("|O", [1], 0), ("<f4", [9999], 0), ("<f4", [1], 1 << 40)]
)
def test_arrays_that_are_not_there_are_refused(dtype, shape, offset):
    """Guards: what a worker says of its arrays is believed within its memory, and pointers never."""
    import json

    told = json.dumps({"arrays": [["a", dtype, shape, offset]], "note": None}).encode()
    descriptor = create(len(told))
    os.pwrite(descriptor, told, 0)
    with pytest.raises((ValueError, TypeError)):
        unpack(descriptor, bytes(8))
    os.close(descriptor)


BIG, SMALL = 4500, 40


def in_a_new_process(test):
    """Run a test in a pytest of its own: memory that earlier tests gave back would be used before a limit."""

    def test_alone(request):
        if os.environ.get("TESTS_OF_A_NEW_PROCESS"):
            names = inspect.signature(test).parameters
            return test(**{name: request.getfixturevalue(name) for name in names})
        # Without the fixtures of the folders above: their imports take seconds.
        options = ["-q", "-p", "no:cacheprovider", "--confcutdir", str(Path(__file__).parent)]
        command = [sys.executable, "-m", "pytest", *options, request.node.nodeid]
        done = subprocess.run(
            command,
            cwd=request.config.rootpath,
            env={**os.environ, "TESTS_OF_A_NEW_PROCESS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return None

    test_alone.__name__, test_alone.__doc__ = test.__name__, test.__doc__
    return test_alone


@pytest.fixture
def pictures(tmp_path: Path) -> tuple[str, ...]:
    """Two small files: one takes 81 MB when it is decoded, the other nearly nothing."""
    for name, side in (("big", BIG), ("small", SMALL)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{name}.png", compress_level=1)
    return str(tmp_path / "big.png"), str(tmp_path / "small.png")


def answer(paths: tuple[str, ...], make=lambda images: Made()) -> Parcel:
    """What a worker answers for one property."""
    descriptor = create(Progress.BYTES)
    try:
        return worker._answer(Task(1, paths, BIG * BIG, 4), {}, Progress(descriptor), make)
    finally:
        os.close(descriptor)


@in_a_new_process
def test_an_image_that_wants_too_much_memory_fails_by_itself(pictures, monkeypatch):
    """Guards: it costs its image and nothing else: the next ones, the output and the machine go on."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert answer(pictures).note["seen"] == 2, "with the product's limit both are decoded"
    monkeypatch.setattr(worker, "DECODE_BYTES", 24 << 20)
    made = []

    def make(images):
        # The limit is for decoding: what a processor needs is another matter.
        made.append(len(np.ones(BIG * BIG // 2).tobytes()))
        return Made()

    note = answer(pictures, make).note
    (failure,) = note["failed"]
    assert failure[:2] == (0, "out_of_memory")
    assert "VLM_ASSETS_DECODE_WORKERS" in failure[2]
    assert (note["seen"], note["refusal"]) == (1, None)
    assert made == [BIG * BIG * 4]
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@in_a_new_process
def test_a_heic_without_memory_is_not_called_damaged(tmp_path, monkeypatch):
    """Guards: libheif says "damaged" where memory is short; that would be for ever, and memory comes back."""
    pillow_heif.register_heif_opener()
    Image.new("RGB", (1200, 900)).save(tmp_path / "a.heic")
    for more, kinds in ((2 << 20, ["out_of_memory"]), (6 << 20, ["out_of_memory"]), (3 << 30, [])):
        monkeypatch.setattr(worker, "DECODE_BYTES", more)
        assert [one[1] for one in answer((str(tmp_path / "a.heic"),)).note["failed"]] == kinds


@in_a_new_process
def test_a_lower_limit_of_the_process_stays(pictures):
    """Guards: an administrator's `ulimit -v` stays as it is, and holds in a worker too."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    lower = used + (24 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (lower, before[1]))
    try:
        note = answer(pictures).note
        after = resource.getrlimit(resource.RLIMIT_AS)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert [one[:2] for one in note["failed"]] == [(0, "out_of_memory")]
    assert (note["seen"], after[0]) == (1, lower)
