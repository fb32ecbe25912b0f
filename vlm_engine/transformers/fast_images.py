"""Resizing and normalizing of images by torch, in the place of Pillow and float64.

This is that part of transformers' image processors without torchvision. The sizes of images, and how they are
cut, stay each family's own. A core needs a quarter of Pillow's time. torchvision's processors would be as
fast, but the public index has no build of torchvision for the CPU's torch.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from vlm_engine.protocol import ModelLoadError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_log = logging.getLogger(__name__)

_FILTERS: Final = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of the filters that torch has too."""

_RESIZED: Final = {
    "lanczos": "a77a1b8fc5a5f0f5",
    "bilinear": "89ac03de606c639a",
    "bicubic": "b2f7d72f4ee20970",
}
"""Digests of a picture that torch has resized by each filter. Another torch or another kind of CPU may bring
another kernel. Where its pixels differ, DECODING must be raised, or this machine must not describe."""


def made_fast(image_processor: Any) -> Any:
    """The image processor with these operations, if it works with Pillow; else as it is.

    Pixels differ from Pillow's by a level or two of 256, in one byte of two hundred. Raises ModelLoadError
    where torch makes other pixels on this machine than elsewhere: the fingerprint would not tell them apart.
    Only the family's own filter is checked. Pillow does those that this torch lacks (lanczos in 2.11).
    """
    from transformers.image_processing_backends import PilBackend

    family: Any = type(image_processor)
    if issubclass(family, PilBackend):
        resample = getattr(image_processor, "resample", None)
        number = 2 if resample is None else int(resample)
        _resizes_alike(number)  # A machine that differs is refused here, before its first image.
        image_processor.__class__ = _fast(family)
    return image_processor


@cache
def _resizes_alike(number: int) -> bool:
    """Whether torch has this filter of Pillow's, with the pixels of all machines. Raises ModelLoadError."""
    import torch

    mode = _FILTERS.get(number)
    if mode is None:
        return False
    try:
        digest = resized_digest(mode)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        _log.warning("torch %s does not resize by %s; Pillow does: %s", torch.__version__, mode, error)
        return False
    if digest != _RESIZED[mode]:
        raise ModelLoadError(
            f"torch {torch.__version__} resizes an image to other pixels on this machine than it should, and"
            " the rows would count as the same; install the torch that constraints.txt names, or use another"
            " kind of machine"
        )
    return True


def resized_digest(mode: str) -> str:
    """A digest of a picture that torch resizes here, smaller and larger, in both orders of memory."""
    import torch

    values = torch.arange(3 * 230 * 310) * 7919 % 65_521 % 256
    picture = values.to(torch.uint8).view(1, 3, 230, 310)
    digest = hashlib.sha256()
    for order in (torch.contiguous_format, torch.channels_last):
        shown = picture.contiguous(memory_format=order)
        for size in ((97, 141), (300, 200)):
            made = torch.nn.functional.interpolate(shown, size=size, mode=mode, antialias=True)
            digest.update(made.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


@cache
def _fast(family: Any) -> Any:
    import torch
    from transformers.image_processing_backends import PilBackend

    class Fast(PilBackend):  # type: ignore[misc]  # transformers is not typed
        """Stands between a family's image processor and Pillow."""

        def resize(self, image: Any, size: Any, resample: Any = None, **more: Any) -> Any:
            """An image [channels, height, width] of bytes in another size."""
            number = 2 if resample is None else int(resample)
            if (
                not _resizes_alike(number)
                or not (size.height and size.width)
                or image.dtype != "uint8"
                or more
            ):
                return super().resize(image, size, resample=resample, **more)
            return torch.nn.functional.interpolate(
                _tensor(image)[None], size=(size.height, size.width), mode=_FILTERS[number], antialias=True
            )[0].numpy()

        def rescale(self, image: Any, scale: float, **_: Any) -> Any:
            """Each value times ``scale``, as float32."""
            return (_tensor(image).to(torch.float32, copy=True)).mul_(scale).numpy()

        def normalize(self, image: Any, mean: Any, std: Any, **_: Any) -> Any:
            """Each channel less its mean, over its deviation, as float32."""
            middle, spread = (
                torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (mean, std)
            )
            return (_tensor(image).to(torch.float32) - middle).div_(spread).numpy()

    # Its own name, which refusals and configurations show.
    return type(family.__name__, (family, Fast), {"__module__": family.__module__})


def _tensor(image: npt.NDArray[np.generic]) -> torch.Tensor:
    """The image's memory, or a copy where that is read-only, because torch would warn."""
    import numpy as np
    import torch

    return torch.from_numpy(np.require(image, requirements="W"))
