"""The model that describes properties, as the assets get it: settings in, an engine on the leased device out.

A plain object, not a configurable Dagster resource: run config cannot set any of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from resources.devices.find import Device
from resources.engine.model_source import ModelSource, exact_revision
from resources.engine.prompt import Prompt
from resources.engine.schema import DescriptionSchema

if TYPE_CHECKING:
    from resources.engine.protocol import Engine, ImageLimits
    from resources.engine.server.server_settings import ServerSettings
    from resources.images.outputs import Output

_MANY_IMAGES: Final = 1000
"""From here on workers run the processor: what they import for it takes 4 s of a core."""


@dataclass(frozen=True)
class VisionLanguageModel:
    """The model that describes properties.

    model: a local folder or a hub id; empty where none is chosen. revision: commit, tag or branch on the hub.
    trust_remote_code: run Python code that comes with the model. records_directory: folder that remembers
    which commit and weights the model is. speculative_tokens: see TransformersEngine. limits: what images may
    cost; None: as the model's files say. server: what describes instead of an engine in this process.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    records_directory: str | None = None
    speculative_tokens: int = 5
    limits: ImageLimits | None = None
    server: ServerSettings | None = None

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        records = Path(self.records_directory) if self.records_directory else None
        return ModelSource(self.model, self.revision, self.trust_remote_code, records)

    @property
    def is_at_address(self) -> bool:
        """Whether it computes on a server that somebody else runs, and nothing of it on the leased device."""
        return self.server is not None and self.server.url is not None

    def exact(self) -> tuple[str, str]:
        """The model's name for the rows, and what exactly it is now; needs no device and no torch.

        Raises ModelLoadError.
        """
        server = self.server
        return (
            (self.source.label, exact_revision(self.source)) if server is None else server.exact(self.source)
        )

    def exact_revision(self) -> str:
        """What exactly the model is now. See ``exact``."""
        return self.exact()[1]

    def engine_meaning(self) -> dict[str, Any]:
        """What of the engine decides an answer's meaning, beside the model; nothing of the one in process."""
        server = self.server
        return {} if server is None else server.meaning()

    def server_digest(self) -> str | None:
        """The digest of the server that is to live on the device: what a lease is told. See GpuResource.

        Raises ModelLoadError.
        """
        server = self.server
        return None if server is None else server.digest(self.source)

    def device_name(self, device: Device) -> str:
        """Where the model computes, for the rows: the leased device, or the server at an address."""
        server = self.server
        return device.id if server is None else server.device_name(device)

    def output(self, device: Device, prompt: Prompt, *, images: int) -> Output:
        """What workers are to make of each property's images; images: how many there are to load."""
        server = self.server
        if server is not None:
            return server.output()
        if images < _MANY_IMAGES:
            from resources.images.outputs import Pixels

            return Pixels()
        from resources.engine.transformers.collation import Tensors

        dtype = "float32" if device.kind == "cpu" else "bfloat16"
        return Tensors(self.source, prompt.text, dtype, self.limits)

    def load(self, device: Device, *, schema: DescriptionSchema, prompt: Prompt) -> Engine:
        """An engine on the leased device. Raises ModelLoadError."""
        server = self.server
        if server is not None:
            return server.engine(self.source, device, schema=schema, prompt=prompt)
        from resources.engine.transformers.transformers_engine import TransformersEngine

        return TransformersEngine(
            self.source,
            schema=schema,
            prompt=prompt,
            device=device.kind,
            speculative_tokens=self.speculative_tokens,
            limits=self.limits,
        )
