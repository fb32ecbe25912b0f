"""Checkpoints of a training: written beside it, named by their digest, the newest three kept and verified.

A checkpoint is a safetensors file, ``checkpoint-STEP-SHA256.safetensors``: the file exists as a whole or not
at all, and after a change of a single bit it does not fit its name.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vlm_durable.files import files
from vlm_durable.files.files import TemporaryFile, make_directory, publish_new, set_aside, sha256_of
from vlm_durable.files.sealed_json import refuse_newer_format
from vlm_training.state import TrainingState

FORMAT: Final = 2
"""Format of a checkpoint's names and numbers. Later versions read it; this version refuses later formats."""

KEPT: Final = 3
LONGEST_SECONDS: Final = 60.0
"""The training time that a kill may lose, unless a checkpoint itself costs more than a hundredth of it."""
_USUAL_MTBF_SECONDS: Final = 86_400.0
_NAME = re.compile(r"checkpoint-(\d{9})-([0-9a-f]{64})\.safetensors")
_TYPES: Final = {
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


def mean_time_between_failures(state: TrainingState) -> float:
    """Seconds between two starts of this training so far. A day is assumed before there are any."""
    return (_USUAL_MTBF_SECONDS + state.seconds) / max(1, state.starts)


def interval_seconds(stall: float, write: float, mtbf: float) -> float:
    """Seconds between two checkpoints by Daly's formula, a minute at most.

    stall: seconds that training stands still for a checkpoint. write: seconds that writing it takes beside
    the training. The training never stands still for more than a hundredth of its time, and never writes more
    than half of it.
    """
    stall = max(stall, 1e-6)
    root = math.sqrt(2 * stall * mtbf)
    daly = root * (1 + math.sqrt(stall / (2 * mtbf)) / 3 + stall / (18 * mtbf)) - stall
    return max(min(daly, LONGEST_SECONDS), 100 * stall, 2 * write)


def step_in(name: str) -> int:
    """The step of a checkpoint with this name."""
    return int(name[len("checkpoint-") :][:9])


def digest_in(name: str) -> str | None:
    """The SHA-256 in a checkpoint's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return match[2] if match else None


class Checkpoints:
    """The checkpoints of one training, in a folder of their own. One process writes at a time."""

    def __init__(self, folder: Path, quarantine: Path) -> None:
        self.folder = folder
        self._quarantine = quarantine
        self._verified: set[str] = set()

    def sweep(self) -> None:
        """Remove the half-written files of killed writers. Call it only while no other process writes."""
        make_directory(self.folder)
        for path in self.folder.glob(f".*{files.TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, verified or not, the newest first."""
        return [step for step, _ in self._files()]

    def newest(self, *, damaged: Callable[[str], None] | None) -> Path | None:
        """The newest checkpoint whose digest fits its name; None if there is none.

        damaged: called with a sentence for each damaged checkpoint, which is set aside. If it is None,
        damaged checkpoints are only passed over.
        """
        for step, path in self._files():
            digest = digest_in(path.name)
            assert digest is not None
            try:
                actual = sha256_of(path)
            except FileNotFoundError:
                continue  # Another rank has just set it aside.
            if actual == digest:
                self._verified.add(path.name)
                return path
            if damaged is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                aside = set_aside(path, self._quarantine)
                damaged(
                    f"The checkpoint of step {step} is damaged ({actual[:12]} where {digest[:12]} was"
                    f" written). It is kept as {aside}; the training goes on from the one before."
                )
        return None

    def write(self, state: TrainingState, tensors: Mapping[str, Any]) -> Path:
        """Write a checkpoint durably, then remove those that are needed no more. Raises OSError.

        tensors: contiguous, in the memory of the CPU. They must not change meanwhile.
        """
        import torch

        history = {
            "history.losses": torch.tensor(state.losses, dtype=torch.float64),
            "history.samples": torch.tensor(state.samples, dtype=torch.int64),
        }
        file = TemporaryFile(self.folder / f"checkpoint-{state.step:09d}")
        try:
            _write_safetensors(file, {**tensors, **history}, _metadata(state))
            path = self.folder / f"checkpoint-{state.step:09d}-{file.seal()}.safetensors"
            with contextlib.suppress(FileExistsError):  # The same bytes under the same name.
                publish_new(file.path, path)
        finally:
            file.discard()
        self._verified.add(path.name)
        self._rotate()
        return path

    def _rotate(self) -> None:
        # Only verified checkpoints count: a damaged one must not push out a sound one.
        sound = 0
        for _, path in self._files():
            if sound >= KEPT:
                path.unlink(missing_ok=True)
            sound += path.name in self._verified

    def _files(self) -> list[tuple[int, Path]]:
        """Step and path of each checkpoint, the newest first."""
        try:
            names = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        except FileNotFoundError:
            return []
        return sorted(((int(match[1]), path) for match, path in names), reverse=True)


def read(path: Path) -> tuple[TrainingState, dict[str, Any]]:
    """The state of a checkpoint, and its tensors by name. Raises FormatVersionError."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        state = _state(file.metadata(), path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    losses, samples = (tensors.pop(f"history.{name}").tolist() for name in ("losses", "samples"))
    return TrainingState.from_json(state, losses, samples), tensors


def read_state(path: Path) -> dict[str, Any]:
    """The numbers of a checkpoint without its tensors, unverified: for people, and without torch."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return _state(json.loads(stream.read(size))["__metadata__"], path)


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The numbers of the newest checkpoint that can be read; None if there is none."""
    for _, path in Checkpoints(folder, folder)._files():
        with contextlib.suppress(OSError, ValueError, KeyError):
            return read_state(path)
    return None


def _metadata(state: TrainingState) -> dict[str, str]:
    return {"format": str(FORMAT), "state": json.dumps(state.as_json())}


def _state(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    refuse_newer_format(json.loads(metadata["format"]), FORMAT, path)
    state: dict[str, Any] = json.loads(metadata["state"])
    state.pop("delivered", None)  # In format 1: a sum over the samples so far.
    return state


def _write_safetensors(file: TemporaryFile, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """The format of safetensors, written piece by piece: its own ``save`` makes a second copy in memory."""
    import torch

    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * tensor.element_size()
        kind = _TYPES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for tensor in tensors.values():
        if tensor.numel():
            file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))


class CheckpointThread:
    """Copies snapshots into buffers that are kept, and writes them in a thread beside the training.

    failed: called with a sentence when a checkpoint cannot be written. The training goes on, and earlier
    checkpoints stay. written: called with the path of each written checkpoint.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        seconds: float | None,
        failed: Callable[[str], None],
        written: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self._checkpoints = checkpoints
        self._written = written
        self._seconds = seconds
        self._failed = failed
        self._buffers: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._last = time.monotonic()
        self._error: Exception | None = None
        self.stalls: list[float] = []
        """Seconds that the training stood still for each checkpoint of this process."""
        self.write_seconds = 0.0
        """Seconds that writing the last checkpoint took."""

    def interval(self, state: TrainingState) -> float:
        """Seconds from one checkpoint to the next."""
        if self._seconds is not None:
            return self._seconds
        stall = sorted(self.stalls)[len(self.stalls) // 2] if self.stalls else 0.01
        return interval_seconds(stall, self.write_seconds, mean_time_between_failures(state))

    def is_due(self, state: TrainingState) -> bool:
        """Whether the next checkpoint may begin: the last is written, and the interval is over."""
        if self._thread is not None and self._thread.is_alive():
            return False
        return time.monotonic() - self._last >= self.interval(state)

    def begin(self, state: TrainingState, tensors: Mapping[str, Any]) -> None:
        """Copy the tensors, and write them in a thread. The training waits only for the copy."""
        self.wait()
        started = time.monotonic()
        for name, tensor in tensors.items():
            if name not in self._buffers or self._buffers[name].shape != tensor.shape:
                self._buffers[name] = tensor.detach().to("cpu", copy=True).contiguous()
            else:
                self._buffers[name].copy_(tensor.detach())
        content = TrainingState.from_json(state.as_json(), list(state.losses), list(state.samples))
        snapshot = {name: self._buffers[name] for name in tensors}
        self._thread = threading.Thread(target=self._write, args=(content, snapshot), daemon=True)
        self._thread.start()
        self._last = time.monotonic()
        self.stalls.append(self._last - started)

    def save(self, state: TrainingState, tensors: Mapping[str, Any]) -> None:
        """Write a checkpoint now, and wait for it. Raises OSError."""
        self.begin(state, tensors)
        self.stalls.pop()
        self.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, state: TrainingState, tensors: Mapping[str, Any]) -> None:
        started = time.monotonic()
        self._error = None
        try:
            self._written(self._checkpoints.write(state, tensors))
        except Exception as error:  # Else the thread would end in silence.
            self._error = error
            self._failed(
                f"The checkpoint of step {state.step} could not be written: {error}. The training goes on,"
                " and the checkpoint before stands. Make room, or look at the disk."
            )
        self.write_seconds = time.monotonic() - started
