"""The model server of the settings: one that we start on the leased device, or one that runs at a URL.

What lives here: from the settings to an engine, to the model's exact name and revision, and to what of the
server decides an answer's meaning. What does not: how a server is started (``owned_server.py``) or asked
(``server_engine.py``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from resources.devices.find import Device
from resources.engine.model_source import ModelSource, exact_revision
from resources.engine.protocol import ModelLoadError
from resources.engine.server.image_transport import JPEG_QUALITY, DataUris, EncodedImages, ImageFiles
from resources.engine.server.model_server import ModelServer, ServerAddress
from resources.engine.server.running_server import RunningServer, served_model
from resources.engine.server.server_plan import VLLM_COMMAND, ServerPlan, answering_arguments

if TYPE_CHECKING:
    from resources.engine.prompt import Prompt
    from resources.engine.schema import DescriptionSchema
    from resources.engine.server.server_engine import ServerEngine
    from resources.images.outputs import Output

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSettings:
    """A server, as values.

    url: up to and including ``/v1``; None: one is started with ``command`` (None: vLLM's), a template, on the
    leased device. key: of the server at ``url``. model: its name for the model; None: what the settings call
    it, or the only one that it serves. image_folder: images go through files there; None: in the requests.
    """

    state_directory: str
    command: str | None = None
    url: str | None = None
    key: str | None = field(default=None, repr=False)
    model: str | None = None
    most_at_once: int = 32
    token_seconds: float = 120.0
    answer_seconds: float = 900.0
    start_seconds: float = 1200.0
    idle_seconds: float = 300.0
    image_folder: str | None = None

    def exact(self, source: ModelSource) -> tuple[str, str]:
        """The model's name for the rows, and its revision. Raises ModelLoadError.

        What we start has the source's own. Of what runs at an address only what it says is known.
        """
        if self.url is None:
            return source.label, exact_revision(source)
        served = served_model(self._address(self.url), self.model, source.location)
        return served.name, served.revision(source.revision)

    def meaning(self) -> dict[str, Any]:
        """What decides an answer's meaning, beside the model. Raises ModelLoadError.

        A server is not the engine in this process: it gets images compressed once more, decodes by its own
        grammar, and may compute in fewer bits. What its operator told it is unknown at an address; of our own
        the arguments count, but for those that cannot change an answer.
        """
        meaning: dict[str, Any] = {"images": f"jpeg {JPEG_QUALITY}"}
        if self.url is None:
            try:
                meaning["server"] = answering_arguments(self._command)
            except ValueError as error:
                raise ModelLoadError(f"VLM_ASSETS_SERVER_COMMAND={self._command!r}: {error}") from error
        return {"engine": "server", **meaning}

    def digest(self, source: ModelSource) -> str | None:
        """The digest of the server that lives on the leased device; None for a server at a URL."""
        return None if self.url is not None else self._plan(source).digest

    def device_name(self, device: Device) -> str:
        """Where the model computes: the leased device, or the server's host and port."""
        return device.id if self.url is None else f"server {urlsplit(self.url).netloc.rpartition('@')[2]}"

    def output(self) -> Output:
        """What workers make of images: files, as the server is sent them."""
        return EncodedImages()

    def engine(
        self, source: ModelSource, device: Device, *, schema: DescriptionSchema, prompt: Prompt
    ) -> ServerEngine:
        """An engine that asks the server, which answers by then. Raises ModelLoadError, LoadedServerError."""
        from resources.engine.server.chat_completions import RequestLimits
        from resources.engine.server.server_engine import ServerEngine

        images = DataUris() if self.image_folder is None else ImageFiles(Path(self.image_folder))
        server, name, (model, revision) = self._server(source, device)
        try:
            return ServerEngine(
                server,
                name=name,
                model=model,
                revision=revision,
                schema=schema,
                prompt=prompt,
                limits=RequestLimits(self.most_at_once, self.token_seconds, self.answer_seconds),
                images=images,
            )
        except BaseException:
            server.release()
            raise

    def _server(self, source: ModelSource, device: Device) -> tuple[ModelServer, str, tuple[str, str]]:
        """The server, its name for the model, and what ``exact`` says of that: of the server that was got."""
        if self.url is not None:
            address = self._address(self.url)
            serves = partial(served_model, address, self.model, source.location, ask_anew=True)
            running = RunningServer(address, serves=serves, log=_log)
            served = running.served
            return running, served.name, (served.name, served.revision(source.revision))
        from resources.engine.server.owned_server import start_or_adopt

        exact = self.exact(source)
        owned = start_or_adopt(
            device, self._plan(source), state_directory=Path(self.state_directory), log=_log
        )
        return owned, source.location, exact

    def _address(self, url: str) -> ServerAddress:
        return ServerAddress(url.rstrip("/"), self.key)

    @property
    def _command(self) -> str:
        return self.command or VLLM_COMMAND

    def _plan(self, source: ModelSource) -> ServerPlan:
        exact = exact_revision(source)
        return ServerPlan(
            command=self._command,
            model=source.location,
            revision=None if source.folder is not None else exact,
            exact=exact,
            start_seconds=self.start_seconds,
            idle_seconds=self.idle_seconds,
        )
