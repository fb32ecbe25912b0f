"""What an image costs a core, from a JPEG of 12 megapixels to the model's input.

``python -m benchmarks.image_costs`` runs each family's shipped processor in one process with one thread and a
worker's environment: as it was before (images never below the pixels allowed, made smaller by Lanczos, and
processed by Pillow and float64), and as workers do it. Both in turns on the same images: the ratio holds on a
busy machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from PIL import Image

from benchmarks.gpu_loops import PROMPT, render_jpegs
from benchmarks.gpu_models import build_tokenizer
from benchmarks.model_families import FAMILIES, save_processor
from vlm_engine.images.images import fitted_size, load_image
from vlm_engine.images.worker_process import ENVIRONMENT
from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import ImageLimits
from vlm_engine.transformers import model_loading
from vlm_engine.transformers.image_tokens import fitted_processor, processed

PIXELS: Final = 1_048_576
"""As the settings have it."""


def decoded_before(path: Path) -> Image.Image:
    """An image as it was decoded before: Lanczos from the smallest scale of the decoder."""
    with Image.open(path) as image:
        size = fitted_size(*image.size, PIXELS)
        image.draft("RGB", size)
        return image.convert("RGB").resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)


def decoded_now(path: Path) -> Image.Image:
    """An image as a worker decodes it."""
    return load_image(path, max_pixels=PIXELS)


def measure(name: str, jpegs: list[Path], rounds: int) -> dict[str, float]:
    """Milliseconds an image: medians of the rounds."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_tokenizer(FAMILIES[name].context)
        named = FAMILIES[name].named(tokenizer, pad_token="<pad>", eos_token="<eos>")
        save_processor(name, Path(folder), named)
        named_config(name, named).save_pretrained(folder)
        limits = ImageLimits(pixels=PIXELS, images=len(jpegs), answer_tokens=512)
        processors = {"now": fitted_processor(ModelSource(folder), PROMPT.text, limits)[0]}
        with patch.object(model_loading, "made_fast", lambda processor: processor):
            processors["before"] = fitted_processor(ModelSource(folder), PROMPT.text, limits)[0]

    def process(when: str, images: list[Image.Image]) -> None:
        processed(processors[when], PROMPT.text, [images]).to("cpu", torch.bfloat16)

    spent: dict[str, list[float]] = {}

    def clock(step: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        made = work()
        spent.setdefault(step, []).append(1e3 * (time.process_time() - began) / len(jpegs))
        return made

    for _ in range(rounds):
        for when, decode in (("before", decoded_before), ("now", decoded_now)):
            images = clock(f"decode {when}", partial(list, map(decode, jpegs)))
            clock(f"processor {when}", partial(process, when, images))
    return {step: statistics.median(times) for step, times in spent.items()}


def named_config(name: str, tokenizer: Any) -> Any:
    """A configuration that says no more than the family and its context: only the processor is used."""
    return FAMILIES[name].config(tokenizer, vision={}, text={})


def main() -> None:
    """Print a line for each family."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, nargs=2, default=(4000, 3000), metavar=("WIDTH", "HEIGHT"))
    options = parser.parse_args()
    if not ENVIRONMENT.items() <= os.environ.items():  # malloc reads it when a process begins
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.image_costs", *sys.argv[1:]],
            {**os.environ, **ENVIRONMENT},
        )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        jpegs = [Path(jpeg) for jpeg in render_jpegs(Path(folder), options.images, tuple(options.size), 2)]
        megabytes = sum(jpeg.stat().st_size for jpeg in jpegs) / len(jpegs) / 1e6
        print(f"{options.images} JPEGs of {options.size[0]} x {options.size[1]}, {megabytes:.1f} MB each")
        print("ms of a core an image   decode  processor       decode  processor    times  images/s a core")
        for name in options.family or [name for name, family in FAMILIES.items() if family.is_here()]:
            ms = measure(name, jpegs, options.rounds)
            before, now = (ms[f"decode {when}"] + ms[f"processor {when}"] for when in ("before", "now"))
            print(
                f"{name:18} before {ms['decode before']:6.1f} {ms['processor before']:8.1f}   now"
                f" {ms['decode now']:8.1f} {ms['processor now']:8.1f} {before / now:9.2f} {1e3 / now:11.1f}"
            )


if __name__ == "__main__":
    main()
