"""What it costs to keep the probabilities of answers: ``python -m benchmarks.confidence_cost``.

In one process, in pairs, the same loaded properties are described with and without them. The share is of all
that a property costs: of CPU time with the example's model, images read and decoded included. With --model it
is of a GPU's wall time, for there other cores load the images, and the weights are random.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Literal
from unittest.mock import patch

import numpy as np

from benchmarks.canary import describing, timed
from benchmarks.durability_cost import catalogued
from benchmarks.gpu import DEFAULT_SIDE
from benchmarks.gpu_loops import PROMPT, render_jpegs
from benchmarks.gpu_models import SHAPES
from benchmarks.partitions import SCHEMA, make_home, save_model
from vlm_assets.config.resource_settings import build_gpu
from vlm_assets.config.settings import Settings, load_settings
from vlm_engine.devices.leases import pin
from vlm_engine.protocol import AnswerTokens
from vlm_engine.transformers.token_scores import BatchScores


class _NoScores(BatchScores):
    """Keeps nothing: no answer has a confidence."""

    def add(self, *_: object, **__: object) -> None:
        """Nothing."""

    def add_unknown(self, row: int) -> None:
        """Nothing."""

    def settle(self, chosen: Sequence[int]) -> None:
        """Nothing."""

    def of_answers(self, answers: Sequence[Sequence[int]]) -> list[AnswerTokens | None]:
        """Nothing known of any of them."""
        return [None] * len(answers)


def example_settings(folder: Path, properties: int) -> Settings:
    """The example's models on a CPU."""
    home = catalogued(folder, properties)
    return load_settings(home=home, model="example", embedding_model="example", devices="cpu:1")


def random_settings(folder: Path, properties: int, model: str, device: Literal["cpu", "cuda"]) -> Settings:
    """A model of this shape with random weights, ten images of a property."""
    # In a process of its own: this one must not have touched the GPU before it is pinned.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        other.submit(save_model, model, folder / "model", device=device, side=DEFAULT_SIDE).result()
    (folder / "images").mkdir()
    jpegs = render_jpegs(folder / "images", 24, (4000, 3000), len(os.sched_getaffinity(0)))
    make_home(folder / "home", jpegs, partitions=1, properties=properties, images_each=10)
    return load_settings(
        home=folder / "home",
        model=str(folder / "model"),
        description_schema=SCHEMA,
        prompt=PROMPT.text,
        devices="0" if device == "cuda" else "cpu:1",
        engine="transformers",
    )


def main() -> None:
    """Measure and print the median share, where half of the pairs lie, and the median's 95% interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--properties", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--model", choices=sorted(SHAPES), help="of random weights, on the device")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    clock = "wall" if arguments.model else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            random_settings(Path(folder), arguments.properties, arguments.model, arguments.device)
            if arguments.model
            else example_settings(Path(folder), arguments.properties)
        )
        device = build_gpu(settings).find()[0]
        pin(device)
        _, loaded, describe = describing(settings, device)
        describe()
        beside = 0.0
        if not arguments.model:
            beside = sum(one.seconds + one.processing_seconds for batch in loaded for one in batch)
        shares, seconds = [], []
        for pair in range(arguments.pairs):
            took = {}
            for keeps in (True, False) if pair % 2 else (False, True):
                scores = BatchScores if keeps else _NoScores
                with patch("vlm_engine.transformers.guided.BatchScores", scores):
                    took[keeps] = getattr(timed(describe), clock)
            shares.append((took[True] - took[False]) / (took[True] + beside))
            seconds.append(took[True])
    drawn = np.random.default_rng(1).choice(shares, (10_000, len(shares)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    first, _, third = quantiles(shares, n=4)
    print(
        f"{arguments.properties} properties in batches of {max(map(len, loaded))}, {arguments.pairs} pairs:"
        f" {median(shares):.1%} of the {clock} time of {median(seconds):.2f} s for the answers and"
        f" {beside:.2f} s for images (the median; 95% interval {low:.1%} to {high:.1%}; half of the pairs lie"
        f" from {first:.1%} to {third:.1%})"
    )


if __name__ == "__main__":
    main()
