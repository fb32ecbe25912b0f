"""The order of the samples of a training: a pure function of (seed, number), and the detector of leaks.

No random state is kept, so that nothing has to be restored.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vlm_durable.wording import counted

_WORD = 1 << 64


class OrderChangedError(RuntimeError):
    """The same seed gives another order than before, so a training cannot be resumed exactly."""


class LeakError(RuntimeError):
    """A sample was repeated or left out. Nothing of the step was taken."""


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

    def mark(self, number: int, index: int) -> int:
        """The number that a delivered sample adds to the sum of its run: 64 bits of epoch and index."""
        return int(_marks(self.seed, number // self.count, np.array([index], np.uint64))[0])

    def expected(self, start: int, stop: int) -> int:
        """The sum of the marks of the samples ``start`` to ``stop``, modulo 2**64.

        Whole epochs are summed in their plain order, so that a faulty permutation gives another sum.
        """
        total = 0
        for epoch in range(start // self.count, -(-stop // self.count)):
            first, last = max(start - epoch * self.count, 0), min(stop - epoch * self.count, self.count)
            is_whole = last - first == self.count
            shown = np.arange(last) if is_whole else _permutation(self.count, self.seed, epoch)[first:last]
            total += int(_marks(self.seed, epoch, shown.astype(np.uint64)).sum(dtype=np.uint64))
        return total % _WORD


class LeakDetector:
    """Compares the delivered samples with those that are due. Skipped samples count too."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order

    def check_batch(self, start: int, stop: int, delivered: int) -> None:
        """Raise LeakError unless the marks of the samples ``start`` to ``stop`` add up to ``delivered``."""
        due = sum(self._order.mark(number, self._order.index(number)) for number in range(start, stop))
        if due % _WORD != delivered % _WORD:
            raise LeakError(f"The samples {start} to {stop - 1} are not those that were delivered.")

    def check_run(self, consumed: int, delivered: int, *, since: tuple[int, int] = (0, 0)) -> None:
        """Raise LeakError unless each sample so far was delivered or skipped once an epoch.

        since: how many samples were consumed, and their sum, at the last comparison. So the cost does not
        grow with the length of a training.
        """
        start, before = since
        if (before + self._order.expected(start, consumed)) % _WORD != delivered % _WORD:
            raise LeakError(
                f"Of the first {counted(consumed, 'samples')} some were repeated or left out. The"
                f" checkpoints are kept;"
                " this is a defect of this program: please open an issue."
            )


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # Raw bits, sorted: numpy promises them for ever, and ``Generator.permutation`` may change.
    bits = np.random.Philox(key=seed_of("order", seed, epoch)).random_raw(count)
    return np.argsort(bits, kind="stable")


def _marks(seed: int, epoch: int, indexes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Well mixed bits of each index (the finalizer of SplitMix64)."""
    mixed = indexes * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed_of("marks", seed, epoch))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
