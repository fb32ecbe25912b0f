"""The plan of a model server, as values: its command and environment, and which parts of both can matter.

This module has the command template, its placeholders with their values on a device, and the arguments that
can change an answer. It also makes the environment, pinned to a device, and digests of it that can be kept on
disk. ``owned_server.py`` starts the server; the fingerprint is in ``vlm_assets/assets/fingerprint.py``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

from vlm_engine.devices.find import Device, DriverNvml, Nvml
from vlm_engine.devices.leases import pin
from vlm_engine.protocol import ModelLoadError

if TYPE_CHECKING:
    from vlm_engine.protocol import ImageTokens

HOST = "127.0.0.1"
VLLM_COMMAND = (
    "vllm serve {model} --revision {revision} --host {host} --port {port} --load-format safetensors"
    " --tensor-parallel-size {devices} --gpu-memory-utilization {memory} --max-model-len {context}"
    " --mm-processor-kwargs {processor_options} --api-server-count {api_servers} --mm-processor-cache-gb 0"
    """ --limit-mm-per-prompt '{"image": {images}, "video": 0}' --disable-uvicorn-access-log"""
    """ --structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'"""
    " {prefix_caching} --max-num-batched-tokens {batched_tokens}"
    " --mm-encoder-tp-mode {encoder_mode}"
)
"""No image is shown twice, so vLLM's cache of processed ones is off: it takes 4 GiB of each of its processes.
Its cache of prompts is off too, unless several questions are asked of each property: images come first in
each, so nothing else is common, and each image is hashed.
Where the grammar allows any whitespace, an unsure model filled its answer with it."""

PROCESSOR_OPTIONS = "{processor_options}"
"""The placeholder by which a command gets the size of images."""

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")  # not the JSON of an option such as '{"image": 12}'
_ON_A_DEVICE = ("memory", "context", "processor_options", "api_servers", "batched_tokens")
"""Placeholders whose values are known once a device is leased and the model's processor is loaded."""

_PLACEHOLDERS = (
    "model", "revision", "host", "port", "devices", "images", "encoder_mode", "prefix_caching", *_ON_A_DEVICE
)  # fmt: skip

_GIB = 1 << 30
_BESIDE_BYTES = 2 * _GIB
"""For the embedder's texts, and CUDA's own memory in each process."""
_MOST_MEMORY, _LEAST_MEMORY, _UNKNOWN_MEMORY, _CPU_MEMORY = 0.92, 0.3, 0.85, 0.3
_BATCHED_TOKENS, _ROOMY_BYTES = 16_384, 40 * _GIB
"""Tokens of prompts that vLLM computes in a step, set on GPUs with at least this memory: a property has more
tokens than vLLM's own 2,048 or 8,192. With less memory, and on a CPU, vLLM chooses itself."""
_CONTEXT_STEP = 256
"""Spare tokens of a context, at most: the server's own chat template may differ by a few."""
_OURS = {
    "--served-model-name": "a server that is started here is asked for its model by {model}",
    "--api-key": "each start gets a random key, in the server's environment",
}
"""Options that would make a server refuse every request, and why they are not needed."""

_VALUES_ALIKE: Final = frozenset(
    {
        # Address, access, and files that it may read.
        "--host", "--port", "--api-key", "--allowed-local-media-path", "--served-model-name",
        "--api-server-count", "-asc",
        # How much memory and how many requests at once: they move the last digits, as a batch does.
        "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--max-num-seqs", "--max-num-batched-tokens",
        "--swap-space", "--cpu-offload-gb", "--block-size", "--tensor-parallel-size", "-tp",
        "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "--mm-processor-cache-gb",
        "--mm-encoder-tp-mode",
        "--mem-fraction-static", "--max-running-requests", "--tp-size", "--tp",
        # Folders and logs.
        "--download-dir", "--load-format", "--uvicorn-log-level", "--log-level",
    }
)  # fmt: skip
"""Options with a value that cannot change an answer."""

_FLAGS_ALIKE: Final = frozenset(
    {
        "--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill",
        "--enforce-eager", "--disable-uvicorn-access-log", "--disable-log-requests", "--disable-log-stats",
        "{prefix_caching}",
        "--enable-log-requests",
    }
)  # fmt: skip
"""Options without a value that cannot change an answer."""

PINS: Final[tuple[str, ...]] = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")
"""Variables that choose device and threads, and are no secret."""

_OF_A_SHELL: Final = frozenset(
    {
        "_", "COLORTERM", "COLUMNS", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "INVOCATION_ID", "JOURNAL_STREAM",
        "LINES", "OLDPWD", "PWD", "SHLVL", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "STY",
        "SYSTEMD_EXEC_PID", "TERM", "TMUX", "TMUX_PANE", "WINDOWID", "XDG_SESSION_ID",
    }
)  # fmt: skip
"""Variables that differ between terminals or starts of a service, and do not matter to a server."""


@dataclass(frozen=True)
class ServerPlan:
    """A server that a device should have.

    ``command``: a template, split as a shell would, never run by one, with {model}, {revision}, {host},
    {port} and others; a placeholder without a value is left out, with the option before it. ``revision``: a
    hub revision, or None. ``exact``: the model's version, from ``exact_revision()``. ``devices``: for the one
    model. ``images``, ``questions``: of a property. ``question``: a digest of what decides context and
    processor options. ``beside``: the model that embeds beside it. ``on_device``: values of the placeholders
    that a device decides, see ``for_device``. ``start_seconds``: until it must answer. ``idle_seconds``:
    without a materialization, after which it ends. ``grace_seconds``: between SIGTERM and SIGKILL.
    """

    command: str
    model: str
    revision: str | None
    exact: str
    devices: int = 1
    images: int = 1
    questions: int = 1
    question: str = ""
    beside: str = ""
    on_device: Mapping[str, str | None] = field(default_factory=dict)
    start_seconds: float = 1200.0
    idle_seconds: float = 300.0
    grace_seconds: float = 15.0

    @property
    def digest(self) -> str:
        """Digest of what a loaded server must have in common to be used again: model, revision, arguments.

        It is needed before a device is leased, so values that the device decides have no part in it.
        """
        arguments = replace(self, on_device={}).arguments(port="{port}")
        content = [arguments, self.exact, self.question, self.beside]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM's own program is started, or a module of vLLM's. Raises ModelLoadError."""
        words = self.arguments(port=0)
        modules = [name for option, name in pairwise(words) if option == "-m"]
        return PurePath(words[0]).name == "vllm" or any(name.split(".")[0] == "vllm" for name in modules)

    def for_device(
        self, device: Device, costs: ImageTokens | None, *, answer_tokens: int, beside_bytes: int, cores: int
    ) -> ServerPlan:
        """The plan for a leased device.

        costs: of images; None: the server has the model's own context and processor. answer_tokens: of the
        longest answer. beside_bytes: of the embedder's weights. cores: of this process; the devices that work
        at once share them.

        Raises ModelLoadError where there is too little memory for both models, vLLM is to use a MIG
        instance, or its build for CPUs a GPU.
        """
        if device.id.startswith("MIG-") and self.is_vllm:
            raise ModelLoadError(
                f"{device.id} is a MIG instance, and vLLM (0.32 too) asks the driver for a whole GPU of the"
                " instance's number. Set VLM_ASSETS_ENGINE=transformers, or turn MIG off."
            )
        if device.kind == "cuda" and self.is_vllm:
            self._refuse_build_for_cpus(device)
        context = options = None
        if costs is not None:
            needed = costs.property_tokens + answer_tokens
            rounded = -(-needed // _CONTEXT_STEP) * _CONTEXT_STEP + _CONTEXT_STEP
            context = str(min(rounded, costs.context or rounded))
            options = json.dumps(dict(costs.options), sort_keys=True) if costs.options else None
        is_roomy = device.kind == "cuda" and (device.memory_bytes or 0) >= _ROOMY_BYTES
        return replace(
            self,
            on_device={
                "memory": f"{_memory(device, beside_bytes):.2f}",
                "context": context,
                "processor_options": options,
                "batched_tokens": str(_BATCHED_TOKENS) if is_roomy else None,
                # Each parses requests and runs the processor, in one thread: 30 ms an image. Our workers,
                # which have the other cores, need 40.
                "api_servers": str(max(1, min(8, cores // device.at_once // 4))),
            },
        )

    def _refuse_build_for_cpus(self, device: Device) -> None:
        """Return unless the command is of an environment in which ``make vllm`` has put vLLM's CPU build."""
        environment = Path(self.arguments(port=0)[0]).parent.parent
        for marker in environment.glob("cpu-*"):
            raise ModelLoadError(
                f"{device.id} is a GPU, and the vLLM in {environment} is the build for CPUs ({marker.name})."
                " Run `make vllm` anew on a machine that has the GPU, or take that folder away and set"
                " VLM_ASSETS_ENGINE=transformers."
            )

    def arguments(self, *, port: int | str) -> list[str]:
        """The command with its placeholders filled. Raises ModelLoadError."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ModelLoadError(f"The model server's command {self.command!r}: {error}.") from error
        if not words or not any("{port}" in word for word in words):
            raise ModelLoadError(
                f"The model server's command {self.command!r} must take its port from {{port}}, and its"
                f" program comes first. An example: {VLLM_COMMAND}"
            )
        for word in words:
            if reason := _OURS.get(word.partition("=")[0]):
                raise ModelLoadError(
                    f"The model server's command must go without {word.partition('=')[0]}: {reason}. Take it"
                    " out of VLM_ASSETS_SERVER_COMMAND."
                )
        values = {
            "model": self.model, "host": HOST, "port": str(port), "revision": self.revision,
            "devices": str(self.devices), "images": str(self.images),
            # Each device encodes whole images, and not all of them a part of each: they exchange no sums.
            "encoder_mode": "data" if self.devices > 1 else None,
            "prefix_caching": f"--{'' if self.questions > 1 else 'no-'}enable-prefix-caching",
            **{name: f"{{{name}}}" for name in _ON_A_DEVICE}, **self.on_device,
        }  # fmt: skip
        filled: list[str] = []
        for word in words:
            if any(values.get(name, "") is None for name in _PLACEHOLDER.findall(word)):
                if _PLACEHOLDER.fullmatch(word) and filled and filled[-1].startswith("-"):
                    filled.pop()
                continue
            filled.append(_filled(word, values))
        return filled


def _memory(device: Device, beside_bytes: int) -> float:
    """The share of a device's memory that a server may take; the rest is for the embedder beside it."""
    if device.kind == "cpu":
        return _CPU_MEMORY
    if device.memory_bytes is None:
        return _UNKNOWN_MEMORY
    beside = beside_bytes + _BESIDE_BYTES
    share = min(_MOST_MEMORY, math.floor(100 * (1 - beside / device.memory_bytes)) / 100)
    if share < _LEAST_MEMORY:
        raise ModelLoadError(
            f"{device.id} has {device.memory_bytes / _GIB:.0f} GiB, and the embedding model beside the server"
            f" needs {beside / _GIB:.0f} of them: set VLM_ASSETS_EMBEDDING_MODEL to a smaller model."
        )
    return share


def _filled(word: str, values: Mapping[str, str | None]) -> str:
    def value(placeholder: re.Match[str]) -> str:
        if placeholder[1] not in values:
            raise ModelLoadError(
                f"The model server's command knows no {placeholder[0]}; its placeholders are"
                f" {', '.join(f'{{{name}}}' for name in _PLACEHOLDERS)}."
            )
        return str(values[placeholder[1]])

    return _PLACEHOLDER.sub(value, word)


def answering_arguments(command: str) -> list[str]:
    """The words of a server's command template that can change an answer, its program without folders.

    Every option counts that is not in the lists above: quantization, precision, the processor's sizes, the
    chat template. Raises ValueError where the template cannot be split into words.
    """
    words = shlex.split(command)
    return [PurePath(word).name for word in words[:1]] + list(_deciding(words[1:]))


def _deciding(words: list[str]) -> Iterator[str]:
    remaining = iter(words)
    for word in remaining:
        name, equals, _ = word.partition("=")
        if name in _VALUES_ALIKE:
            if not equals:
                next(remaining, None)
        elif name not in _FLAGS_ALIKE:
            yield word


def server_environment(
    device: Device, environment: Mapping[str, str], *, nvml: Nvml | None = None
) -> dict[str, str]:
    """The environment of a server that is pinned to a device. Raises DeviceError.

    A whole GPU is named by its number in PCI order where the driver lists it, not by its UUID: vLLM up to
    0.23 at least reads numbers alone. Settings of this project and of Dagster are left out: some are secret.
    """
    pinned = {
        name: value for name, value in environment.items() if not name.startswith(("VLM_ASSETS_", "DAGSTER_"))
    }
    pin(device, pinned)
    if device.kind == "cuda":
        # Otherwise vLLM compiles FlashInfer's sampler at its start, which needs a compiler and minutes. The
        # sampler is for top-k and top-p, which we never use. Your own value stays.
        pinned.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if device.visible.startswith("GPU-"):
        readings = (nvml or DriverNvml()).readings()
        uuids = device.visible.split(",")
        numbers = [
            str(reading.index) for uuid in uuids for reading in readings if reading.uuid.startswith(uuid)
        ]
        if len(numbers) == len(uuids):
            pinned["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)
    return pinned


def variable_digests(environment: Mapping[str, str], key: str) -> dict[str, str]:
    """A digest of each variable that may matter to a server, by name, without the pins.

    Its key is the server's random key, which is deleted when the server ends: no secret can be guessed from
    it.
    """
    return {
        name: hmac.digest(key.encode(), os.fsencode(f"{name}={value}"), "sha256").hex()
        for name, value in environment.items()
        if name not in _OF_A_SHELL and name not in PINS
    }
