"""What a batch of long prompts takes of memory and time, masked as a whole and row by row.

``python -m benchmarks.prompt_memory`` lets a model of tiny width with random weights, and its family's own
processor, look at real numbers of tokens: 32 properties of nine and ten images of 256 tokens. Each way of
attention has a process of its own, because a process never gives back what it took at most.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_loops import PROMPT
from benchmarks.gpu_models import (
    SHAPES,
    AnswerLengths,
    build_model,
    pixels_of,
    save_processor_of,
    tokenizer_of,
)
from vlm_engine.images.images import LoadedProperty
from vlm_engine.protocol import Attempt
from vlm_engine.transformers.transformers_engine import TransformersEngine

ATTENTIONS = ("sdpa", "sdpa_by_rows")
"""What transformers does, and what the engine does."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and memory that the layers that answer take for a batch's prompts, beyond what is there."""
    shape = SHAPES[options.model]
    tokenizer = tokenizer_of(shape)
    model = build_model(shape, tokenizer, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        processor, _ = save_processor_of(
            shape, tokenizer, Path(folder), side=options.side, prompt=PROMPT.text
        )
    answers = AnswerLengths(2, tokenizer, vocabulary=shape.vocabulary, masked=False)
    engine = TransformersEngine.around(model, processor, grammar=answers, prompt=PROMPT, device="cpu")
    model.set_attn_implementation({"text_config": options.attention})
    side = math.isqrt(pixels_of(options.side))
    image = np.zeros((side, side, 3), np.uint8)
    batch = [
        LoadedProperty(str(at), at, [image] * (images := options.images - at % 2), images, (), 0.0)
        for at in range(options.properties)
    ]
    attempt = Attempt(number=1, max_new_tokens=2)
    engine.prepare(batch, attempt=attempt)
    taken: list[int] = []
    spent: list[float] = []

    def begin(*_: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the most that was taken is counted from here
        taken.append(memory("VmHWM"))
        spent.append(time.monotonic())

    def end(*_: Any) -> None:
        taken.append(memory("VmHWM"))
        spent.append(time.monotonic())

    layers = model.model.language_model if hasattr(model.model, "language_model") else model.model.text_model
    layers.register_forward_pre_hook(begin)
    layers.register_forward_hook(end)
    tokens = [answer.prompt_tokens for answer in engine.describe(batch, attempt=attempt)]  # type: ignore[union-attr]
    return {"tokens": max(tokens), "mib": taken[1] - taken[0], "seconds": spent[1] - spent[0]}


def memory(name: str) -> int:
    """MiB of this process, by the kernel's name for it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(name))


def main() -> None:
    """Print a line for each model and attention."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, action="append")
    parser.add_argument("--properties", type=int, default=32)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument(
        "--side", type=int, default=520, help="longest edge, 4:3: 520 is 256 tokens of Qwen-VL"
    )
    parser.add_argument("--attention", choices=ATTENTIONS, help="measure in this process, print JSON")
    options = parser.parse_args()
    if options.attention:
        options.model = options.model[-1]
        print(json.dumps(measure(options)))
        return
    for model in options.model or ("tiny-qwen2.5-vl",):
        for attention in ATTENTIONS:
            case = ["--model", model, "--attention", attention]
            ran = subprocess.run(
                [sys.executable, "-m", "benchmarks.prompt_memory", *sys.argv[1:], *case],
                stdout=subprocess.PIPE,
                check=True,
            )
            measured = json.loads(ran.stdout.splitlines()[-1])
            print(
                f"{model:16} {options.properties} x {measured['tokens']} tokens  {attention:13}"
                f" {measured['mib']:6,} MiB in the layers that answer {measured['seconds']:7.1f} s"
            )


if __name__ == "__main__":
    main()
