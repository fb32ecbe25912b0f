"""What a worker makes of a property's images: the output that an engine, or a page, asks for.

``Pixels`` lives here; thumbnails have a module of their own; tensors and files for a server live with their
engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from PIL import Image

if TYPE_CHECKING:
    import numpy.typing as npt


class Made(NamedTuple):
    """What was made of one property's images.

    images: an array for each image, in order. tensors: arrays of the property as a whole, by name, and how
    each is joined with those of other properties (see ``resources.engine.transformers.collation``).
    """

    images: Sequence[npt.NDArray[Any]] = ()
    tensors: Mapping[str, tuple[npt.NDArray[Any], str]] = {}


Maker = Callable[[Sequence[Image.Image]], Made]
"""Makes an output of a property's readable images: RGB, one or more."""


class Output(Protocol):
    """Describes an output. It is pickled and sent to the process from which all workers are forked."""

    def load(self) -> Maker:
        """Import and load what is needed, once for all workers. Starts no thread."""


@dataclass(frozen=True)
class Pixels:
    """The images as arrays [height, width, 3] of bytes."""

    def load(self) -> Maker:
        """See Output."""
        import numpy as np

        return lambda images: Made([np.asarray(image) for image in images])
