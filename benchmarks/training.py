"""``python -m benchmarks.training``: the training loop against a plain one with the same loader and losses.

What lives here: both in turns in one process, by CPU time, which neighbours on the machine do not change;
what a checkpoint costs, and how long a resume takes. What does not: kills (``faults/training.py``).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from faults.training import make_plan, prepare
from vlm_training.checkpoints import interval_seconds
from vlm_training.loop import Training
from vlm_training.ranks import Ranks

DAY = 86_400.0
FEW, MANY = 1_000, 20_000
"""Steps after which a training is resumed."""


def plain(training: Training, first: int, steps: int) -> float:
    """CPU seconds of a plain loop over the same microbatches: accumulate, clip, step."""
    import torch

    parameters = list(training._parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    loader = training._load_from(first)
    began = time.process_time()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(training._plan.microbatches):
            loss, count = training._objective.loss(training._model, None, next(loader).batch, step=0)
            (loss / (count * training._plan.microbatches)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return time.process_time() - began


def ours(training: Training, steps: int) -> float:
    """CPU seconds of as many steps of ours, with all that watches them."""
    loader = training._load_from(training.state.consumed)
    began = time.process_time()
    for _ in range(steps):
        start, stop = training._next_batch()
        training._after_step(training._step(start, stop, loader))
    return time.process_time() - began


def go_on_from(training: Training, step: int) -> None:
    """Write the checkpoint of a training that has come so far, with its whole history."""
    state, size, count = training.state, training._plan.batch, training._order.count
    state.step, state.consumed = step, step * size
    state.losses, state.samples = [1.0] * step, [size * (number + 1) for number in range(step)]
    state.epochs = [{"epoch": number, "metric": 1.0} for number in range(1, step * size // count + 1)]
    training._writer.save(state, training._tensors())


def main() -> None:
    """Print the ratio, the pause of a checkpoint and the seconds of a resume."""
    parser = argparse.ArgumentParser(description="The training loop against a plain one.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-training-") as name:
        folder = Path(name)
        plan = make_plan(folder / "run", prepare(folder), steps=100_000, checkpoint_seconds=DAY, epochs=None)
        plan = replace(plan, batch=8, held_out=0.0, objective="default")

        def begin() -> Training:
            silent: Callable[[str, Any], None] = lambda *_: None  # noqa: E731 - nobody listens
            run = folder / "run"
            return Training(
                plan, run / "work", run / "q", Ranks(), device="cpu", history=run / "history", say=silent
            )

        measured, compared = begin(), begin()
        measured._checkpoints.sweep()
        measured._resume()
        ratios = []
        for _ in range(options.rounds):
            # The same samples, for they differ in their images.
            plain_seconds = plain(compared, measured.state.consumed, options.steps)
            own_seconds = ours(measured, options.steps)
            ratios.append(plain_seconds / own_seconds)
            print(
                f"plain {plain_seconds / options.steps:.3f} s of CPU a step,"
                f" ours {own_seconds / options.steps:.3f} s"
            )
        for _ in range(5):
            measured._writer.begin(measured.state, measured._tensors())
            measured._writer.wait()
        stalls = sorted(measured._writer.stalls)
        stall, write = stalls[len(stalls) // 2], measured._writer.write_seconds
        interval = interval_seconds(stall, write, DAY)
        resumed = []
        for step in (FEW, MANY):
            go_on_from(measured, step)
            again = begin()
            began = time.monotonic()
            again._resume()
            assert again.state.step == step
            resumed.append(time.monotonic() - began)
        size = sum(tensor.nbytes for tensor in again._tensors().values()) / 1e6
        print(
            f"throughput against the plain loop: {sorted(ratios)[len(ratios) // 2]:.2f}\n"
            f"a checkpoint of {size:.0f} MB: training stands still for {1000 * stall:.0f} ms, written in"
            f" {1000 * write:.0f} ms; every {interval:.0f} s that is {stall / interval:.3%}\n"
            f"resumed at step {FEW:,} in {resumed[0]:.2f} s, at step {MANY:,} in {resumed[1]:.2f} s"
        )


if __name__ == "__main__":
    main()
