"""Training of the example model: ``python -m examples.training --output FOLDER --seed N``.

What lives here: the loss, the loop and what is saved. What does not: the model's shape (architecture.py),
the batches (training_data.py) and how good it is (evaluation.py). Two things decide how fast it learns: a
token's loss weighs the less the surer the model already is of it, because most of a JSON answer is learned
at once and then drowns the rest; and every field has a classifier of its own on the image tokens, dropped
when the model is saved. A third loss makes the mean of the text layers' last hidden states as alike for two
descriptions as the share of fields on which they agree: that mean is the example's embedding.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from examples.architecture import (
    answer_ids,
    answer_text,
    build_model,
    build_processor,
    build_tokenizer,
    prompt_ids,
)
from examples.evaluation import evaluate
from examples.model_card import write_card
from examples.scenes import VIEWS, VISIBLE
from examples.training_data import Example, batches, classes
from examples.truth import FIELDS

STEPS: Final = 900
_BATCH, _FRESH = 24, 12
_PEAK_RATE, _WARM_UP = 2e-3, 60
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
    """[images] index of each image's view, images in the order of the batch."""
    shown: dict[str, Any]
    """Field to [images]: the class that the image shows, or -100 where it does not show the field."""


def to_tensors(tokenizer: Any, batch: Sequence[Example], values: dict[str, tuple[Any, ...]]) -> Tensors:
    """Tokens and images of a batch, padded on the right."""
    import torch

    rows: list[tuple[list[int], list[float]]] = []
    for example in batch:
        prompt = prompt_ids(tokenizer, len(example.views))
        answer, knowable = answer_ids(tokenizer, example.truth, example.unseen)
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
                values[name].index(getattr(example.truth, name)) if name in VISIBLE[view] else _IGNORED
                for example in batch
                for view in example.views
            ]
        )
        for name in FIELDS
    }
    views = torch.tensor([VIEWS.index(view) for example in batch for view in example.views])
    return Tensors(ids, (ids != tokenizer.pad_token_id).long(), labels, weights, pixels, views, shown)


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
    """Cross entropy of what each image shows, read from its token [images, hidden] by one head a field."""
    import torch

    total = torch.nn.functional.cross_entropy(heads["view"](tokens), tensors.views)
    for name, shown in tensors.shown.items():
        if (shown != _IGNORED).any():
            total = total + torch.nn.functional.cross_entropy(
                heads[name](tokens), shown, ignore_index=_IGNORED
            )
    return total / (len(tensors.shown) + 1)


def likeness_loss(model: Any, tokenizer: Any, batch: Sequence[Example]) -> Any:
    """Squared difference between the cosine of two texts' embeddings and the share of fields they share."""
    import torch

    texts = tokenizer([answer_text(example.truth) for example in batch], padding=True, return_tensors="pt")
    mask = texts["attention_mask"]
    states = model.model.text_model(input_ids=texts["input_ids"], attention_mask=mask, use_cache=False)
    pooled = (states.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    unit = torch.nn.functional.normalize(pooled, dim=-1)
    rows = [[getattr(example.truth, name) for name in FIELDS] for example in batch]
    alike = torch.tensor(
        [[float(np.mean([a == b for a, b in zip(x, y, strict=True)])) for y in rows] for x in rows]
    )
    pairs = torch.triu_indices(len(rows), len(rows), offset=1)
    cosines = unit @ unit.T
    return ((cosines - alike)[pairs[0], pairs[1]] ** 2).mean()


def rate(step: int, steps: int) -> float:
    """The learning rate at a step: linear warm-up, then half a cosine down to a fiftieth."""
    if step < _WARM_UP:
        return _PEAK_RATE * (step + 1) / _WARM_UP
    along = (step - _WARM_UP) / max(1, steps - _WARM_UP)
    return _PEAK_RATE * (0.02 + 0.98 * (1 + math.cos(math.pi * along)) / 2)


def train(seed: int, *, steps: int, workers: int) -> tuple[Any, Any]:
    """Train from random weights. Returns (model, processor); progress goes to standard error."""
    import torch

    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    values = classes()
    width = model.config.text_config.hidden_size
    heads = torch.nn.ModuleDict({name: torch.nn.Linear(width, len(found)) for name, found in values.items()})
    heads["view"] = torch.nn.Linear(width, len(VIEWS))
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.02)
    model.train()
    started = time.monotonic()
    stream = batches(seed, steps=steps, batch_size=_BATCH, fresh=_FRESH, workers=workers)
    likeness = torch.zeros(())
    for step, batch in enumerate(stream):
        tensors = to_tensors(tokenizer, batch, values)
        output = model(
            input_ids=tensors.input_ids,
            attention_mask=tensors.attention_mask,
            pixel_values=tensors.pixel_values,
            use_cache=False,
        )
        answers = answer_loss(output.logits, tensors.labels, tensors.weights)
        images = image_loss(heads, output.image_hidden_states.flatten(0, -2), tensors)
        loss = answers + _IMAGE_WEIGHT * images
        if step % 2 == 0:
            likeness = likeness_loss(model, tokenizer, batch)
            loss = loss + _LIKENESS_WEIGHT * likeness
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            sys.stderr.write(
                f"step {step:5d} of {steps}  answers {answers.item():.3f}  images {images.item():.3f}  "
                f"likeness {likeness.item():.4f}  {time.monotonic() - started:5.0f} s\n"
            )
    return model.eval(), build_processor(tokenizer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save, evaluate on properties never trained on, write the model card."""
    parser = argparse.ArgumentParser(description="Train the example model on rendered properties.")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("model"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=1, help="processes that render beside the training")
    parser.add_argument("--properties", type=int, default=500, help="properties to evaluate on")
    chosen = parser.parse_args(arguments)
    started = time.monotonic()
    model, processor = train(chosen.seed, steps=chosen.steps, workers=chosen.workers)
    model.save_pretrained(chosen.output)
    processor.save_pretrained(chosen.output)
    minutes = (time.monotonic() - started) / 60
    result = evaluate(chosen.output, properties=chosen.properties)
    sys.stdout.write(result.report() + "\n")
    write_card(chosen.output, result, seed=chosen.seed, steps=chosen.steps, minutes=minutes)
    sys.stdout.write(f"Trained in {minutes:.1f} minutes; the model is in {chosen.output}.\n")


if __name__ == "__main__":
    main()
