"""A model is given the same tensors wherever they were prepared, and is given them whatever dies."""

import os
import signal

import pytest

from resources.vlm.engine import Attempt
from resources.vlm.model_inputs import InputPreparation
from resources.vlm.model_loading import ModelSource, load_processor
from resources.vlm.preparation_process import PreparationLostError, PreparationProcess
from resources.vlm.prompt import Prompt

FIRST = Attempt(number=1, max_new_tokens=60)
PROMPT = Prompt("Describe the property.")


@pytest.fixture(scope="module")
def batches(load_property):
    return [[load_property(f"p{batch}{at}", 1 + at % 3) for at in range(3)] for batch in range(4)]


@pytest.fixture
def preparation(model_folder):
    """Begins a process with its first batch."""
    import torch

    source = ModelSource(str(model_folder))
    made = InputPreparation(
        load_processor(source),
        PROMPT,
        at_once=1,
        dtype=torch.float32,
        pinned=False,
        elsewhere=source,
        prepared_here=0,
    )
    yield made
    made.close()


@pytest.fixture
def working(preparation, batches):
    """The preparation, its process begun and ready."""
    preparation.prepare([batches[0]], FIRST)
    assert preparation._process.ready(wait_seconds=120)
    return preparation


def assert_equal(found, expected):
    assert found.prompt_tokens == expected.prompt_tokens
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].equal(tensor), name


def test_a_process_prepares_what_a_thread_does(working, batches, monkeypatch):
    """Value for value, also where an attempt shows fewer images; nothing is prepared here any more."""
    fewer = Attempt(number=2, max_new_tokens=60, images=1)
    expected = [working._inputs(batches[1], FIRST), working._inputs(batches[2], fewer)]
    with monkeypatch.context() as patched:
        patched.setattr(working, "_a_processor", None)
        working.prepare([batches[1]], FIRST)
        working.prepare([batches[2]], fewer)
        found = [working.take(batches[1], FIRST), working.take(batches[2], fewer)]
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


def test_a_killed_process_costs_no_batch(working, batches, caplog):
    """Its batches are prepared here from then on, and that is said once."""
    os.kill(working._process.pid, signal.SIGKILL)
    for batch in batches[1:]:
        working.prepare([batch], FIRST)
        assert_equal(working.take(batch, FIRST), working._inputs(batch, FIRST))
    assert len([one for one in caplog.messages if "from now on" in one]) == 1


def test_a_process_that_hangs_is_given_up(working, batches, monkeypatch):
    """A stopped process holds up one batch for as long as is allowed, and no other."""
    monkeypatch.setattr("resources.vlm.preparation_process._BATCH_SECONDS", 0.2)
    os.kill(working._process.pid, signal.SIGSTOP)
    working.prepare([batches[1]], FIRST)
    assert working._process is None
    assert_equal(working.take(batches[1], FIRST), working._inputs(batches[1], FIRST))


def test_batches_prepared_out_of_order_are_kept(model_folder, batches):
    """A batch that was long in preparing is not pushed out by the places of those that were taken."""
    import torch

    processor = load_processor(ModelSource(str(model_folder)))
    made = InputPreparation(processor, PROMPT, at_once=2, dtype=torch.float32, pinned=False)
    for prepared in (1, 0, 2):
        made.prepare([batches[prepared]], FIRST)
        if prepared == 0:
            made.take(batches[0], FIRST)
            made.take(batches[1], FIRST)
    made.prepare([batches[3]], FIRST)
    made._processors = None
    assert made.take(batches[2], FIRST).prompt_tokens
    assert made.take(batches[3], FIRST).prompt_tokens


def test_a_short_run_starts_no_process(model_folder, batches):
    """What would cost more than it saves is not begun."""
    import torch

    source = ModelSource(str(model_folder))
    processor = load_processor(source)
    made = InputPreparation(
        processor, PROMPT, at_once=1, dtype=torch.float32, pinned=False, elsewhere=source, prepared_here=3
    )
    for batch in batches[:3]:
        made.prepare([batch], FIRST)
    assert made._process is None


def test_a_model_that_cannot_be_loaded_there_says_so(tmp_path):
    """It is lost, not waited for."""
    process = PreparationProcess(ModelSource(str(tmp_path)), PROMPT.text)
    try:
        with pytest.raises(PreparationLostError):
            process.ready(wait_seconds=120)
    finally:
        process.close()
