"""The models as Dagster sees them: settings in, an engine or an embedder on the leased device out.

What lives here: two thin resources, with no logic of their own. What does not: loading and generating
(``model_loading.py``, ``transformers_engine.py``, ``embedder.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import Field

from resources.gpu.devices import Device
from resources.vlm.model_loading import ModelSource, exact_revision, load_config
from resources.vlm.prompt import Prompt
from resources.vlm.schema import DescriptionSchema

if TYPE_CHECKING:
    from resources.vlm.embedder import TextEmbedder
    from resources.vlm.engine import Engine


class VisionLanguageModel(dg.ConfigurableResource["VisionLanguageModel"]):
    """The model that describes properties."""

    model: str = Field(description="A local folder or a hub id.")
    revision: str | None = Field(None, description="Commit, tag or branch on the hub.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    records_directory: str | None = Field(
        None, description="Folder that remembers which commit and weights the model is."
    )

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        records = Path(self.records_directory) if self.records_directory else None
        return ModelSource(self.model, self.revision, self.trust_remote_code, records)

    def exact_revision(self) -> str:
        """What exactly the model is now; needs no device and no torch. Raises ModelLoadError."""
        return exact_revision(self.source)

    def load(self, device: Device, *, schema: DescriptionSchema, prompt: Prompt) -> Engine:
        """An engine on the leased device. Raises ModelLoadError."""
        from resources.vlm.transformers_engine import TransformersEngine

        return TransformersEngine(self.source, schema=schema, prompt=prompt, device=device.kind)


class TextEmbeddingModel(dg.ConfigurableResource["TextEmbeddingModel"]):
    """The model that embeds the text of descriptions."""

    model: str = Field(
        description="A local folder or a hub id; a vision-language model lends its text layers."
    )
    revision: str | None = Field(None, description="Commit, tag or branch on the hub.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    records_directory: str | None = Field(
        None, description="Folder that remembers which commit and weights the model is."
    )

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        records = Path(self.records_directory) if self.records_directory else None
        return ModelSource(self.model, self.revision, self.trust_remote_code, records)

    def exact_revision(self) -> str:
        """What exactly the model is now; needs no device and no torch. Raises ModelLoadError."""
        return exact_revision(self.source)

    def width(self) -> int:
        """Numbers a vector has, from the model's configuration alone. Raises ModelLoadError."""
        return int(load_config(self.source).get_text_config().hidden_size)

    def load(self, device: Device) -> TextEmbedder:
        """An embedder on the leased device. Raises ModelLoadError."""
        from resources.vlm.embedder import TextEmbedder

        return TextEmbedder(self.source, device=device.kind)
