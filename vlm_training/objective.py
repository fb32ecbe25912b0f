"""The objective of a training. The default learns the answer's tokens, of any image-text-to-text model.

Another objective fulfils the same interface (``objective: module:name``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from vlm_durable.mirror.bucket import BadAddressError, S3Folder
from vlm_engine.images.fetching import image_of
from vlm_engine.images.images import ImageError, LoadedProperty, load_image
from vlm_engine.ladder import describe_batch
from vlm_engine.model_source import ModelSource
from vlm_engine.prompt import Prompt
from vlm_engine.schema import DescriptionSchema, description_text, load_schema, same
from vlm_training.training_plan import Sample, TrainingError, TrainingPlan, import_by_name, is_import_name

_IGNORED: Final = -100
_ASKED_TOGETHER: Final = 16
_HELD_OUT: Final = "held-out properties"


class Objective(Protocol):
    """What a training learns. The results of all methods but ``loss`` depend on their arguments alone."""

    def build(self) -> tuple[Any, Any]:
        """The model to train, in float32 on the CPU, and its processor."""

    def heads(self, model: Any) -> Any | None:
        """A module that is trained beside the model and dropped when the model is saved."""

    def features(self, sample: Any, seed: int) -> Any | None:
        """A sample as it is shown once, augmented by this seed. Called in a loader's process.

        None if none of its images can be read.
        """

    def collate(self, features: Sequence[Any]) -> Any:
        """A microbatch."""

    def loss(self, model: Any, heads: Any, batch: Any, *, step: int) -> tuple[Any, float]:
        """The sum of the losses of a microbatch, and their weight: the number of tokens, or of samples."""

    def figures(self, folder: Path, held_out: Sequence[Any], device: Literal["cpu", "cuda"]) -> Figures:
        """How good the model in ``folder`` is on samples that it was not trained on."""


@dataclass(frozen=True)
class Figures:
    """How good a model is. count: properties it was asked about. population: which ones, in words.

    right: shares by field, and other figures.
    """

    count: int
    population: str
    right: Mapping[str, float]


def load_objective(plan: TrainingPlan) -> Objective:
    """The objective of a plan. Raises TrainingError."""
    kind = DescribeObjective if plan.objective == "default" else import_by_name(plan.objective)
    objective: Objective = kind(plan)
    return objective


def build_base(plan: TrainingPlan) -> tuple[Any, Any]:
    """The base model in float32, and its processor. Raises ModelLoadError, TrainingError."""
    import torch

    if is_import_name(plan.base):
        torch.manual_seed(plan.seed)
        model, processor = import_by_name(plan.base)()
        return model, processor
    from transformers import AutoModelForImageTextToText

    from vlm_engine.transformers.model_loading import load_model, load_processor

    return load_model(plan.source, AutoModelForImageTextToText, device="cpu"), load_processor(plan.source)


@dataclass(frozen=True)
class _Features:
    """A sample: the processor's tensors with the answer appended. labels: [1, tokens].

    weights: [1, tokens], of the labels in the loss; None where each counts the same.
    """

    tensors: Mapping[str, Any]
    labels: Any
    weights: Any = None


class DescribeObjective:
    """The model gets the prompt of a description and learns the answer: the JSON of the known fields.

    A field that the target lacks is in the answer with an empty value of its type, which is not learned. The
    tokens of a field that a teacher was not sure of weigh as much as its confidence.
    """

    def __init__(self, plan: TrainingPlan) -> None:
        self._plan = plan
        self._schema: DescriptionSchema = load_schema(plan.schema)
        self._processor: Any = None
        self._joins: dict[str, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A loader's process builds its own.
        return {"_plan": self._plan, "_schema": None, "_processor": None, "_joins": None}

    def build(self) -> tuple[Any, Any]:
        """See Objective."""
        if is_import_name(self._plan.base):
            raise TrainingError(
                f"{self._plan.base!r} makes a model of its own; it needs an objective of its own too, for the"
                " default one reads the processor from a model's folder."
            )
        return build_base(self._plan)

    def heads(self, model: Any) -> Any | None:
        """See Objective."""
        return None

    def _prepare(self) -> Any:
        if self._processor is None:
            from vlm_engine.transformers.collation import learn_joins
            from vlm_engine.transformers.image_tokens import fitted_processor

            plan = self._plan
            self._schema = load_schema(plan.schema)
            self._processor, _ = fitted_processor(plan.source, plan.prompt, plan.image_limits)
            self._joins = learn_joins(self._processor, plan.prompt)
        return self._processor

    def features(self, sample: Sample, seed: int) -> _Features | None:
        """See Objective. Nothing is augmented: ``seed`` is for objectives that do."""
        import torch

        from vlm_engine.transformers.image_tokens import processed

        images = load_images(sample, self._plan)
        if not images:
            return None
        processor = self._prepare()
        tensors = dict(processed(processor, self._plan.prompt, [images]))
        text, hidden, weighed = answer(sample.target, self._schema, sample.confidence)
        encoded = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        end = processor.tokenizer.eos_token_id
        ids = torch.tensor([[*encoded["input_ids"], end]])
        learned = [
            not any(begin < stop and until > start for start, stop in hidden)
            for begin, until in encoded["offset_mapping"]
        ]
        labels = ids.masked_fill(~torch.tensor([[*learned, True]]), _IGNORED)
        prompt_ids = tensors["input_ids"]
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.shape == prompt_ids.shape and name != "input_ids":
                fill = torch.ones_like(ids) if name == "attention_mask" else torch.zeros_like(ids)
                tensors[name] = torch.cat([tensor, fill.to(tensor.dtype)], dim=1)
        tensors["input_ids"] = torch.cat([prompt_ids, ids], dim=1)
        weights = None
        if sample.confidence:
            of_tokens = [
                min((sure for start, stop, sure in weighed if begin < stop and until > start), default=1.0)
                for begin, until in encoded["offset_mapping"]
            ]
            weights = torch.tensor([[*[0.0] * prompt_ids.shape[1], *of_tokens, 1.0]])
        labels = torch.cat([torch.full_like(prompt_ids, _IGNORED), labels], dim=1)
        return _Features(tensors, labels, weights)

    def collate(self, features: Sequence[_Features]) -> list[_Features]:
        """Samples joined and padded on the right; single ones if the model's tensors cannot be joined."""
        import torch

        from vlm_engine.transformers.collation import joined

        self._prepare()
        if self._joins is None or len(features) == 1:
            return list(features)
        pad = self._processor.tokenizer.pad_token_id or 0
        batch: dict[str, Any] = {}
        for name, join in self._joins.items():
            parts = [sample.tensors[name] for sample in features]
            if "on the left" in join:
                join = f"padded with {pad if name == 'input_ids' else 0}"
            batch[name] = joined(parts, join)
        labels = joined([sample.labels for sample in features], f"padded with {_IGNORED}")
        weights = None
        if any(sample.weights is not None for sample in features):
            parts = [
                torch.ones_like(sample.labels, dtype=torch.float32)
                if sample.weights is None
                else sample.weights
                for sample in features
            ]
            weights = joined(parts, "padded with 0")
        return [_Features(batch, labels, weights)]

    def loss(self, model: Any, heads: Any, batch: list[_Features], *, step: int) -> tuple[Any, float]:
        """Cross entropy summed over the answers' tokens, and how many there are; by their weights."""
        import torch

        total, count = torch.zeros((), device=model.device), 0.0
        for part in batch:
            tensors = {name: tensor.to(model.device) for name, tensor in part.tensors.items()}
            logits = model(**tensors, use_cache=False).logits[:, :-1]
            targets = part.labels[:, 1:].to(model.device)
            learned = targets != _IGNORED
            losses = torch.nn.functional.cross_entropy(
                logits[learned].float(), targets[learned], reduction="sum" if part.weights is None else "none"
            )
            if part.weights is None:
                total = total + losses
                count += int(learned.sum())
            else:
                weights = part.weights[:, 1:].to(model.device)[learned]
                total = total + (losses * weights).sum()
                count += float(weights.sum())
        return total, count

    def figures(self, folder: Path, held_out: Sequence[Sample], device: Literal["cpu", "cuda"]) -> Figures:
        """The share of properties that get each known field right, guided as in a real run."""
        from vlm_engine.transformers.transformers_engine import TransformersEngine

        plan = self._plan
        if not held_out:
            return Figures(0, _HELD_OUT, {})
        self._schema = load_schema(plan.schema)
        engine = TransformersEngine(
            ModelSource(str(folder)),
            schema=self._schema,
            prompt=Prompt(plan.prompt),
            device=device,
            limits=plan.image_limits,
        )
        right: dict[str, list[bool]] = {}
        try:
            for start in range(0, len(held_out), _ASKED_TOGETHER):
                samples = held_out[start : start + _ASKED_TOGETHER]
                loaded = [_loaded(sample, plan) for sample in samples]
                described = describe_batch(engine, self._schema, loaded, plan.image_limits.answer_tokens)
                for sample, row in zip(samples, described, strict=True):
                    for name, value in sample.target.items():
                        answered = (row.description or {}).get(name)
                        right.setdefault(name, []).append(same(answered, value))
        finally:
            engine.close()
        shares = {name: sum(verdicts) / len(verdicts) for name, verdicts in right.items()}
        return Figures(len(held_out), _HELD_OUT, shares)


def load_images(sample: Sample, plan: TrainingPlan) -> list[Any]:
    """The first readable images of a sample, at most as many as are shown for a description.

    Raises StoreAwayError.
    """
    limits = plan.image_limits
    images: list[Any] = []
    for path in sample.image_paths:
        if len(images) == limits.images:
            break
        try:
            content = _fetched(path) if path.startswith("s3://") else None
            images.append(load_image(path, max_pixels=limits.pixels, content=content))
        except ImageError:
            continue
    return images


def _fetched(address: str) -> bytes:
    """The bytes of an image. Raises ImageError, also for a bad address, and StoreAwayError."""
    folder, _, name = address.rpartition("/")
    try:
        return image_of(S3Folder.parse(folder), name)
    except BadAddressError as error:
        raise ImageError("missing", f"{address}: {error}.") from error


def answer(
    target: Mapping[str, Any], schema: DescriptionSchema, confidence: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]], list[tuple[int, int, float]]]:
    """The answer to learn; its unknown parts, which are not learned; and its parts that weigh less than 1.

    Parts are from character to character, the latter with their weights.
    """
    empty = {"string": "", "integer": 0, "number": 0, "boolean": False, "array": [], "object": {}}
    description: dict[str, Any] = {}
    unknown = []
    for name, field in schema.json_schema["properties"].items():
        if name in target:
            description[name] = target[name]
        elif name in schema.json_schema.get("required", ()):
            description[name] = field["enum"][0] if "enum" in field else empty.get(field.get("type", ""))
            if description[name] is not None:
                unknown.append(name)
    text, places = description_text(description), _value_places(description)
    hidden = [(start + (text[start] == '"'), stop) for start, stop in map(places.__getitem__, unknown)]
    return text, hidden, list(_weighed_places(description, confidence))


def _value_places(description: Mapping[str, Any], place: int = 0) -> dict[str, tuple[int, int]]:
    """The place of each value in the text of a description that begins at ``place``; nulls have none."""
    places = {}
    for name, value in description.items():
        if value is not None:
            start = place + 1  # After the bracket or the comma.
            place = start + len(description_text({name: value})) - len("{}")
            places[name] = start + len(json.dumps(name, ensure_ascii=False)) + len(":"), place
    return places


def _weighed_places(
    description: Mapping[str, Any], confidence: Mapping[str, Any], place: int = 0
) -> Iterator[tuple[int, int, float]]:
    """The places of the values that a teacher was more or less sure of, and how sure."""
    for name, (start, stop) in _value_places(description, place).items():
        value, sure = description[name], confidence.get(name)
        if isinstance(sure, Mapping) and isinstance(value, Mapping):
            yield from _weighed_places(value, sure, start)
        elif isinstance(sure, float):
            yield start, stop, sure


def _loaded(sample: Sample, plan: TrainingPlan) -> LoadedProperty:
    import numpy as np

    images = [np.asarray(image) for image in load_images(sample, plan)]
    return LoadedProperty(sample.property_id, 0, images, len(images), (), 0.0)
