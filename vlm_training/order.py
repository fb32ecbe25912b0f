"""The order of the samples of a training: a pure function of (seed, number), and the check that it was kept.

No random state is kept, so that nothing has to be restored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

import numpy as np
import numpy.typing as npt


class OrderChangedError(RuntimeError):
    """The same seed gives another order than before, so a training cannot be resumed exactly."""


class LeakError(RuntimeError):
    """A sample was repeated, left out or exchanged. Nothing of the step was taken."""


def seed_of(*parts: str | int) -> int:
    """A seed from 0 to 2**63 - 1 that depends on all of the parts and on nothing else."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1


class SampleOrder:
    """The order of ``count`` samples, epoch after epoch. Sample number n of the run is ``index(n)``."""

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError("there is no sample to train on")
        self.count = count
        self.seed = seed

    def index(self, number: int) -> int:
        """Which sample stands at a number: each one once an epoch."""
        epoch, position = divmod(number, self.count)
        return int(_permutation(self.count, self.seed, epoch)[position])

    def digest(self) -> str:
        """A digest of the first epoch's order, for checkpoints: another numpy may sort otherwise."""
        return hashlib.sha256(_permutation(self.count, self.seed, 0).astype("<i8").tobytes()).hexdigest()[:16]

    def check(self, planned: Sequence[int], loaded: Sequence[tuple[int, int]]) -> None:
        """Raise LeakError unless ``loaded`` has the planned numbers in their order, each with its index."""
        due = [(number, self.index(number)) for number in planned]
        for expected, actual in zip_longest(due, loaded):
            if expected != actual:
                raise LeakError(
                    f"The loader gave {_sample(actual)} where {_sample(expected)} was due. Nothing of the"
                    " step was taken, and the checkpoints are kept. This is a defect of this program: please"
                    " open an issue."
                )


def _sample(sample: tuple[int, int] | None) -> str:
    return "no sample" if sample is None else f"sample number {sample[0]} (index {sample[1]})"


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # Raw bits, sorted: numpy promises them for ever, and ``Generator.permutation`` may change.
    bits = np.random.Philox(key=seed_of("order", seed, epoch)).random_raw(count)
    return np.argsort(bits, kind="stable")
