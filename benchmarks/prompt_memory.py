"""What a batch of long prompts takes of memory and time: masked in two ways, or asked a second question.

``python -m benchmarks.prompt_memory`` lets a model of tiny width with random weights, and its family's own
processor, look at real numbers of tokens: 32 properties of nine and ten images of 256 tokens. Each way of
attention has a process of its own, because a process never gives back what it took at most.

With ``--second-question`` it measures the whole of ``describe`` for a second question about the batch: after
the first, whose images it shares, and alone.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
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
    vision_layers,
)
from vlm_engine.images.images import LoadedProperty
from vlm_engine.prompt import Prompt
from vlm_engine.protocol import Attempt
from vlm_engine.transformers.transformers_engine import TransformersEngine

ATTENTIONS = ("sdpa", "sdpa_by_rows")
"""What transformers does, and what the engine does."""


SECOND = Prompt("Answer with one JSON object. Its fields: has_ramp (true or false), steps (whole number).")

_ANSWER_TOKENS = 24
"""Of an answer of two fields, on average."""


def loaded_engine(
    options: argparse.Namespace, prompts: Sequence[Prompt], answer_tokens: int
) -> tuple[Any, TransformersEngine, list[LoadedProperty]]:
    """A model, an engine around it that asks these prompts, and the batch."""
    shape = SHAPES[options.model]
    tokenizer = tokenizer_of(shape)
    model = build_model(shape, tokenizer, device=options.device)
    with tempfile.TemporaryDirectory() as folder:
        processor, _ = save_processor_of(
            shape, tokenizer, Path(folder), side=options.side, prompt=PROMPT.text
        )
    answers = AnswerLengths(answer_tokens, tokenizer, vocabulary=shape.vocabulary, masked=False)
    further = [(answers, prompt) for prompt in prompts[1:]]
    engine = TransformersEngine.around(
        model, processor, grammar=answers, prompt=prompts[0], device=options.device, further=further
    )
    side = math.isqrt(pixels_of(options.side))
    image = np.zeros((side, side, 3), np.uint8)
    batch = [
        LoadedProperty(str(at), at, [image] * (images := options.images - at % 2), images, (), 0.0)
        for at in range(options.properties)
    ]
    return model, engine, batch


def measure_second_question(options: argparse.Namespace) -> None:
    """Print the seconds of a first question, of a second after it, and of the second alone."""
    model, both, batch = loaded_engine(options, (PROMPT, SECOND), _ANSWER_TOKENS)
    if not both.shares_images:
        raise SystemExit("this model looks at the images anew for each question")
    _, alone, _ = loaded_engine(options, (SECOND,), _ANSWER_TOKENS)
    looks: list[object] = []
    vision_layers(model).register_forward_pre_hook(lambda *_: looks.append(None))
    asked = (("first", both, 0), ("second after it", both, 1), ("second alone", alone, 0))
    seconds: dict[str, list[float]] = {name: [] for name, *_ in asked}
    for _ in range(options.rounds + 1):  # The first round pays for what is made once.
        for name, engine, question in asked:
            began = time.monotonic()
            attempt = Attempt(1, 2 * _ANSWER_TOKENS, question=question)
            answers = engine.describe(batch, attempt=attempt)
            seconds[name].append(time.monotonic() - began)
    tokens = max(answer.prompt_tokens for answer in answers)  # type: ignore[union-attr]
    for name, of_rounds in seconds.items():
        print(f"{name:16} {median(of_rounds[1:]):7.2f} s, the median of {options.rounds} rounds")
    after, own = (seconds[name][1:] for name, *_ in asked[1:])
    share = median(mine / its for mine, its in zip(after, own, strict=True))
    print(
        f"{options.properties} properties of {tokens} tokens: the second question costs {share:.2f} of what"
        f" it costs alone; its engine looked at images {len(looks)} times for {2 * (options.rounds + 1)}"
        " questions"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and memory that the layers that answer take for a batch's prompts, beyond what is there."""
    model, engine, batch = loaded_engine(options, (PROMPT,), 2)
    model.set_attn_implementation({"text_config": options.attention})
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
    parser.add_argument("--second-question", action="store_true", help="measure what a second question costs")
    parser.add_argument("--rounds", type=int, default=5, help="of each question, after a first")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the questions are asked"
    )
    options = parser.parse_args()
    if options.second_question:
        options.model = (options.model or ["tiny-qwen2.5-vl"])[-1]
        measure_second_question(options)
        return
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
