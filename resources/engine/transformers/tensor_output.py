"""What workers make for the engine in process: the processor's tensors, or pixels where those do not join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from resources.engine.transformers.model_loading import ModelSource, load_processor
from resources.images.outputs import Made, Maker, Pixels


@dataclass(frozen=True)
class Tensors:
    """The processor's tensors of each property, floats of ``dtype``. See ``outputs.Output``.

    Workers of a family whose tensors cannot be joined (see ``collation``) hand over pixels instead, and the
    engine processes whole batches.
    """

    source: ModelSource
    prompt: str
    dtype: str

    def load(self) -> Maker:
        """See Output."""
        import torch

        from resources.engine.transformers.collation import as_array, learn_joins
        from resources.engine.transformers.model_inputs import processed

        torch.set_num_threads(1)
        processor = load_processor(self.source)
        joins = learn_joins(processor, self.prompt)
        if joins is None:
            return Pixels().load()
        dtype = getattr(torch, self.dtype)

        def make(images: Sequence[Image.Image]) -> Made:
            # Converted here: half as much to hand over, and nothing left to do for the model's process.
            tensors = processed(processor, self.prompt, [images]).to("cpu", dtype)
            return Made((), {name: (as_array(one), joins[name]) for name, one in tensors.items()})

        return make
