"""Which model server is wanted, as values: its command, and what another must share to be used in its place.

What lives here: the command template and its placeholders. What does not: starting it (``keeper.py``).
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from resources.engine.protocol import ModelLoadError

HOST = "127.0.0.1"
VLLM_COMMAND = (
    "vllm serve {model} --revision {revision} --host {host} --port {port} --load-format safetensors"
    " --gpu-memory-utilization 0.85 --disable-uvicorn-access-log"
    """ --structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'"""
)
"""The rest of the device's memory is for the embedder, which loads beside it in the same run. Where the
grammar allows any whitespace, a model that is unsure fills its answer with it: tried."""

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")  # not the JSON of an option such as '{"image": 12}'
_PLACEHOLDERS = ("model", "revision", "host", "port")
_OURS = {
    "--served-model-name": "a server that is started here is asked for its model by {model}",
    "--api-key": "each start gets a random key, in the server's environment",
}
"""Options that would make a server refuse every request, and why there is no need of them."""


class ServerCommandError(ModelLoadError):
    """The template of the server's command cannot be used."""


@dataclass(frozen=True)
class ServerPlan:
    """A server that is wanted on a device.

    ``command``: a template, split as a shell would, never run by one, with {model}, {revision}, {host} and
    {port}; where there is no revision, its argument and the option before it are left out. ``revision``: a
    hub revision, or None. ``exact``: what exactly the model is, as ``exact_revision()`` says it. The random
    key of each start is passed in the environment variable ``key_variable``. ``start_seconds``: until it
    must answer. ``idle_seconds``: without a materialization, after which it ends. ``grace_seconds``:
    between SIGTERM and SIGKILL.
    """

    command: str
    model: str
    revision: str | None
    exact: str
    key_variable: str = "VLLM_API_KEY"
    start_seconds: float = 1200.0
    idle_seconds: float = 300.0
    grace_seconds: float = 15.0

    @property
    def digest(self) -> str:
        """What a server must share with this one to be used in its place: model, revision, arguments."""
        said = [self.arguments(port="{port}"), self.exact, self.key_variable]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def arguments(self, *, port: int | str) -> list[str]:
        """The command with its placeholders filled. Raises ServerCommandError."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ServerCommandError(f"The model server's command {self.command!r}: {error}.") from error
        if not words or not any("{port}" in word for word in words):
            raise ServerCommandError(
                f"The model server's command {self.command!r} must take its port from {{port}}, and its"
                f" program comes first. An example: {VLLM_COMMAND}"
            )
        for word in words:
            if reason := _OURS.get(word.partition("=")[0]):
                raise ServerCommandError(
                    f"The model server's command must go without {word.partition('=')[0]}: {reason}. Take it"
                    " out of VLM_ASSETS_SERVER_COMMAND."
                )
        values = {"model": self.model, "host": HOST, "port": str(port), "revision": self.revision}
        filled: list[str] = []
        for word in words:
            if self.revision is None and "{revision}" in word:
                if word == "{revision}" and filled and filled[-1].startswith("-"):
                    filled.pop()
                continue
            filled.append(_filled(word, values))
        return filled


def _filled(word: str, values: Mapping[str, str | None]) -> str:
    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise ServerCommandError(
                f"The model server's command knows no {found[0]}; its placeholders are"
                f" {', '.join(f'{{{name}}}' for name in _PLACEHOLDERS)}."
            )
        return str(values[found[1]])

    return _PLACEHOLDER.sub(value, word)
