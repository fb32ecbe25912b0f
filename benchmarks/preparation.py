"""A thread or a process for the processor: python -m benchmarks.preparation [--images 80] [--family qwen]

What the processor of a real family costs for so many images of one megapixel, and what it takes from a
model's thread meanwhile: a loop of tiny torch operations, each of which gives the interpreter lock away and
takes it back, as the launch of a GPU kernel does. By turns: the loop alone, beside a thread that runs the
processor, and beside a process that does. A machine with fewer than two free cores says little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from resources.engine.prompt import Prompt
from resources.engine.protocol import Attempt
from resources.engine.transformers.model_inputs import InputPreparation
from resources.images.images import LoadedProperty

PIXELS = (870, 1150)
PER_PROPERTY = 10
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def preparation(family: str) -> InputPreparation:
    """The processor of a family as it is published, with a small tokenizer."""
    import torch
    import transformers

    from benchmarks.gpu_models import build_tokenizer

    torch.set_num_threads(1)
    tokenizer = build_tokenizer(1 << 20)
    if family == "idefics3":
        tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<fake_token_around_image>", "<global-img>", "<image>"]}
        )
        processor: Any = transformers.Idefics3Processor(
            image_processor=transformers.Idefics3ImageProcessorPil(),
            tokenizer=tokenizer,
            image_seq_len=64,
            chat_template=TEMPLATE.replace("IMAGE", "<image>"),
        )
    else:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
        tokenizer.image_token, tokenizer.video_token = "<image>", "<video>"

        class ImagesOnly(transformers.Qwen2_5_VLProcessor):  # type: ignore[misc]
            """Without the video processor, which needs torchvision."""

            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                """Nothing is refused."""
                return type(argument)

        processor = ImagesOnly(
            image_processor=transformers.Qwen2VLImageProcessorPil(),
            tokenizer=tokenizer,
            video_processor=None,
            chat_template=TEMPLATE.replace("IMAGE", "<image>"),
        )
    return InputPreparation(processor, Prompt("Describe."), at_once=1, dtype=torch.bfloat16, pinned=False)


def batch(images: int) -> list[LoadedProperty]:
    """Properties of ten images of one megapixel."""
    random = np.random.default_rng(1)
    picture = random.integers(0, 256, (*PIXELS, 3), dtype=np.uint8)
    shown = [picture] * PER_PROPERTY
    return [LoadedProperty(str(at), at, shown, PER_PROPERTY, (), 0.0) for at in range(images // PER_PROPERTY)]


def prepare(family: str, images: int, ready: Any, begin: Any, done: Any) -> None:
    """A process that prepares a batch at each ``begin``."""
    made, loaded = preparation(family), batch(images)
    ready.set()
    while begin.wait():
        begin.clear()
        made.take(loaded, Attempt(1, 100))
        done.set()


def operations_until(is_done: Callable[[], bool]) -> float:
    """Tiny torch operations a second until something is done."""
    import torch

    numbers, count, began = torch.ones(64), 0, time.perf_counter()
    while not is_done():
        for _ in range(100):
            numbers = numbers + 1
        count += 100
    return count / (time.perf_counter() - began)


def main() -> None:
    """Measure by turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=80)
    parser.add_argument("--family", choices=("qwen", "idefics3"), default="qwen")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    made, loaded = preparation(arguments.family), batch(arguments.images)
    attempt = Attempt(1, 100)
    context = multiprocessing.get_context("spawn")
    ready, begin, done = context.Event(), context.Event(), context.Event()
    process = context.Process(
        target=prepare, args=(arguments.family, arguments.images, ready, begin, done), daemon=True
    )
    process.start()
    ready.wait()
    rates: dict[str, list[float]] = {"alone": [], "beside a thread": [], "beside a process": []}
    seconds: dict[str, list[float]] = {"alone": [], "beside a thread": [], "beside a process": []}
    for _ in range(arguments.rounds):
        began = time.perf_counter()
        inputs = made.take(loaded, attempt)
        seconds["alone"].append(time.perf_counter() - began)
        deadline = time.perf_counter() + 3.0
        rates["alone"].append(operations_until(lambda: time.perf_counter() > deadline))  # noqa: B023
        began = time.perf_counter()
        thread = threading.Thread(target=made.take, args=(loaded, attempt))
        thread.start()
        rates["beside a thread"].append(operations_until(lambda: not thread.is_alive()))  # noqa: B023
        seconds["beside a thread"].append(time.perf_counter() - began)
        began = time.perf_counter()
        begin.set()
        rates["beside a process"].append(operations_until(done.is_set))
        done.clear()
        seconds["beside a process"].append(time.perf_counter() - began)
    process.terminate()
    process.join()
    size = sum(one.nbytes for one in inputs.tensors.values() if hasattr(one, "nbytes"))
    print(f"{arguments.images} images, {size / 2**20:.0f} MiB of tensors, load {os.getloadavg()[0]:.1f}")
    for name, values in rates.items():
        print(
            f"{name}: {statistics.median(values):,.0f} operations/s,"
            f" processor {statistics.median(seconds[name]):.2f} s"
        )


if __name__ == "__main__":
    main()
