"""What a worker makes of a property's images: the output that an engine, or a page, asks for.

``Pixels`` and ``Thumbnails`` live here; tensors and files for a server live with their engines.
"""

from __future__ import annotations

import io
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


@dataclass(frozen=True)
class Thumbnails:
    """Small JPEG files, as arrays of bytes. height: in pixels; none is wider than twice that."""

    height: int

    def load(self) -> Maker:
        """See Output."""
        import numpy as np

        def make(images: Sequence[Image.Image]) -> Made:
            files = []
            for image in images:
                # A panorama must not push the others off the page.
                width = min(2 * self.height, max(1, round(image.width * self.height / image.height)))
                stream = io.BytesIO()
                image.resize((width, self.height), Image.Resampling.LANCZOS).save(stream, "JPEG", quality=72)
                files.append(np.frombuffer(stream.getvalue(), np.uint8))
            return Made(files)

        return make
