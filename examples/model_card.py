"""The example model's card: what it is, how it was made, what it can and cannot do."""

from __future__ import annotations

from pathlib import Path

from examples.evaluation import Evaluation
from resources.storage.files import write_replacing

_CARD = """\
---
library_name: transformers
pipeline_tag: image-text-to-text
---
# Example model

A small Idefics3 ({parameters:.2f} million parameters, float32) that describes rendered example properties.
It exists so that the whole pipeline runs for real on two CPU cores and its answers can be checked field
by field. It has never seen a photo of a real property and is of no use for one.

- **Input**: one to ten images of a property, each squeezed to 64 by 64 pixels, one token an image.
- **Output**: one compact JSON object, the fields of `PropertyDescription` in schema order.
- **The question's text is left out** by the chat template: the model knows one task, so its answer does
  not depend on the prompt. Any other model's template passes the prompt on.
- **Embedding**: the mean of the text layers' last hidden states over a text's tokens (128 numbers),
  trained so that the cosine of two descriptions is about the share of fields on which they agree.
- **Made by** `make example-model` (seed {seed}, {steps} steps, {minutes:.0f} minutes), from properties
  rendered by `examples/scenes.py`. Some training examples lack images: what the others cannot
  show is guessed.

## Evaluation

```
{report}
```

Trained from random weights on images rendered here: nothing of third parties is in it.
"""


def write_card(folder: Path, result: Evaluation, *, seed: int, steps: int, minutes: float) -> None:
    """Write README.md beside the weights."""
    # Four bytes a weight; what else the file holds is a header of a few kilobytes.
    parameters = (folder / "model.safetensors").stat().st_size / 4e6
    card = _CARD.format(
        parameters=parameters, seed=seed, steps=steps, minutes=minutes, report=result.report()
    )
    write_replacing(folder / "README.md", card.encode())
