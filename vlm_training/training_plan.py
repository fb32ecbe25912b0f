"""The plan of a training, as a file that every rank reads, and the samples that it names.

Names such as ``module:name`` are imported here. The plan's values come from ``description_model.py``, and
``loop.py`` uses them. Needs no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from vlm_durable.files.files import sync_directory, write_replacing
from vlm_engine.model_source import ModelSource
from vlm_engine.protocol import ImageLimits

SAMPLES: Final = "samples.jsonl"
"""The file of samples in a training's folder, unless a function makes the samples."""


class TrainingError(RuntimeError):
    """A training cannot begin or go on; the message says what to do."""


@dataclass(frozen=True)
class Sample:
    """A property to learn from. target: its known fields. confidence: how sure a teacher was of them."""

    property_id: str
    image_paths: tuple[str, ...]
    target: Mapping[str, Any]
    confidence: Mapping[str, Any] = field(default_factory=dict)


class Samples(Protocol):
    """All samples of a training, held-out ones included, in a fixed order."""

    ids: Sequence[str]

    def __getitem__(self, index: int) -> Any:
        """The sample, as the objective takes it."""


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that decides a training's result, and a few values that do not.

    base, samples: a model's name and a file of samples, or ``module:name`` of a function that makes them from
    this plan. objective: ``default`` or ``module:name``. steps or epochs: one of them. batch: samples of an
    optimizer step, computed in ``microbatches`` whatever the number of ranks. held_out: share of the ids that
    is never trained on. evaluate: held-out properties described at the end. patience: epochs without a better
    metric after which the training stops; then the best weights count. workers, checkpoint_seconds, threads,
    ranks: how it is computed. copies: the address in a store where checkpoints are copied to. parts: digests
    of all values that decide the result, by name: they distinguish this training from one under another plan.
    """

    variant: str
    base: str
    samples: str
    schema: str
    prompt: str
    learning_rate: float
    seed: int
    batch: int
    microbatches: int
    steps: int | None = None
    epochs: float | None = None
    objective: str = "default"
    method: str = "full"
    held_out: float = 0.1
    evaluate: int = 64
    patience: int | None = None
    workers: int = 0
    threads: int = 1
    ranks: int = 1
    checkpoint_seconds: float | None = None
    copies: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> ModelSource:
        """The source of the base model."""
        return ModelSource(self.base, self.revision, self.trust_remote_code)

    @property
    def image_limits(self) -> ImageLimits:
        """The limits of images: those of a description."""
        return ImageLimits(**self.limits)

    def is_held_out(self, property_id: str) -> bool:
        """Whether a property is never trained on. Its id alone decides: added data changes nothing."""
        number = int.from_bytes(sha256(property_id.encode()).digest()[:8], "big")
        return number < self.held_out * 2**64

    def write(self, path: Path) -> None:
        """Write it durably."""
        write_replacing(path, json.dumps(asdict(self), indent=2).encode())

    @classmethod
    def read(cls, path: Path) -> TrainingPlan:
        """Read a plan that ``write`` wrote."""
        return cls(**json.loads(path.read_bytes()))


class SampleFile:
    """Samples in a file of JSON lines, as ``write_samples`` makes it."""

    def __init__(self, path: Path) -> None:
        with path.open(encoding="utf-8") as stream:  # splitlines() would cut a text at its U+2028
            self._rows = [json.loads(line) for line in stream]
        self.ids: Sequence[str] = [row["property_id"] for row in self._rows]

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        # Earlier versions wrote no confidence.
        return Sample(row["property_id"], tuple(row["image_paths"]), row["target"], row.get("confidence", {}))


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples durably, one a line."""
    lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    write_replacing(path, "".join(lines).encode())


def remove_training(folder: Path) -> None:
    """Remove a training's folder, the list of samples last: by it a removal is resumed. Raises OSError."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == SAMPLES):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()
    sync_directory(folder.parent)


def import_by_name(name: str) -> Any:
    """Import the object that ``module:name`` names. Raises TrainingError."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrainingError(
            f"{name!r} cannot be found: {error}. Give module:name of something that this environment can"
            " import, such as a file in the checkout."
        ) from error


def load_samples(plan: TrainingPlan) -> Samples:
    """The samples of a plan. Raises TrainingError, OSError."""
    if is_import_name(plan.samples):
        samples: Samples = import_by_name(plan.samples)(plan)
        return samples
    return SampleFile(Path(plan.samples))


def is_import_name(text: str) -> bool:
    """Whether a text is ``module:name``: neither a path nor a hub id has such a colon."""
    module, colon, attribute = text.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))
