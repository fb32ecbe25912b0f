"""Training samples for the example model: properties rendered as they are needed.

What lives here: a property of the training stream, rendered small, with what its images show, and how it is
shown once. What does not: tokens and tensors (training.py) and the order (``vlm_training/order.py``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from examples import canvas
from examples.architecture import IMAGE_SIDE, kept_views
from examples.scenes import VISIBLE, draw_property, render
from examples.truth import FIELDS, RARE, draw_truth, property_random
from vlm_assets.config.property_description import PropertyDescription
from vlm_training.training_plan import TrainingPlan

Images = npt.NDArray[np.uint8]

_SCALE: Final = 0.4
"""Drawing resolution in pixels a photo unit: twice that of the model's images."""

_ALL: Final = tuple(PropertyDescription.model_fields)


@dataclass(frozen=True)
class Example:
    """One property as it is shown in one step: images [views, side, side, 3], their views, what is true.

    asked: the fields of the answer; None: all.
    """

    images: Images
    views: tuple[str, ...]
    truth: PropertyDescription
    asked: tuple[str, ...] | None = None

    @property
    def unseen(self) -> tuple[str, ...]:
        """The fields that none of the images shows; none where nobody knows which views they are."""
        if not set(self.views) <= VISIBLE.keys():
            return ()
        seen = {field for view in self.views for field in VISIBLE[view]}
        return tuple(field for field in FIELDS if field not in seen)


def render_chunk(seed: int, start: int, stop: int, *, larger: bool = False) -> list[Example]:
    """Properties ``start`` to ``stop`` of the training stream, all their views, small.

    larger: for the larger model. Half of its properties are blurred and dark, and of half of them it is asked
    for a few fields alone, as a question set asks.
    """
    chunk = []
    for slot in range(start, stop):
        home = draw_property("training", seed, _richest(seed, slot))
        photos = [render(home, view, size=(IMAGE_SIDE, IMAGE_SIDE), scale=_SCALE) for view in home.views]
        asked = None
        if larger:
            rng = property_random("training", seed, slot, "question")
            measure = max(0.0, rng.uniform(-1, 1))
            photos = [canvas.degraded(photo, measure) for photo in photos]
            asked = rng.choice((None, tuple(rng.sample(_ALL, rng.randint(1, 4)))))
        images = np.stack([np.asarray(photo) for photo in photos])
        chunk.append(Example(images, home.views, home.truth, asked))
    return chunk


def _richest(seed: int, slot: int) -> int:
    """Of the three properties that could stand in a slot, the first with the most rare values.

    What is rare is met twice as often this way as it occurs, so that it is learned as well as the rest.
    """

    def rare(index: int) -> int:
        truth = draw_truth("training", seed, index)
        return sum(getattr(truth, name) == value for name, value in RARE.items())

    return max(range(3 * slot, 3 * slot + 3), key=rare)


class Rendered:
    """Properties of the training stream, rendered when they are asked for. See ``plan.Samples``."""

    def __init__(self, seed: int, count: int, *, larger: bool = False) -> None:
        self._seed, self._larger = seed, larger
        self.ids: Sequence[str] = [f"training/{seed}/{number}" for number in range(count)]

    def __getitem__(self, index: int) -> Example:
        return render_chunk(self._seed, index, index + 1, larger=self._larger)[0]


def rendered(plan: TrainingPlan) -> Rendered:
    """The properties of a plan: as many as it shows in half of its steps, so that each is shown twice."""
    return Rendered(plan.seed, _count(plan))


def rendered_larger(plan: TrainingPlan) -> Rendered:
    """The same, as the larger model learns them."""
    return Rendered(plan.seed, _count(plan), larger=True)


def _count(plan: TrainingPlan) -> int:
    return max(plan.batch, (plan.steps or 0) * plan.batch // 2)


def shown_once(example: Example, rng: random.Random) -> Example:
    """A property as it is shown once: some images left out, the others in another light."""
    views = kept_views(example.views, rng)
    rows = [example.views.index(view) for view in views]
    # A little more or less light; a table instead of arithmetic keeps the images in 8 bits.
    gain, lift = rng.uniform(0.94, 1.06), rng.uniform(-6, 6)
    table = np.clip(np.arange(256) * gain + lift, 0, 255).astype(np.uint8)
    return replace(example, images=table[example.images[rows]], views=views)


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
