"""A model is given the same tensors wherever they were made: in workers, a property at a time, or here."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.shares import share_of
from vlm_engine.images.images import Pixels, PropertyJob
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.model_source import ModelSource
from vlm_engine.prompt import Prompt
from vlm_engine.protocol import Attempt, EngineError
from vlm_engine.transformers import model_inputs
from vlm_engine.transformers.collation import Tensors
from vlm_engine.transformers.model_inputs import InputPreparation
from vlm_engine.transformers.model_loading import load_processor

DTYPES = share_of(["float32", "bfloat16"], 2)
"""For each, a worker of its own loads the model's processor."""
FIRST = Attempt(number=1, max_new_tokens=60)
PROMPT = Prompt("Describe the property.")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Properties of one to four images of many sizes; of one of them an image is broken."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(5)
    jobs = []
    for number in range(6):
        paths = [folder / f"{number}-{at}.png" for at in range(1 + number % 4)]
        for path in paths:
            noise = random.integers(0, 256, (*random.integers(20, 200, 2), 3), dtype=np.uint8)
            Image.fromarray(noise).save(path)
        jobs.append(PropertyJob(f"p{number}", number, tuple(map(str, paths))))
    Path(jobs[3].image_uris[1]).write_bytes(b"broken")
    return jobs


@pytest.fixture
def preparation(model_folder):
    """Make a preparation for floats of some type."""
    import torch

    processor = load_processor(ModelSource(str(model_folder)))
    return lambda dtype="float32": InputPreparation(
        processor, PROMPT, dtype=getattr(torch, dtype), pinned=False
    )


@pytest.fixture(scope="module")
def pool():
    """A pool of one worker for each output: tensors of some type, or pixels."""
    with ExitStack() as closing:

        @cache
        def started(output):
            options = {"prefetch_batches": 1, "max_pixels": 1 << 20, "max_images": 9}
            return closing.enter_context(WorkerPool(output, workers=1, **options))

        yield started


@pytest.fixture
def load(pool):
    """Load properties in a worker."""
    return lambda jobs, output: next(pool(output).feed([jobs]))


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
    tensors = preparation().for_chunk(batch, FIRST).tensors
    marks = tensors["pixel_attention_mask"]
    assert marks.dtype == torch.bool
    assert not marks.all()  # the second property has a tile less
    model = AutoModelForImageTextToText.from_pretrained(model_folder)
    with torch.inference_mode():
        by_bytes = model(**tensors).logits
        by_integers = model(**{**tensors, "pixel_attention_mask": marks.long()}).logits
    assert by_bytes.equal(by_integers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_workers_make_what_the_processor_makes_of_a_batch(dtype, model_folder, preparation, jobs, pool, load):
    """Guards: joined tensors are the processor's own batch bit for bit, also after a failed image, for any
    part of a batch, and where an attempt shows fewer images."""
    output = Tensors(ModelSource(str(model_folder)), PROMPT.text, dtype)
    tensors = load(jobs, output)
    pixels = load(jobs, Pixels())
    template = Path(f"/proc/{pool(output).pids[0]}/stat").read_text().rpartition(")")[2].split()[1]
    assert len(list(Path(f"/proc/{template}/task").iterdir())) == 1  # nothing else runs where it forks
    assert [one.seen for one in tensors] == [one.seen for one in pixels] == [1, 2, 3, 3, 1, 2]
    assert [len(one.failed) for one in tensors] == [0, 0, 0, 1, 0, 0]
    assert all(one.tensors and not one.images for one in tensors)
    made = preparation(dtype)
    fewer = Attempt(number=2, max_new_tokens=60, images=2)
    for part in (slice(None), slice(1, 4), slice(2, 3)):
        for attempt in (FIRST, fewer):
            assert_equal(made.for_chunk(tensors[part], attempt), made.for_chunk(pixels[part], attempt))


def test_a_family_that_cannot_be_joined_is_processed_as_a_whole(model_folder, preparation, jobs, monkeypatch):
    """Guards: where joined tensors would not be the processor's own, workers hand over pixels."""
    monkeypatch.setattr("vlm_engine.transformers.collation.learn_joins", lambda *_: None)
    make = Tensors(ModelSource(str(model_folder)), PROMPT.text, "float32").load()
    made = make([Image.new("RGB", (30, 20))])
    assert not made.tensors
    assert made.images[0].shape == (20, 30, 3)


def test_images_that_have_gone_meanwhile_cost_their_property(model_folder, preparation, jobs, load):
    """Guards: a retry with fewer images that finds none is that property's error, and no wait."""
    [one] = load(jobs[2:3], Tensors(ModelSource(str(model_folder)), PROMPT.text, DTYPES[0]))
    for path in jobs[2].image_uris:
        Path(path).rename(f"{path}.away")
    try:
        with pytest.raises(EngineError, match="can no longer be read"):
            preparation().for_chunk([one], Attempt(number=2, max_new_tokens=60, images=1))
    finally:
        for path in jobs[2].image_uris:
            Path(f"{path}.away").rename(path)


def test_a_retry_shows_the_images_that_the_row_lists(model_folder, preparation, jobs, load):
    """A retry with fewer images shows the first of those that could be read at first, or none: not others."""
    [one] = load(jobs[3:4], Tensors(ModelSource(str(model_folder)), PROMPT.text, DTYPES[0]))
    first, broken = map(Path, jobs[3].image_uris[:2])
    fewer = Attempt(number=2, max_new_tokens=60, images=2)
    expected = preparation(DTYPES[0]).for_chunk([one], fewer)
    content = broken.read_bytes()
    try:
        broken.write_bytes(first.read_bytes())
        assert_equal(preparation(DTYPES[0]).for_chunk([one], fewer), expected)
        first.rename(f"{first}.away")
        with pytest.raises(EngineError, match="can no longer be read"):
            preparation().for_chunk([one], fewer)
    finally:
        broken.write_bytes(content)
        Path(f"{first}.away").rename(first)


def test_what_was_prepared_is_kept_in_any_order(preparation, load_property):
    """A batch that was long in preparing is not pushed out by the places of those that were taken."""
    batches = [[load_property(f"p{batch}{at}", 1 + at % 3) for at in range(3)] for batch in range(4)]
    made = preparation()
    for prepared in (1, 0, 2):
        made.prepare([batches[prepared]], FIRST)
        if prepared == 0:
            made.for_chunk(batches[0], FIRST)
            made.for_chunk(batches[1], FIRST)
    made.prepare([batches[3]], FIRST)
    made._processors = None
    assert made.for_chunk(batches[2], FIRST).prompt_tokens
    assert made.for_chunk(batches[3], FIRST).prompt_tokens


def test_a_batch_larger_than_the_bound_is_not_pinned(monkeypatch):
    """Memory that nobody else can use is bounded; a larger batch is copied by the slower way."""
    import torch

    monkeypatch.setattr(model_inputs, "PINNED_BYTES", 3)
    batch = {"pixel_values": torch.zeros(1)}
    assert model_inputs._pinned(batch) is batch
