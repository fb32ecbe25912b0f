"""How good a model is on rendered properties whose truth is known and that it was never trained on.

``python -m examples.evaluation FOLDER... --degraded`` prints the figures of models side by side.

What lives here: photos as the example writes them, greedy answers without guidance, the count of what is
right, the likeness of embeddings. What does not: accuracy of a finished run from its files (accuracy.py).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydantic import ValidationError

from examples import canvas
from examples.architecture import answer_text
from examples.scenes import draw_property, encode_photo, render
from examples.truth import FIELDS, RARE, draw_truth, known, property_random
from vlm_assets.config.property_description import PropertyDescription
from vlm_durable.files.processes import die_with

EVALUATION_SEED: Final = 20_260_101
_BATCH: Final = 32


@dataclass(frozen=True)
class Evaluation:
    """Shares from 0 to 1, over the properties asked about."""

    properties: int
    valid: float
    """Answers that are JSON and fit the schema."""
    per_field: Mapping[str, float]
    recall: Mapping[str, float]
    """"field=value" to the share of properties with that value that were told so."""
    lift: float
    """Agreement of five nearest neighbours on the fields, lifted over chance (see ``lift``)."""

    @property
    def total(self) -> float:
        """Share of all fields that are right."""
        return float(np.mean(list(self.per_field.values())))

    def report(self) -> str:
        """The figures for people, one a line."""
        lines = [
            f"{self.properties} properties never trained on, decoded greedily without guidance",
            f"schema-valid answers  {self.valid:8.2%}",
            f"fields right          {self.total:8.2%}",
            *(f"  {name:20s}{share:8.2%}" for name, share in self.per_field.items()),
            "recall of rare values",
            *(f"  {name:22s}{share:6.1%}" for name, share in self.recall.items()),
            f"likeness of neighbours  {self.lift:6.2f}",
        ]
        return "\n".join(lines)


def evaluate(
    folder: Path, *, properties: int = 500, seed: int = EVALUATION_SEED, degraded: bool = False
) -> Evaluation:
    """Ask the model in ``folder`` about rendered properties, through the same loading as any model.

    degraded: all photos of a property are blurred and darkened, each property's by its own measure.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).eval()
    truths = [draw_truth("example", seed, index) for index in range(properties)]
    answers: list[PropertyDescription | None] = []
    spawn = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=die_with, initargs=(os.getpid(),)) as pool:
        photos = pool.map(partial(property_photos, seed, degraded=degraded), range(properties), chunksize=8)
        batch: list[list[bytes]] = []
        for images in photos:
            batch.append(images)
            if len(batch) == _BATCH:
                answers += ask(model, processor, batch)
                batch = []
        if batch:
            answers += ask(model, processor, batch)
    right = {
        name: float(
            np.mean(
                [
                    a is not None and known(a)[name] == known(t)[name]
                    for a, t in zip(answers, truths, strict=True)
                ]
            )
        )
        for name in FIELDS
    }
    return Evaluation(
        properties=properties,
        valid=float(np.mean([answer is not None for answer in answers])),
        per_field=right,
        recall=_recall(answers, truths),
        lift=lift(embed(model, processor, [answer_text(truth) for truth in truths]), truths),
    )


def property_photos(seed: int, index: int, *, degraded: bool = False) -> list[bytes]:
    """The photos of an example property as JPEGs; where degraded, from hardly at all to unrecognisable."""
    home = draw_property("example", seed, index)
    measure = property_random("example", seed, index, "measure").random() if degraded else 0.0
    return [encode_photo(canvas.degraded(render(home, view), measure)) for view in home.views]


def ask(model: Any, processor: Any, batch: Sequence[Sequence[bytes]]) -> list[PropertyDescription | None]:
    """Descriptions of properties from their JPEGs; None where the answer does not fit the schema."""
    import torch

    images = [
        [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in photos] for photos in batch
    ]
    chats = [[{"role": "user", "content": [{"type": "image"} for _ in photos]}] for photos in batch]
    prompts = processor.apply_chat_template(chats, add_generation_prompt=True)
    inputs = processor(text=prompts, images=images, padding=True, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, do_sample=False)
    texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [_parsed(text) for text in texts]


def _parsed(text: str) -> PropertyDescription | None:
    try:
        return PropertyDescription.model_validate_json(text)
    except ValidationError:
        return None


def _recall(
    answers: Sequence[PropertyDescription | None], truths: Sequence[PropertyDescription]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in RARE.items():
        having = [a for a, t in zip(answers, truths, strict=True) if getattr(t, name) == value]
        if having:
            found[f"{name}={value}"] = float(
                np.mean([a is not None and getattr(a, name) == value for a in having])
            )
    return found


def embed(model: Any, processor: Any, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Mean of the text layers' last hidden states over each text: float32 [n, width], unit length."""
    import torch

    inputs = processor.tokenizer(list(texts), padding=True, return_tensors="pt")
    mask = inputs["attention_mask"]
    with torch.inference_mode():
        states = model.model.text_model(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state
        pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        unit: npt.NDArray[np.float32] = torch.nn.functional.normalize(pooled, dim=-1).numpy()
    return unit


def lift(
    embeddings: npt.NDArray[np.float32], truths: Sequence[PropertyDescription], *, neighbours: int = 5
) -> float:
    """How much more often nearest neighbours agree on a field than two properties picked by chance do.

    (agree - chance) / (1 - chance): 0 for embeddings that say nothing, 1 where neighbours are the same in
    every field. ``chance`` is the sum of squared shares of a field's values, averaged over the fields.
    """
    rows = [known(truth) for truth in truths]
    agree = np.zeros((len(rows), len(rows)))
    chance = 0.0
    for name in FIELDS:
        column = np.array([str(row[name]) for row in rows])
        same = column[:, None] == column[None, :]
        agree += same / len(FIELDS)
        chance += float(same.mean()) / len(FIELDS)
    cosines = embeddings @ embeddings.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = np.argsort(-cosines, axis=1)[:, :neighbours]
    reached = float(np.take_along_axis(agree, nearest, axis=1).mean())
    return (reached - chance) / (1 - chance)


def main() -> None:
    """Print the figures of each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="of a model")
    parser.add_argument("--properties", type=int, default=500)
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED)
    parser.add_argument("--degraded", action="store_true", help="with blurred and dark photos")
    options = parser.parse_args()
    for folder in options.folders:
        found = evaluate(folder, properties=options.properties, seed=options.seed, degraded=options.degraded)
        sys.stdout.write(f"{folder}\n{found.report()}\n\n")


if __name__ == "__main__":
    main()
