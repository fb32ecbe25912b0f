"""The model that describes properties, as the assets get it: settings in, an engine on the leased device out.

The model runs in this process, on a server that we start, or on a server at a URL (``vlm_engine``). It is a
plain object, not a configurable Dagster resource: run config cannot set any of its fields.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from vlm_engine.devices.find import Device
from vlm_engine.devices.leases import refuse_another_gpu
from vlm_engine.model_source import ModelSource, exact_revision, noted_revision
from vlm_engine.prompt import Prompt
from vlm_engine.protocol import ModelLoadError
from vlm_engine.schema import DescriptionSchema

if TYPE_CHECKING:
    from resources.text_embedding import TextEmbeddingModel
    from vlm_engine.images.images import Output
    from vlm_engine.prompt import FurtherQuestion
    from vlm_engine.protocol import Engine, ImageLimits, ImageTokens
    from vlm_engine.server.model_server import ModelServer, ServerAddress
    from vlm_engine.server.server_plan import ServerPlan

_OF_THE_CONFIGURATION: Final = frozenset({"image_grid_pinpoints"})
"""Options that vLLM reads from the model's configuration, whatever the processor is told (LLaVA)."""

_MANY_IMAGES: Final = 1000
"""From this many images on, workers run a CPU's image processor: its imports take 4 s of a core."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a model server.

    url: up to and including ``/v1``; None: a server is started on the leased device. command: the template of
    its command line; None: vLLM's. key: of the server at ``url``. model: the server's name for the model;
    None: the name in the settings, or the only model that it serves. devices: how many the model spans.
    embedder: the model that embeds beside it on the same device.
    """

    state_directory: str
    command: str | None = None
    url: str | None = None
    key: str | None = field(default=None, repr=False)
    model: str | None = None
    most_at_once: int = 128
    token_seconds: float = 120.0
    answer_seconds: float = 900.0
    start_seconds: float = 1200.0
    idle_seconds: float = 300.0
    devices: int = 1
    embedder: TextEmbeddingModel | None = None

    @property
    def address(self) -> ServerAddress | None:
        """The address of a server that somebody else runs; None for a server that we start."""
        from vlm_engine.server.model_server import ServerAddress

        return None if self.url is None else ServerAddress(self.url.rstrip("/"), self.key)

    def plan(
        self, source: ModelSource, prompt: Prompt, limits: ImageLimits | None, questions: int
    ) -> ServerPlan | None:
        """The plan of a server that we start; None for a server at a URL. Raises ModelLoadError.

        questions: how many a property is asked. prompt: of the first.
        """
        from vlm_engine.server.server_plan import VLLM_COMMAND, ServerPlan

        if self.url is not None:
            return None
        exact = exact_revision(source)
        question = json.dumps([prompt.digest, limits and asdict(limits)], sort_keys=True)
        beside = self.embedder and [self.embedder.model, self.embedder.revision]
        return ServerPlan(
            devices=self.devices,
            images=limits.images if limits is not None else 1,
            questions=questions,
            question=hashlib.sha256(question.encode()).hexdigest(),
            beside=json.dumps(beside),
            command=self.command or VLLM_COMMAND,
            model=source.location,
            revision=None if source.folder is not None else exact,
            exact=exact,
            start_seconds=self.start_seconds,
            idle_seconds=self.idle_seconds,
        )


@dataclass(frozen=True)
class VisionLanguageModel:
    """The model that describes properties.

    model: a local folder or a hub id; empty if none is chosen. revision: commit, tag or branch on the hub.
    trust_remote_code: run Python code that comes with the model. records_directory: folder that records which
    commit and weights the model has. speculative_tokens: see TransformersEngine. limits: what images may
    cost; None: as the model's files say. server: the server to use; None: an engine in this process.
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
        """The source of the model."""
        records = Path(self.records_directory) if self.records_directory else None
        return ModelSource(self.model, self.revision, self.trust_remote_code, records)

    @property
    def is_at_address(self) -> bool:
        """Whether a server that somebody else runs computes, so that the leased device computes nothing."""
        return self.server is not None and self.server.url is not None

    def exact(self) -> tuple[str, str]:
        """The model's name for the rows, and its exact revision now; needs no device and no torch.

        For a server at a URL both are what that server says. Raises ModelLoadError.
        """
        if self.server is None or (address := self.server.address) is None:
            return self.source.label, exact_revision(self.source)
        from vlm_engine.server.running_server import served_model

        served = served_model(address, self.server.model, self.source.location)
        return served.name, served.revision(self.revision)

    def exact_revision(self) -> str:
        """The exact revision of the model now. See ``exact``."""
        return self.exact()[1]

    def noted_revision(self) -> str | None:
        """The exact revision where that is known without a server, a hub and reading weights; else None.

        Raises ModelLoadError.
        """
        return None if self.is_at_address else noted_revision(self.source)

    def engine_meaning(self) -> dict[str, Any]:
        """The properties of the engine that change an answer's meaning; none for an engine in this process.

        A server gets images compressed once more, decodes by its own grammar, and may compute in fewer bits.
        The options of a server at a URL are unknown. The arguments of a server that we start count, except
        those that cannot change an answer. Raises ModelLoadError.
        """
        if self.server is None:
            return {}
        from vlm_engine.server.chat_completions import JPEG_QUALITY
        from vlm_engine.server.server_plan import VLLM_COMMAND, answering_arguments

        meaning: dict[str, Any] = {"engine": "server", "images_sent": f"jpeg {JPEG_QUALITY}"}
        if self.server.url is None:
            command = self.server.command or VLLM_COMMAND
            try:
                meaning["server"] = answering_arguments(command)
            except ValueError as error:
                raise ModelLoadError(f"VLM_ASSETS_SERVER_COMMAND={command!r}: {error}") from error
        return meaning

    def server_digest(self, prompt: Prompt, questions: int = 1) -> str | None:
        """The digest of the server that will run on the leased device, for ``GpuResource.lease``.

        None if no server is started. questions: how many a property is asked. Raises ModelLoadError.
        """
        plan = None if self.server is None else self.server.plan(self.source, prompt, self.limits, questions)
        return None if plan is None else plan.digest

    def device_name(self, device: Device) -> str:
        """The device that the rows name: the leased one, or a server's host and port."""
        if self.server is None or self.server.url is None:
            return device.id
        return f"server {urlsplit(self.server.url).netloc.rpartition('@')[2]}"

    def output(
        self, device: Device, prompt: Prompt, *, images: int, further: Sequence[FurtherQuestion] = ()
    ) -> Output:
        """How workers prepare each property's images. images: how many there are to load."""
        if self.server is not None:
            from vlm_engine.server.chat_completions import EncodedImages

            return EncodedImages()
        # A GPU would wait for each image that the processor works on in the model's process.
        if device.kind == "cpu" and images < _MANY_IMAGES:
            from vlm_engine.images.images import Pixels

            return Pixels()
        from vlm_engine.transformers.collation import Tensors

        dtype = "float32" if device.kind == "cpu" else "bfloat16"
        texts = tuple(question.prompt.text for question in further)
        return Tensors(self.source, prompt.text, dtype, self.limits, texts)

    def prepare(self, devices: Sequence[Device]) -> None:
        """Import the engine's packages, which takes seconds, before this process has one of the devices.

        Torch is imported here only if there is one GPU. With several GPUs it may list them at its import, so
        it has to wait until the lease has pinned one. On a CPU the lease sets its number of threads first.
        """
        if self.server is not None:
            import vlm_engine.server.server_engine
        if [device.kind for device in devices] == ["cuda"]:
            # The vectors are made on the same device, soon after the descriptions.
            import sentence_transformers  # noqa: F401

            import vlm_engine.transformers.transformers_engine  # noqa: F401

    def load(
        self,
        device: Device,
        *,
        schema: DescriptionSchema,
        prompt: Prompt,
        further: Sequence[FurtherQuestion] = (),
    ) -> Engine:
        """An engine on the leased device, or an engine over a server that answers already.

        further: questions that are asked of the same properties.

        Raises ModelLoadError, LoadedServerError, and DeviceError if torch has another GPU.
        """
        if self.server is not None:
            return self._server_engine(self.server, device, schema, prompt, further)
        if len(device.members) > 1:
            raise ModelLoadError(
                f"VLM_ASSETS_DEVICES_PER_MODEL is {len(device.members)}, and in the run's own process a model"
                " computes on one device. Set it to 1, or describe with vLLM (`make vllm`,"
                " VLM_ASSETS_ENGINE=server)."
            )
        from vlm_engine.transformers.transformers_engine import TransformersEngine

        engine = TransformersEngine(
            self.source,
            schema=schema,
            prompt=prompt,
            device=device.kind,
            speculative_tokens=self.speculative_tokens,
            limits=self.limits,
            further=further,
        )
        refuse_another_gpu(device)
        return engine

    def _server_engine(
        self,
        settings: ServerSettings,
        device: Device,
        schema: DescriptionSchema,
        prompt: Prompt,
        further: Sequence[FurtherQuestion],
    ) -> Engine:
        from vlm_engine.server.chat_completions import RequestLimits
        from vlm_engine.server.server_engine import ServerEngine

        server, name, (model, revision), costs = self._server(settings, device, prompt, 1 + len(further))
        try:
            return ServerEngine(
                server,
                name=name,
                model=model,
                revision=revision,
                schema=schema,
                prompt=prompt,
                limits=RequestLimits(settings.most_at_once, settings.token_seconds, settings.answer_seconds),
                image_tokens=costs,
                further=further,
            )
        except BaseException:
            server.release()
            raise

    def _server(
        self, settings: ServerSettings, device: Device, prompt: Prompt, questions: int
    ) -> tuple[ModelServer, str, tuple[str, str], ImageTokens | None]:
        """The server, its name for the model, the model's name and exact revision, and the tokens of images.

        The tokens of images are None if they are unknown, as they are for a server at a URL.
        """
        from vlm_engine.server.owned_server import OwnedServer
        from vlm_engine.server.running_server import RunningServer, served_model
        from vlm_engine.transformers.model_loading import refuse_what_vllm_does_not_load

        source, address = self.source, settings.address
        plan = settings.plan(source, prompt, self.limits, questions)
        if plan is not None:
            exact = self.exact()
            if plan.is_vllm:
                refuse_what_vllm_does_not_load(source)
            costs = self._costs(plan, prompt)
            plan = plan.for_device(
                device,
                costs,
                answer_tokens=2 * self.limits.answer_tokens if self.limits is not None else 0,
                beside_bytes=0 if settings.embedder is None else settings.embedder.weight_bytes(),
                cores=len(os.sched_getaffinity(0)),
            )
            owned = OwnedServer(device, plan, state_directory=Path(settings.state_directory))
            return owned, source.location, exact, costs
        assert address is not None
        running = RunningServer(
            address, serves=partial(served_model, address, settings.model, source.location, ask_anew=True)
        )
        served = running.served
        return running, served.name, (served.name, served.revision(self.revision)), None

    def _costs(self, plan: ServerPlan, prompt: Prompt) -> ImageTokens | None:
        """The tokens of images on a server that we start.

        None if its command takes no options of the image processor, or if transformers cannot load the
        processor. Raises ModelLoadError instead if the user has limited what images may cost.
        """
        from vlm_engine.server.server_plan import PROCESSOR_OPTIONS
        from vlm_engine.transformers.image_tokens import fitted_processor

        limits = self.limits
        if limits is None or PROCESSOR_OPTIONS not in plan.command:
            return None
        if unread := sorted(limits.options.keys() & _OF_THE_CONFIGURATION):
            raise ModelLoadError(
                f"VLM_ASSETS_PROCESSOR_OPTIONS: a model server reads {', '.join(unread)} from the model's own"
                " config.json alone. Change it there, in a folder of your own, or set"
                " VLM_ASSETS_ENGINE=transformers."
            )
        try:
            return fitted_processor(self.source, prompt.text, limits, without=_OF_THE_CONFIGURATION)[1]
        except ModelLoadError:
            if limits.options or limits.tokens is not None:
                raise
            return None
