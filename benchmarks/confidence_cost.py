"""What it costs to keep the probabilities of answers: ``python -m benchmarks.confidence_cost``.

In one process, in pairs, the same loaded properties are described with and without them. Images are loaded
before, so a run loses a smaller share than is said here. CPU only: on a GPU the scores are another cost.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from unittest.mock import patch

import numpy as np

from benchmarks.canary import _describing, _timed
from benchmarks.durability_cost import catalogued
from vlm_assets.config.resource_settings import build_gpu
from vlm_assets.config.settings import load_settings
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


def main() -> None:
    """Measure and print the median share, where half of the pairs lie, and the median's 95% interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--properties", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = catalogued(Path(folder), arguments.properties)
        settings = load_settings(home=home, model="example", embedding_model="example", devices="cpu:1")
        device = build_gpu(settings).find()[0]
        pin(device)
        _, describe = _describing(settings, device)
        describe()
        shares = []
        for pair in range(arguments.pairs):
            took = {}
            for keeps in (True, False) if pair % 2 else (False, True):
                scores = BatchScores if keeps else _NoScores
                with patch("vlm_engine.transformers.guided.BatchScores", scores):
                    took[keeps] = _timed(describe).cpu
            shares.append(1.0 - took[False] / took[True])
    drawn = np.random.default_rng(1).choice(shares, (10_000, len(shares)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    first, _, third = quantiles(shares, n=4)
    print(
        f"{arguments.properties} properties, {arguments.pairs} pairs: {median(shares):.1%} of the CPU time"
        f" (the median; 95% interval {low:.1%} to {high:.1%}; half of the pairs lie from {first:.1%}"
        f" to {third:.1%})"
    )


if __name__ == "__main__":
    main()
