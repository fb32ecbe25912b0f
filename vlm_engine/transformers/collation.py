"""One batch of tensors from the tensors of its properties, equal to the processor's own batch bit for bit.

A worker makes the tensors of one property, and the model's process joins those of a batch. Families of
processors join properties in different ways: images one after another (LLaVA, Gemma, Qwen), or a row of
images a property, padded to the longest (Idefics, SmolVLM); prompts are padded on the left. How each tensor
is joined is tried out: the processor makes a few properties together and singly, and the two are compared.
Where no way gives the processor's own batch, batches are processed as a whole. Where several questions are
asked about a property, the endings of their prompts are tried out too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

from vlm_engine.images.images import Made, Maker, Pixels
from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import ImageLimits
from vlm_engine.transformers.image_tokens import fitted_processor, processed

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

_PROBED: Final = (((64, 48),), ((180, 120), (40, 160), (64, 48)), ((48, 64), (100, 100)))
"""Sizes of the images of the properties that are tried: numbers and shapes differ."""

_IDS: Final = "input_ids"

_ONE_AFTER_ANOTHER: Final = "one after another"
_PADDED: Final = "padded with "
_PADDED_ON_THE_LEFT: Final = "padded on the left with "


@dataclass(frozen=True)
class Endings:
    """What follows the shared beginning of the prompts of several questions.

    tensors: of each question, by the processor's name, [tokens].
    """

    tensors: Sequence[Mapping[str, torch.Tensor]]

    def tokens(self, question: int) -> int:
        """Tokens of a question's ending; one at least."""
        return len(self.tensors[question][_IDS])

    def exchanged(
        self, batch: Mapping[str, torch.Tensor], asked: int, question: int
    ) -> dict[str, torch.Tensor]:
        """The text of a batch's prompts [properties, tokens], for another question than was asked."""
        import torch

        shared = -self.tokens(asked)
        return {
            name: torch.cat(
                [batch[name][:, :shared], ending.to(batch[name]).expand(len(batch[name]), -1)], dim=1
            )
            for name, ending in self.tensors[question].items()
        }


@dataclass(frozen=True)
class Tensors:
    """The processor's tensors of each property, floats of ``dtype``. See ``vlm_engine.images.images.Output``.

    Workers of a family whose tensors cannot be joined hand over pixels instead, and the
    engine processes whole batches. further: prompts of other questions about the same images. Where a prompt
    is more than images and then text, workers hand over pixels too.
    """

    source: ModelSource
    prompt: str
    dtype: str
    limits: ImageLimits | None = None
    further: tuple[str, ...] = ()

    def load(self) -> Maker:
        """See Output."""
        import torch

        torch.set_num_threads(1)
        processor, _ = fitted_processor(self.source, self.prompt, self.limits)
        joins = learn_joins(processor, self.prompt)
        if joins is None or (self.further and learn_endings(processor, (self.prompt, *self.further)) is None):
            return Pixels().load()
        dtype = getattr(torch, self.dtype)

        def make(images: Sequence[Image.Image]) -> Made:
            # Converted here: half as much to hand over, and nothing left to do for the model's process.
            tensors = processed(processor, self.prompt, [images]).to("cpu", dtype)
            return Made((), {name: (as_array(tensor), joins[name]) for name, tensor in tensors.items()})

        return make


def learn_joins(processor: Any, prompt: str) -> dict[str, str] | None:
    """How each tensor of a batch is joined, by its name; None where properties cannot be joined."""
    import torch

    images = _probe_images()
    try:
        whole = processed(processor, prompt, images)
        singly = [processed(processor, prompt, [own_images]) for own_images in images]
    except Exception:  # A processor that refuses these pictures may take others, as a whole batch.
        return None
    joins: dict[str, str] = {}
    for name, expected in whole.items():
        if any(name not in tensors for tensors in singly) or not isinstance(expected, torch.Tensor):
            return None
        parts = [tensors[name] for tensors in singly]
        for join in _candidates(parts, expected):
            made = joined(parts, join)
            if made is not None and made.dtype == expected.dtype and made.equal(expected):
                joins[name] = join
                break
        else:
            return None
    return joins if all(tensors.keys() == joins.keys() for tensors in singly) else None


def learn_endings(processor: Any, prompts: Sequence[str]) -> Endings | None:
    """The endings of these prompts; None where a processor puts text before images, or mixes both."""
    try:
        singly = [
            _endings([processed(processor, prompt, [images]) for prompt in prompts])
            for images in _probe_images()
        ]
    except Exception:  # A processor that refuses these pictures may take others, question by question.
        return None
    first = singly[0]
    if first is None or any(other is None or not _are_equal(first, other) for other in singly):
        return None
    return first


def _endings(prompts: Sequence[Mapping[str, torch.Tensor]]) -> Endings | None:
    """The endings of prompts with the same images; None where these differ by more than their text."""
    first = prompts[0]
    names = [name for name, tensor in first.items() if tensor.shape == first[_IDS].shape]
    for other in prompts:
        if other.keys() != first.keys():
            return None
        if any(name not in names and not other[name].equal(tensor) for name, tensor in first.items()):
            return None
    shared = min(
        _common([first[name][0] for name in names], [other[name][0] for name in names]) for other in prompts
    )
    return Endings([{name: tensors[name][0, shared:] for name in names} for tensors in prompts])


def _common(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> int:
    """Tokens that two prompts have in common, before the last of either."""
    length = min(len(some[0]), len(others[0])) - 1
    alike = [mine[:length] == its[:length] for mine, its in zip(some, others, strict=True)]
    return next((at for at, same in enumerate(zip(*alike, strict=True)) if not all(same)), length)


def _are_equal(some: Endings, others: Endings) -> bool:
    return all(
        mine.keys() == its.keys() and all(tensor.equal(its[name]) for name, tensor in mine.items())
        for mine, its in zip(some.tensors, others.tensors, strict=True)
    )


def collated(properties: Sequence[Mapping[str, tuple[npt.NDArray[Any], str]]]) -> dict[str, torch.Tensor]:
    """The tensors of a batch. Raises ValueError where its properties do not fit together."""
    batch = {}
    for name, (_, join) in properties[0].items():
        made = joined([as_tensor(arrays[name][0]) for arrays in properties], join)
        if made is None:
            raise ValueError(f"{name} of these properties cannot be joined {join}")
        batch[name] = made
    return batch


def joined(parts: Sequence[torch.Tensor], join: str) -> torch.Tensor | None:
    """The parts, each [1 or images, ...], as one tensor; None where their shapes do not allow it."""
    import torch

    if join == _ONE_AFTER_ANOTHER:
        fits = all(part.shape[1:] == parts[0].shape[1:] for part in parts)
        return torch.cat(list(parts)) if fits else None
    if any(part.dim() != parts[0].dim() or len(part) != 1 for part in parts):
        return None
    shape = [max(part.shape[axis] for part in parts) for axis in range(1, parts[0].dim())]
    fill = float(join.rpartition(" ")[2])
    batch = torch.full((len(parts), *shape), fill, dtype=parts[0].dtype)
    for row, part in zip(batch, parts, strict=True):
        if join.startswith(_PADDED_ON_THE_LEFT):
            row[len(row) - part.shape[1] :] = part[0]
        else:
            row[tuple(slice(size) for size in part.shape[1:])] = part[0]
    return batch


def _candidates(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> Iterator[str]:
    yield _ONE_AFTER_ANOTHER
    if whole.dim() == 2:
        # The row of the shortest prompt begins with its padding.
        shortest = min(range(len(parts)), key=lambda index: parts[index].shape[-1])
        if shortest < len(whole) and whole.shape[1]:
            yield f"{_PADDED_ON_THE_LEFT}{whole[shortest, 0].item()}"
    yield f"{_PADDED}0"


def _probe_images() -> list[list[Image.Image]]:
    """The images of a few properties, by which it is tried out what a processor does."""
    return [[_picture(*size, seed) for seed, size in enumerate(sizes)] for sizes in _PROBED]


def _picture(width: int, height: int, seed: int) -> Image.Image:
    """A picture in which no two parts are the same."""
    gradient = Image.linear_gradient("L").resize((width, height))
    turned = gradient.rotate(90 + seed, resample=Image.Resampling.BILINEAR)
    return Image.merge(
        "RGB", (gradient, turned, Image.effect_mandelbrot((width, height), (-2, -1, 1, 1), 50))
    )


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's memory. NumPy has no bfloat16: it becomes uint16, which no processor makes."""
    import torch

    array: npt.NDArray[Any] = (
        tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The tensor of ``as_array``."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
