"""The models as Dagster sees them: settings in, an engine or an embedder on the leased device out.

What lives here: two thin resources, with no logic of their own. What does not: loading and generating
(``model_loading.py``, ``transformers_engine.py``, ``embedder.py``), model servers (``server/choice.py``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from resources.devices.find import Device
from resources.engine.prompt import Prompt
from resources.engine.schema import DescriptionSchema
from resources.engine.transformers.model_loading import ModelSource, exact_revision, load_config

if TYPE_CHECKING:
    from resources.engine.embedder import TextEmbedder
    from resources.engine.protocol import Engine
    from resources.engine.server.choice import ServerChoice


class ModelServerChoice(dg.Config):
    """The server that describes in place of an engine in this process. See ``ServerChoice``.

    Of its key only the environment variable is named: Dagster shows a resource's fields to everyone.
    """

    state_directory: str = Field(description="Folder that keeps a started server's record.")
    command: str | None = Field(None, description="Template of the command that starts it.")
    url: str | None = Field(None, description="Address of one that runs already, up to /v1.")
    key_variable: str = Field(description="Environment variable with the key of the one at the address.")
    model: str | None = Field(None, description="The model's name at the address.")
    most_at_once: int = Field(32, description="Requests at once, at most.")
    token_seconds: float = Field(120.0, description="Seconds without a new token, at most.")
    answer_seconds: float = Field(900.0, description="Seconds for an answer, at most.")
    start_seconds: float = Field(1200.0, description="Seconds in which it must have started.")
    idle_seconds: float = Field(300.0, description="Seconds without a partition after which it ends.")
    image_folder: str | None = Field(None, description="Folder for images as files. None: in the request.")

    def choice(self) -> ServerChoice:
        """The same, with the key."""
        from resources.engine.server.choice import ServerChoice

        fields = self.model_dump(exclude={"key_variable"})
        return ServerChoice(**fields, key=os.environ.get(self.key_variable) or None)


class VisionLanguageModel(dg.ConfigurableResource["VisionLanguageModel"]):
    """The model that describes properties."""

    model: str = Field(description="A local folder or a hub id; empty where none is chosen.")
    revision: str | None = Field(None, description="Commit, tag or branch on the hub.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    records_directory: str | None = Field(
        None, description="Folder that remembers which commit and weights the model is."
    )
    speculative_tokens: int = Field(
        5, ge=0, le=32, description="Tokens that it guesses from earlier answers. See TransformersEngine."
    )
    server: ModelServerChoice | None = Field(None, description="A server that describes in its place.")

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        records = Path(self.records_directory) if self.records_directory else None
        return ModelSource(self.model, self.revision, self.trust_remote_code, records)

    @property
    def chosen_server(self) -> ServerChoice | None:
        """The server that describes; None: an engine in this process does."""
        return None if self.server is None else self.server.choice()

    @property
    def is_at_address(self) -> bool:
        """Whether it computes on a server that somebody else runs, and nothing of it on the leased device."""
        return self.server is not None and self.server.url is not None

    def exact(self) -> tuple[str, str]:
        """The model's name for the rows, and what exactly it is now; needs no device and no torch.

        Raises ModelLoadError.
        """
        server = self.chosen_server
        return (
            (self.source.label, exact_revision(self.source)) if server is None else server.exact(self.source)
        )

    def exact_revision(self) -> str:
        """What exactly the model is now. See ``exact``."""
        return self.exact()[1]

    def engine_meaning(self) -> dict[str, Any]:
        """What of the engine decides an answer's meaning, beside the model; nothing of the one in process."""
        server = self.chosen_server
        return {} if server is None else server.meaning()

    def resident(self) -> str | None:
        """The digest of the server that is to live on the device: what a lease is told. See GpuResource.

        Raises ModelLoadError.
        """
        server = self.chosen_server
        return None if server is None else server.resident(self.source)

    def device_name(self, device: Device) -> str:
        """Where the model computes, for the rows: the leased device, or the server at an address."""
        server = self.chosen_server
        return device.id if server is None else server.device_name(device)

    def load(self, device: Device, *, schema: DescriptionSchema, prompt: Prompt, batches: int = 0) -> Engine:
        """An engine on the leased device, for so many batches where that is known. Raises ModelLoadError."""
        server = self.chosen_server
        if server is not None:
            return server.engine(self.source, device, schema=schema, prompt=prompt)
        from resources.engine.transformers.transformers_engine import TransformersEngine

        return TransformersEngine(
            self.source,
            schema=schema,
            prompt=prompt,
            device=device.kind,
            speculative_tokens=self.speculative_tokens,
            batches=batches,
        )


class TextEmbeddingModel(dg.ConfigurableResource["TextEmbeddingModel"]):
    """The model that embeds the text of descriptions."""

    model: str = Field(
        description="A local folder or a hub id; a vision-language model lends its text layers;"
        " empty where none is chosen."
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
        from resources.engine.embedder import TextEmbedder

        return TextEmbedder(self.source, device=device.kind)
