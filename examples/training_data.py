"""Training batches for the example model: properties rendered as they are needed, in worker processes.

What lives here: which property stands in which step, rendered small, with what its images show. What does
not: tokens and tensors (training.py). Batches depend on the seed alone, not on how fast the workers are.
"""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from examples.architecture import IMAGE_SIDE, kept_views
from examples.scenes import VISIBLE, draw_property, render
from examples.truth import FIELDS, RARE, draw_truth
from vlm_assets.property_description import PropertyDescription

Images = npt.NDArray[np.uint8]

_SCALE: Final = 0.4
"""Drawing resolution in pixels a photo unit: twice that of the model's images."""

_AHEAD: Final = 24
"""Chunks rendered ahead of the step that needs them."""

_REMEMBERED: Final = 3000
"""Properties kept to be shown again."""


@dataclass(frozen=True)
class Example:
    """One property as it is shown in one step: images [views, side, side, 3], their views, what is true."""

    images: Images
    views: tuple[str, ...]
    truth: PropertyDescription

    @property
    def unseen(self) -> tuple[str, ...]:
        """The fields that none of the images shows."""
        seen = {field for view in self.views for field in VISIBLE[view]}
        return tuple(field for field in FIELDS if field not in seen)


def render_chunk(seed: int, start: int, stop: int) -> list[Example]:
    """Properties ``start`` to ``stop`` of the training stream, all their views, small."""
    chunk = []
    for slot in range(start, stop):
        home = draw_property("training", seed, _richest(seed, slot))
        photos = [
            np.asarray(render(home, view, size=(IMAGE_SIDE, IMAGE_SIDE), scale=_SCALE)) for view in home.views
        ]
        chunk.append(Example(np.stack(photos), home.views, home.truth))
    return chunk


def _richest(seed: int, slot: int) -> int:
    """Of the three properties that could stand in a slot, the first with the most rare values.

    What is rare is met twice as often this way as it occurs, so that it is learned as well as the rest.
    """

    def rare(index: int) -> int:
        truth = draw_truth("training", seed, index)
        return sum(getattr(truth, name) == value for name, value in RARE.items())

    return max(range(3 * slot, 3 * slot + 3), key=rare)


def batches(seed: int, *, steps: int, batch_size: int, fresh: int, workers: int) -> Iterator[list[Example]]:
    """One batch a step: ``fresh`` properties never shown before, the others from the last few thousand.

    A property that is shown again comes with other images left out and in another light.
    """
    rng = random.Random(f"batches/{seed}")
    remembered: deque[Example] = deque(maxlen=_REMEMBERED)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending: deque[Future[list[Example]]] = deque()
        submitted = 0
        for _ in range(steps):
            # The first batches have nothing to show again: they are fresh throughout.
            while submitted < steps * fresh + batch_size and len(pending) < _AHEAD:
                pending.append(pool.submit(render_chunk, seed, submitted, submitted + fresh))
                submitted += fresh
            batch = pending.popleft().result()
            while len(remembered) + len(batch) < batch_size:
                batch = batch + pending.popleft().result()
            again = rng.sample(remembered, batch_size - len(batch)) if len(batch) < batch_size else []
            remembered.extend(batch)
            yield [_shown(example, rng) for example in [*batch, *again]]
        for future in pending:
            future.cancel()


def _shown(example: Example, rng: random.Random) -> Example:
    views = kept_views(example.views, rng)
    rows = [example.views.index(view) for view in views]
    # A little more or less light; a table instead of arithmetic keeps the images in 8 bits.
    gain, lift = rng.uniform(0.94, 1.06), rng.uniform(-6, 6)
    table = np.clip(np.arange(256) * gain + lift, 0, 255).astype(np.uint8)
    return Example(table[example.images[rows]], views, example.truth)


def classes() -> dict[str, tuple[Any, ...]]:
    """The values of every field that a photo can show, in a fixed order."""
    values: dict[str, tuple[Any, ...]] = {}
    for name in FIELDS:
        schema = PropertyDescription.model_json_schema()["properties"][name]
        if schema["type"] == "boolean":
            values[name] = (False, True)
        elif schema["type"] == "integer":
            values[name] = tuple(range(schema["minimum"], schema["maximum"] + 1))
        else:
            values[name] = tuple(schema["enum"])
    return values
