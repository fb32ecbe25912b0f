"""What the example model learns: the objective of the variants in ``variants.yaml`` beside this module.

What lives here: the losses, and the shape of a batch. What does not: the loop (``vlm_training``), the
model's shape (architecture.py), the rendered properties (training_data.py) and how good it is
(evaluation.py). Two things decide how fast it learns: a token's loss weighs the less the surer the model
already is of it, because most of a JSON answer is learned at once and then drowns the rest; and every field
has a classifier of its own on the image tokens, dropped when the model is saved. A third loss makes the mean
of the text layers' last hidden states as alike for two descriptions as the share of fields on which they
agree. Nothing embeds with that mean: the example has a text embedder (embedder_training.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from examples.architecture import IMAGE_SIDE, answer_ids, answer_text, build_tokenizer, prompt_ids
from examples.evaluation import EVALUATION_SEED, evaluate
from examples.scenes import VIEWS, VISIBLE
from examples.training_data import Example, classes, shown_once
from examples.truth import FIELDS
from vlm_assets.config.property_description import PropertyDescription
from vlm_training.objective import Figures, build_base, load_images
from vlm_training.training_plan import Sample, TrainingPlan

_FLOOR_WEIGHT: Final = 0.03
"""What a token weighs in the loss when the model is certain of it."""
_GUESS_WEIGHT: Final = 0.1
"""What the value of a field counts that no image shows: enough to guess one of the field's values."""
_IMAGE_WEIGHT: Final = 3.0
_LIKENESS_WEIGHT: Final = 4.0
_IGNORED: Final = -100


@dataclass(frozen=True)
class Tensors:
    """One batch: tokens [n, length], what of them is to be learned, images [n, views, 3, side, side]."""

    input_ids: Any
    attention_mask: Any
    labels: Any
    weights: Any
    """[n, length] how much each label counts: little where the images do not show what it says."""
    pixel_values: Any
    views: Any
    """[images] index of each image's view, images in the order of the batch; -100 where it is not known."""
    shown: dict[str, Any]
    """Field to [images]: the class that the image shows, or -100 where it does not show the field."""
    truths: Sequence[PropertyDescription]
    counts: Sequence[int]
    """Images of each property."""


def to_tensors(tokenizer: Any, batch: Sequence[Example], values: dict[str, tuple[Any, ...]]) -> Tensors:
    """Tokens and images of a batch, padded on the right."""
    import torch

    rows: list[tuple[list[int], list[float]]] = []
    for example in batch:
        prompt = prompt_ids(tokenizer, len(example.views))
        answer, knowable = answer_ids(tokenizer, example.truth, example.unseen, example.asked)
        counts = [1.0 if known else _GUESS_WEIGHT for known in knowable]
        rows.append(([*prompt, *answer], [0.0] * len(prompt) + counts))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    weights = torch.zeros(len(rows), length)
    for row, (tokens, counts) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(tokens)] = torch.tensor(counts)
    labels = torch.where(weights > 0, ids, _IGNORED)
    side = batch[0].images.shape[1]
    pixels = torch.zeros(len(batch), max(len(example.views) for example in batch), 3, side, side)
    for row, example in enumerate(batch):
        images = torch.from_numpy(np.ascontiguousarray(example.images.transpose(0, 3, 1, 2)))
        pixels[row, : len(example.views)] = (images.float() / 255 - 0.5) / 0.5
    shown = {
        name: torch.tensor(
            [
                values[name].index(getattr(example.truth, name))
                if name in VISIBLE.get(view, ())
                else _IGNORED
                for example in batch
                for view in example.views
            ]
        )
        for name in FIELDS
    }
    views = torch.tensor(
        [VIEWS.index(view) if view in VIEWS else _IGNORED for example in batch for view in example.views]
    )
    mask = (ids != tokenizer.pad_token_id).long()
    truths = [example.truth for example in batch]
    return Tensors(
        ids, mask, labels, weights, pixels, views, shown, truths, [len(example.views) for example in batch]
    )


def answer_loss(logits: Any, labels: Any, counts: Any) -> Any:
    """Cross entropy of the answers' tokens, each weighted by its count times (1 - p) + 0.03.

    p is the probability that the model gave it; logits [n, length, tokens], labels and counts [n, length].
    """
    import torch

    targets = labels[:, 1:]
    wanted = targets != _IGNORED
    losses = torch.nn.functional.cross_entropy(logits[:, :-1][wanted], targets[wanted], reduction="none")
    weights = (1 - torch.exp(-losses.detach()) + _FLOOR_WEIGHT) * counts[:, 1:][wanted]
    return (losses * weights).sum() / weights.sum()


def image_loss(heads: Any, tokens: Any, tensors: Tensors) -> Any:
    """Cross entropy of what each image shows, read from its token [images, hidden] by one head a field.

    Where nobody knows which view an image is, each field is read from the property's images together.
    """
    import torch

    if (tensors.views == _IGNORED).all():
        return _property_loss(heads, tokens, tensors)
    total = torch.nn.functional.cross_entropy(heads["view"](tokens), tensors.views)
    for name, shown in tensors.shown.items():
        if (shown != _IGNORED).any():
            total = total + torch.nn.functional.cross_entropy(
                heads[name](tokens), shown, ignore_index=_IGNORED
            )
    return total / (len(tensors.shown) + 1)


def _property_loss(heads: Any, tokens: Any, tensors: Tensors) -> Any:
    import torch

    total = torch.zeros(())
    for name, values in classes().items():
        logits = torch.stack([part.amax(0) for part in heads[name](tokens).split(list(tensors.counts))])
        wanted = torch.tensor([values.index(getattr(truth, name)) for truth in tensors.truths])
        total = total + torch.nn.functional.cross_entropy(logits, wanted)
    return total / len(tensors.shown)


def likeness_loss(model: Any, tokenizer: Any, truths: Sequence[PropertyDescription]) -> Any:
    """Squared difference between the cosine of two texts' embeddings and the share of fields they share."""
    import torch

    texts = tokenizer([answer_text(truth) for truth in truths], padding=True, return_tensors="pt")
    mask = texts["attention_mask"]
    states = model.model.text_model(input_ids=texts["input_ids"], attention_mask=mask, use_cache=False)
    pooled = (states.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    unit = torch.nn.functional.normalize(pooled, dim=-1)
    rows = [[getattr(truth, name) for name in FIELDS] for truth in truths]
    alike = torch.tensor(
        [[float(np.mean([a == b for a, b in zip(x, y, strict=True)])) for y in rows] for x in rows]
    )
    if len(rows) < 2:
        return torch.zeros(())
    pairs = torch.triu_indices(len(rows), len(rows), offset=1)
    cosines = unit @ unit.T
    return ((cosines - alike)[pairs[0], pairs[1]] ** 2).mean()


class ExampleObjective:
    """See ``vlm_training.objective.Objective``. Takes rendered properties, or those of a catalogue."""

    _learns_likeness = True

    def __init__(self, plan: TrainingPlan) -> None:
        self._plan = plan

    def __getstate__(self) -> dict[str, Any]:
        return {"_plan": self._plan}  # A loader's process makes its own tokenizer.

    @cached_property
    def _tokenizer(self) -> Any:
        return build_tokenizer()

    @cached_property
    def _values(self) -> dict[str, tuple[Any, ...]]:
        return classes()

    def build(self) -> tuple[Any, Any]:
        """The base of the plan: a name in architecture.py, or a model of that shape."""
        return build_base(self._plan)

    def heads(self, model: Any) -> Any:
        """A classifier of each field, and of the view, on the image tokens."""
        import torch

        width = model.config.text_config.hidden_size
        sizes = {name: len(found) for name, found in self._values.items()} | {"view": len(VIEWS)}
        return torch.nn.ModuleDict({name: torch.nn.Linear(width, size) for name, size in sizes.items()})

    def features(self, sample: Example | Sample, seed: int) -> Example | None:
        """The property with some images left out and in another light, by this seed."""
        if isinstance(sample, Example):
            return shown_once(sample, random.Random(seed))
        images = load_images(sample, self._plan)
        if not images:
            return None
        small = np.stack([np.asarray(one.resize((IMAGE_SIDE, IMAGE_SIDE))) for one in images])
        truth = PropertyDescription(**{"summary": "", **sample.target})
        views = tuple(f"image {number}" for number in range(len(images)))
        return shown_once(Example(small, views, truth), random.Random(seed))

    def collate(self, features: Sequence[Example]) -> Tensors:
        """Tokens and images of a microbatch."""
        return to_tensors(self._tokenizer, features, self._values)

    def loss(self, model: Any, heads: Any, batch: Tensors, *, step: int) -> tuple[Any, float]:
        """The mean of the three losses, times the number of properties; likeness in every second step."""
        output = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            pixel_values=batch.pixel_values,
            use_cache=False,
        )
        tokens = output.image_hidden_states.flatten(0, -2)
        loss = answer_loss(output.logits, batch.labels, batch.weights)
        loss = loss + _IMAGE_WEIGHT * image_loss(heads, tokens, batch)
        if self._learns_likeness and step % 2 == 0:
            loss = loss + _LIKENESS_WEIGHT * likeness_loss(model, self._tokenizer, batch.truths)
        return loss * len(batch.truths), float(len(batch.truths))

    def figures(self, folder: Path, held_out: Sequence[Any], device: str) -> Figures:
        """What it reaches on rendered properties that nobody trained on, as evaluation.py asks."""
        found = evaluate(folder, properties=self._plan.evaluate, seed=EVALUATION_SEED)
        right = {**found.per_field, "all fields": found.total, "valid": found.valid, "likeness": found.lift}
        return Figures(found.properties, "rendered properties that no model was trained on", right)


class LargerObjective(ExampleObjective):
    """The same for the larger model, which is asked for parts of the answer and embeds nothing."""

    _learns_likeness = False

    @cached_property
    def _tokenizer(self) -> Any:
        return build_tokenizer(parts=True)
