"""The canary: a small fixed question, asked before and after a partition, of which the answer never changes.

A sick device gives wrong answers before it gives errors. What lives here: the question, the exact checksum of
the weights on a device, and what follows from an answer: it is known, it is kept, or the device is left out.
What does not: how an engine computes it (the engines), and what becomes of rows that a sick device may have
made (``vlm_assets/assets/rows_in_doubt.py``).

Devices of a kind agree: the same batch, greedy, without drafts and without retries. Only an answer that two
devices have given refuses a third one: of two that differ nobody knows which one is sick.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import sqlalchemy as sa
from PIL import Image

from vlm_durable.commands import command
from vlm_durable.state.database import ControlState
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.tables import failed_canaries, good_canaries, known_canaries
from vlm_engine.devices.find import Device, DriverNvml
from vlm_engine.devices.left_out import DeviceFailure, leave_out
from vlm_engine.images.images import LoadedProperty, Maker
from vlm_engine.protocol import Attempt, CanaryAnswer, CanaryEngine, ImpossibleScoresError

if TYPE_CHECKING:
    import torch

ATTEMPT: Final = Attempt(2, max_new_tokens=8)
"""How the canary is asked: enough tokens for the first values of a description. Sixteen took twice as long,
1.6% of a partition of 1,000 of the example model. No first attempt: by those a server's speed is measured."""

TEXTS: Final = (
    "A brick villa with a hip roof, two floors and a garage.",
    "An apartment in the city. The kitchen is white, and the living room has a fireplace.",
    "A timber cottage by a lake, with solar panels on its gable roof.",
)
"""What a text embedder is asked."""

_SHAPES: Final = (((12, 16),), ((16, 16), (20, 12)))
"""Of each property the images, in blocks [rows, columns]: 2 properties with 1 and 2 images."""

_BLOCK: Final = 8
"""Pixels of a block's side: single pixels would be grey once a processor has resized them."""

_CHUNK_BYTES: Final = 1 << 25
"""Of a tensor, summed up at a time. Each gives one number of the checksum."""

_log = logging.getLogger(__name__)


class WrongAnswersError(RuntimeError):
    """A device gave wrong answers to the canary, or rows of such a device are in the work under way.

    rows_in_doubt: whether the rows of this generation may be wrong, so that none may be published.
    """

    def __init__(self, message: str, *, rows_in_doubt: bool) -> None:
        self.rows_in_doubt = rows_in_doubt
        super().__init__(message)


def canary_properties(make: Maker) -> list[LoadedProperty]:
    """The properties of the canary. make: what the engine's workers make of images.

    Their pixels come from a digest: no library's random numbers, which a new version may change.
    """
    properties = []
    for number, shapes in enumerate(_SHAPES):
        images = []
        for at, (rows, columns) in enumerate(shapes):
            colours = hashlib.shake_256(f"canary {number} {at}".encode()).digest(3 * rows * columns)
            blocks = Image.frombytes("RGB", (columns, rows), colours)
            images.append(blocks.resize((columns * _BLOCK, rows * _BLOCK), Image.Resampling.NEAREST))
        made = make(images)
        properties.append(
            LoadedProperty(
                f"canary-{number}", number, made.images, len(images), (), 0.0, tensors=made.tensors
            )
        )
    return properties


def digest_of_answers(answers: Iterable[object], weights: Iterable[object] = ()) -> str:
    """One digest over JSON values: the answers, and the checksum of the weights where that can be had."""
    content = json.dumps([list(answers), list(weights)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def weights_checksum(model: torch.nn.Module) -> list[list[Any]]:
    """Sums over the bits of all weights of a model, as integers, computed where they lie.

    Exact: any one flipped bit changes a sum modulo 2^64. Of each tensor its name, type and shape, and the
    sums of its chunks. Without buffers that no file holds: some models change theirs with the longest prompt.
    """
    named = sorted(model.state_dict().items())
    return [
        [name, str(one.dtype), list(one.shape), _sums(one)]
        for name, one in named
        if hasattr(one, "is_meta")  # a quantized layer may keep something else beside its weights
    ]


def _sums(tensor: torch.Tensor) -> list[int]:
    import torch

    if not tensor.numel() or tensor.is_meta:
        return []
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    # Eight bytes at a time, at the speed of the memory and without a copy; what is left singly.
    whole = flat.numel() - flat.numel() % 8
    words, rest = flat[:whole], flat[whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    sums = [chunk.sum() for chunk in words.view(torch.int64).split(_CHUNK_BYTES // 8) if chunk.numel()]
    sums.append(rest.sum(dtype=torch.int64))
    return [int(one) for one in torch.stack(sums).tolist()]


def versions(*packages: str, device: str) -> str:
    """What computes in this process: packages with their versions, and the driver or the processor.

    device: ``cpu`` or ``cuda``.
    """
    from importlib.metadata import version

    parts = [f"{name} {version(name)}" for name in packages]
    if device == "cuda":
        return ", ".join([*parts, f"driver {DriverNvml().driver_version()}"])
    import torch

    parts += [f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"]
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return ", ".join([*parts, line.partition(":")[2].strip()])
    return ", ".join(parts)


@dataclass
class Canary:
    """The canary of one device over its work on one partition: ``begin`` before, ``end`` after.

    occurrence: see ``at_work_on``. meaning: a digest of what decides an answer: model, prompt, schema,
    decoding. Where the control state cannot be read, only the two answers of this work are compared.
    """

    state: ControlState
    device: Device
    occurrence: str
    meaning: str
    clock: Callable[[], float] = time.time
    log: logging.Logger = _log
    _first: CanaryAnswer | None = field(default=None, init=False)

    def begin(self, engine: object) -> None:
        """Ask before the first batch. Raises WrongAnswersError where two devices have answered otherwise."""
        if not isinstance(engine, CanaryEngine):
            return
        try:
            self._first = engine.canary()
        except ImpossibleScoresError:
            self.log.warning("%s computes no numbers: its first batch will say so.", self.device.id)
        if self._first is not None:
            self._compare(self._first, None)

    def end(self, engine: object) -> None:
        """Ask after the last batch, with nothing under way. Raises WrongAnswersError.

        Where it is right, the rows before it are sound. The answer is known from now on, where none was.
        """
        if self._first is None or not isinstance(engine, CanaryEngine):
            return
        asked_at = self.clock()
        try:
            last = engine.canary()
        except ImpossibleScoresError:
            self._fail("at the end of its work it computed no numbers", None, rows_in_doubt=True)
        if last is None or last.versions != self._first.versions:
            self.log.warning("%s did not answer the canary at the end as at the begin.", self.device.id)
        elif last.digest == self._first.digest:
            self._compare(last, asked_at)
        else:
            self._fail("they changed between begin and end of its work", None, rows_in_doubt=True)

    def _compare(self, answer: CanaryAnswer, ended_at: float | None) -> None:
        """Compare with the known answer. ended_at: of work that is sound, if it is right; unix seconds.

        At the begin nothing is noted: weights were loaded anew, so a right answer says nothing of rows that
        were made before. An answer that one device alone has given makes way for another one.
        """
        kind = {
            "device_kind": self.device.model_name,
            "meaning": self.meaning,
            "versions": answer.versions,
        }
        id_ = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:32]
        device, table = self.device.id, known_canaries
        this = table.c.id == id_

        def compare(connection: sa.Connection) -> Any:
            known = connection.execute(sa.select(table).where(this)).first() if answer.versions else None
            differs = known is not None and known.digest != answer.digest
            if ended_at is None or (known is not None and differs and known.confirmed):
                return known if differs else None
            if answer.versions and (known is None or differs):
                new = {"id": id_, "digest": answer.digest, "device": device, "at": ended_at} | kind
                connection.execute(table.delete().where(this))
                connection.execute(table.insert().values(**new, confirmed=False))
            elif known is not None and known.device != device:
                connection.execute(table.update().where(this).values(confirmed=True))
            connection.execute(good_canaries.delete().where(good_canaries.c.device == device))
            connection.execute(good_canaries.insert().values(device=device, at=ended_at))
            return known if differs else None

        try:
            known = self.state.read(compare) if ended_at is None else self.state.write(compare)
        except ControlStateError as error:
            self.log.warning("Whether %s answers the canary as known cannot be told: %s", device, error)
            return
        if known is None:
            return
        if known.confirmed:
            why = "they are not those which two devices have given"
            self._fail(why, id_, rows_in_doubt=ended_at is not None)
        self.log.warning(
            "%s answers the canary otherwise than %s did. One of the two may be sick: look at both. A third"
            " device, or the next run of one of them, decides.",
            device,
            known.device,
        )

    def _fail(self, why: str, known: str | None, *, rows_in_doubt: bool) -> NoReturn:
        device, now = self.device.id, self.clock()

        def fail(connection: sa.Connection) -> None:
            last_good = sa.select(good_canaries.c.at).where(good_canaries.c.device == device)
            good_at: float | None = connection.scalar(last_good)
            if good_at is not None and good_at > now:
                good_at = None  # The clock was ahead then: nothing tells which rows it vouched for.
            failure = DeviceFailure(self.occurrence, f"It gave wrong answers to the canary: {why}.", now)
            leave_out(connection, device, failure)
            row = {"device": device, "at": now, "good_at": good_at, "why": why, "known": known}
            connection.execute(failed_canaries.insert().values(**row, told=False))

        try:
            self.state.write(fail, copy=True)
            out = f"{device} is left out from now on"
        except ControlStateError as error:
            out = f"{device} could not be left out ({error}), so leave it out yourself (VLM_ASSETS_DEVICES)"
        what = (
            "Nothing is published, and the rows of this work are set aside in .quarantine"
            if rows_in_doubt
            else "Nothing was begun"
        )
        raise WrongAnswersError(
            f"{device} gives wrong answers to the canary ({self.occurrence}): {why}. {what}; {out}. The"
            f" partition is tried again by itself, on another device. Look at this one, then:"
            f" {command('devices', '--take-back', device)}",
            rows_in_doubt=rows_in_doubt,
        )


@dataclass(frozen=True)
class FailedCanary:
    """Wrong answers of a device. at, good_at: unix seconds; good_at None: it never gave right ones."""

    device: str
    at: float
    good_at: float | None
    why: str

    def covers(self, device: object, first: float, last: float) -> bool:
        """Whether rows are in doubt that a device made between these times."""
        return device == self.device and first <= self.at and last > (self.good_at or 0.0)


def read_failed(state: ControlState, *, untold: bool = False) -> list[FailedCanary]:
    """The failed canaries, oldest first. untold: those of which no alert tells. Raises ControlStateError."""
    table = failed_canaries
    query = sa.select(table.c.device, table.c.at, table.c.good_at, table.c.why).order_by(table.c.at)
    if untold:
        query = query.where(table.c.told.is_(False))
    return state.read(lambda connection: [FailedCanary(*row) for row in connection.execute(query)])


def note_told(state: ControlState, failed: Sequence[FailedCanary]) -> None:
    """Note that alerts tell of these. Raises ControlStateError."""
    table = failed_canaries

    def note(connection: sa.Connection) -> None:
        for one in failed:
            this = (table.c.device == one.device) & (table.c.at == one.at)
            connection.execute(table.update().where(this).values(told=True))

    state.write(note)
