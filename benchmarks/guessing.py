"""What guessed tokens bring: python -m benchmarks.guessing [--tokens 5] [--batch 32]

The example model describes rendered properties, batch after batch as in a run, by turns with and without
guesses, each turn with an engine that has not said anything yet. Prompts are prepared beforehand. Of each
turn: CPU time a property, steps a batch, and whether the answers are the same.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from examples.rendered_properties import list_properties, write_example
from vlm_assets.config.settings import EXAMPLE_MODEL, load_settings
from vlm_engine.images.images import LoadedProperty, load_image
from vlm_engine.model_source import ModelSource
from vlm_engine.prompt import build_prompt
from vlm_engine.protocol import Answer, Attempt
from vlm_engine.schema import load_schema
from vlm_engine.transformers.transformers_engine import TransformersEngine

WORK: Final = Path(__file__).resolve().parent / ".work"
RENDERED, SEED = 240, 7


def load_batches(size: int) -> list[list[LoadedProperty]]:
    """Whole batches of sound properties of the example, each at most once."""
    listing = write_example(WORK / f"example-{RENDERED}-{SEED}", properties=RENDERED, seed=SEED)
    sound = [listed for listed in list_properties(properties=RENDERED, seed=SEED) if listed.hard is None]
    most = load_settings()
    loaded = []
    for at, listed in enumerate(sound[: len(sound) // size * size]):
        paths = listed.images[: most.max_images]
        images = [np.array(load_image(listing.parent / name, max_pixels=most.max_pixels)) for name in paths]
        loaded.append(LoadedProperty(listed.property_id, at, images, len(images), (), 0.0))
    return [loaded[at : at + size] for at in range(0, len(loaded), size)]


def describe(
    batches: Sequence[Sequence[LoadedProperty]], attempt: Attempt, tokens: int
) -> tuple[list[Any], float, int]:
    """Answers, seconds of CPU and steps, of a new engine."""
    settings = load_settings()
    schema = load_schema(settings.description_schema)
    engine = TransformersEngine(
        ModelSource(str(EXAMPLE_MODEL)),
        schema=schema,
        prompt=build_prompt(schema, settings.prompt),
        device="cpu",
        speculative_tokens=tokens,
    )
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    engine._model.register_forward_pre_hook(count)
    answers: list[Answer] = []
    cpu = 0.0
    for batch in batches:
        engine.prepare(batch, attempt=attempt)
        began = time.process_time()
        described = engine.describe(batch, attempt=attempt)
        cpu += time.process_time() - began
        answers += [answer for answer in described if isinstance(answer, Answer)]
    engine.close()
    return answers, cpu, steps


def main() -> None:
    """Measure by turns and print each."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="properties described together")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = load_batches(arguments.batch)
    attempt = Attempt(number=1, max_new_tokens=load_settings().max_new_tokens)
    for _ in range(arguments.rounds):
        turns = {tokens: describe(batches, attempt, tokens) for tokens in (0, arguments.tokens)}
        plain, guessed = turns[0], turns[arguments.tokens]
        for tokens, (_, cpu, steps) in turns.items():
            milliseconds = 1e3 * cpu / len(batches) / arguments.batch
            print(
                f"{tokens} tokens guessed at most: {milliseconds:.1f} ms of CPU a property,"
                f" {steps / len(batches):.1f} steps a batch"
            )
        same = sum(answer == guess for answer, guess in zip(plain[0], guessed[0], strict=True))
        print(f"ratio {plain[1] / guessed[1]:.2f}, {same} of {len(plain[0])} answers the same")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
