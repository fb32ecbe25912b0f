"""A model is given the same tensors wherever they were prepared, and is given them whatever dies."""

import os
import signal
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from resources.engine.prompt import Prompt
from resources.engine.protocol import Attempt
from resources.engine.transformers.model_inputs import InputPreparation
from resources.engine.transformers.model_loading import ModelSource, load_processor
from resources.engine.transformers.preparation_process import PreparationLostError, PreparationProcess
from resources.images import nameless_memory
from resources.images.pixel_memory import PixelMemory

FIRST = Attempt(number=1, max_new_tokens=60)
PROMPT = Prompt("Describe the property.")


@pytest.fixture(scope="module")
def batches(load_property):
    return [[load_property(f"p{batch}{at}", 1 + at % 3) for at in range(3)] for batch in range(4)]


@pytest.fixture(scope="module")
def ready_process(model_folder):
    """A process that can be asked."""
    process = PreparationProcess(ModelSource(str(model_folder)), PROMPT.text)
    assert process.ready(wait_seconds=120)
    yield process
    process.close()


@pytest.fixture
def stopped_process(model_folder, monkeypatch):
    """One that said it was ready and will not say any more, and is not waited for for long."""
    monkeypatch.setattr("resources.engine.transformers.preparation_process._BATCH_SECONDS", 0.2)
    process = PreparationProcess(ModelSource(str(model_folder)), PROMPT.text)
    os.kill(process.pid, signal.SIGSTOP)
    process._ready = True
    yield process
    process.close()


@pytest.fixture
def preparation(model_folder):
    """Makes a preparation with a process or without."""
    import torch

    processor = load_processor(ModelSource(str(model_folder)))

    def prepare(*processes, at_once=1, dtype=torch.float32):
        return InputPreparation(
            processor, PROMPT, at_once=at_once, dtype=dtype, pinned=False, processes=processes
        )

    return prepare


@pytest.fixture
def in_shared_memory():
    """Has the images of a batch lie where decode workers write them."""
    memory = PixelMemory(max_pixels=70 * 70)

    def write(image):
        offset = memory.reserve()
        nameless_memory.write(memory.descriptor, image.tobytes(), offset)
        return memory.image(offset, *image.shape[:2])

    return lambda batch: [replace(one, images=[write(image) for image in one.images]) for one in batch]


def assert_equal(found, expected):
    assert found.prompt_tokens == expected.prompt_tokens
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].equal(tensor), name


def test_which_pixels_are_an_images_is_said_in_a_byte_each(model_folder, preparation, load_property):
    """Where tiles are padded, marks of 64 bits a pixel would be most of a batch; the model sees the same."""
    import torch
    from transformers import AutoModelForImageTextToText

    batch = [load_property("a", 2), load_property("b", 1)]
    tensors = preparation().take(batch, FIRST).tensors
    marks = tensors["pixel_attention_mask"]
    assert marks.dtype == torch.bool
    assert not marks.all()  # the second property has a tile less
    model = AutoModelForImageTextToText.from_pretrained(model_folder)
    with torch.inference_mode():
        by_bytes = model(**tensors).logits
        by_integers = model(**{**tensors, "pixel_attention_mask": marks.long()}).logits
    assert by_bytes.equal(by_integers)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_process_prepares_what_a_thread_does(
    shared, dtype, ready_process, preparation, batches, in_shared_memory, monkeypatch
):
    """Value for value, also where an attempt shows fewer images; nothing is prepared here any more."""
    import torch

    fewer = Attempt(number=2, max_new_tokens=60, images=1)
    here = preparation(dtype=getattr(torch, dtype))
    expected = [here._inputs(batches[1], FIRST), here._inputs(batches[2], fewer)]
    there = preparation(ready_process, dtype=getattr(torch, dtype))
    monkeypatch.setattr(there, "_a_processor", None)
    shown = [in_shared_memory(one) if shared else one for one in batches]
    there.prepare([shown[1]], FIRST)
    there.prepare([shown[2]], fewer)
    found = [there.take(shown[1], FIRST), there.take(shown[2], fewer)]
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


def test_pixels_and_tensors_are_not_sent(ready_process, in_shared_memory, load_property, monkeypatch):
    """Where images lie in shared memory, what passes through the connection does not grow with them."""
    import multiprocessing.connection

    sent = []
    send = multiprocessing.connection.Connection._send_bytes
    monkeypatch.setattr(
        multiprocessing.connection.Connection,
        "_send_bytes",
        lambda self, data: (sent.append(len(data)), send(self, data))[1],
    )
    [one] = in_shared_memory([load_property("p", 8)])
    import torch

    ready_process.tensors([one.images], torch.float32)
    assert sum(image.nbytes for image in one.images) > 20_000
    assert sum(sent) < 2_000


def test_a_long_run_piles_up_no_descriptors(ready_process, preparation, batches, in_shared_memory):
    """Neither of memory for pixels nor of that for tensors, on either side."""
    there = preparation(ready_process)

    def held():
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in ("self", ready_process.pid)]

    counts = []
    for batch in map(in_shared_memory, 4 * batches):
        there.prepare([batch], FIRST)
        there.take(batch, FIRST)
        counts.append(held())
    # The other side may be closing its own at this moment.
    assert all(max(one) < min(one) + 6 for one in zip(*counts, strict=True))


def test_until_it_is_ready_a_process_is_not_waited_for(model_folder, preparation, batches, monkeypatch):
    """The first batches of a run are prepared here, where it takes longer to start than the model."""
    process = PreparationProcess(ModelSource(str(model_folder)), PROMPT.text)
    os.kill(process.pid, signal.SIGSTOP)
    made = preparation(process)
    monkeypatch.setattr(made, "_made_by", None)
    made.prepare([batches[0]], FIRST)
    assert_equal(made.take(batches[0], FIRST), preparation()._inputs(batches[0], FIRST))
    made.close()


def test_a_killed_process_costs_no_batch(stopped_process, preparation, batches, caplog):
    """Its batches are prepared here from then on, and that is said once."""
    made = preparation(stopped_process)
    os.kill(stopped_process.pid, signal.SIGKILL)
    for batch in batches:
        made.prepare([batch], FIRST)
        assert_equal(made.take(batch, FIRST), made._inputs(batch, FIRST))
    assert len([one for one in caplog.messages if "from now on" in one]) == 1


def test_several_processes_share_the_batches(
    model_folder, ready_process, preparation, batches, monkeypatch, caplog
):
    """Each thread has one to itself; where one dies, the batch that it had is prepared here, others go on."""
    other = PreparationProcess(ModelSource(str(model_folder)), PROMPT.text)
    assert other.ready(wait_seconds=120)
    expected = [preparation()._inputs(batch, FIRST) for batch in batches]
    made = preparation(ready_process, other, at_once=2)
    asked = []
    tensors = PreparationProcess.tensors

    def noted(process, *arguments):
        both.wait(30)
        asked.append(process)
        return tensors(process, *arguments)

    monkeypatch.setattr(PreparationProcess, "tensors", noted)
    monkeypatch.setattr(made, "_a_processor", None)
    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        deque(threads.map(lambda batch: made.prepare([batch], FIRST), batches[:2]), maxlen=0)
    assert set(asked) == {ready_process, other}
    monkeypatch.setattr(PreparationProcess, "tensors", tensors)
    for at in (0, 1):
        assert_equal(made.take(batches[at], FIRST), expected[at])
    os.kill(other.pid, signal.SIGKILL)
    other._process.wait()
    made._idle.sort(key=lambda one: one is not other)  # the dead one is asked next
    monkeypatch.undo()
    for batch in batches[2:]:
        made.prepare([batch], FIRST)
    monkeypatch.setattr(made, "_a_processor", None)
    for at in (2, 3):
        assert_equal(made.take(batches[at], FIRST), expected[at])
    assert made._living == [ready_process]
    assert ["by 1 processes" in one for one in caplog.messages] == [True]


def test_a_process_that_hangs_is_given_up(stopped_process, preparation, batches):
    """A stopped process holds up one batch for as long as is allowed, and no other."""
    made = preparation(stopped_process)
    made.prepare([batches[1]], FIRST)
    assert not made._living
    assert_equal(made.take(batches[1], FIRST), made._inputs(batches[1], FIRST))


def test_a_process_that_takes_no_pixels_is_given_up(stopped_process):
    """A stopped process that is sent more than passes unread holds up nobody either."""
    import torch

    with pytest.raises(PreparationLostError, match="gone, or hangs"):
        stopped_process.tensors([[np.zeros((1000, 1000, 3), np.uint8)]], torch.float32)


def test_an_answer_that_comes_too_late_is_nobodys(stopped_process):
    """What gave no answer in time is ended, so that its answer is not taken for another batch's."""
    import torch

    with pytest.raises(PreparationLostError):
        stopped_process.tensors([[np.zeros((4, 4, 3), np.uint8)]], torch.float32)
    assert stopped_process._process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("place", ["recv_handle", "stored"])
def test_what_is_left_of_an_answer_is_nobodys(model_folder, monkeypatch, place):
    """Too little memory to take an answer in ends the process too: the next batch must not get the rest."""
    import torch

    def fail(*_):
        raise MemoryError

    process = PreparationProcess(ModelSource(str(model_folder)), PROMPT.text)
    assert process.ready(wait_seconds=120)
    monkeypatch.setattr(f"resources.engine.transformers.preparation_process.{place}", fail)
    with pytest.raises(PreparationLostError):
        process.tensors([[np.zeros((40, 40, 3), np.uint8)]], torch.float32)
    assert process._process.wait(10) == -signal.SIGKILL


def test_batches_prepared_out_of_order_are_kept(preparation, batches):
    """A batch that was long in preparing is not pushed out by the places of those that were taken."""
    made = preparation(at_once=2)
    for prepared in (1, 0, 2):
        made.prepare([batches[prepared]], FIRST)
        if prepared == 0:
            made.take(batches[0], FIRST)
            made.take(batches[1], FIRST)
    made.prepare([batches[3]], FIRST)
    made._processors = None
    assert made.take(batches[2], FIRST).prompt_tokens
    assert made.take(batches[3], FIRST).prompt_tokens


def test_a_model_that_cannot_be_loaded_there_says_so(tmp_path):
    """It is lost, not waited for."""
    process = PreparationProcess(ModelSource(str(tmp_path)), PROMPT.text)
    try:
        with pytest.raises(PreparationLostError):
            process.ready(wait_seconds=120)
    finally:
        process.close()
