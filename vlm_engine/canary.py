"""The canary: a small fixed question, asked before and after a partition, of which the answer never changes.

A sick device gives wrong answers before it gives errors. This module holds the question, the exact checksum
of the weights on a device, and the consequence of an answer: it is recorded, it confirms the record, or the
device is left out. The engines compute the answer. ``vlm_assets/assets/rows_in_doubt.py`` deals with rows of
a sick device.

Devices of a kind agree, because the canary is the same batch, greedy, without drafts and without retries.
Only an answer that two devices have given refuses a third one: where two differ, nobody knows which one is
sick.
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
from vlm_durable.state.tables import failed_canaries, good_canaries, known_canaries, put_row
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
"""The texts that a text embedder embeds as its canary."""

_SHAPES: Final = (((12, 16),), ((16, 16), (20, 12)))
"""The images of each property, in blocks [rows, columns]: 2 properties with 1 and 2 images."""

_BLOCK: Final = 8
"""Pixels of a block's side: single pixels would be grey once a processor has resized them."""

_CHUNK_BYTES: Final = 1 << 25
"""Bytes of a tensor that are summed up at a time. Each sum is one number of the checksum."""

_log = logging.getLogger(__name__)


class WrongAnswersError(RuntimeError):
    """A device gave wrong answers to the canary, or rows of such a device are in the work under way.

    rows_in_doubt: whether the rows of this generation may be wrong, so that none may be published.
    """

    def __init__(self, message: str, *, rows_in_doubt: bool) -> None:
        self.rows_in_doubt = rows_in_doubt
        super().__init__(message)


def canary_properties(make: Maker) -> list[LoadedProperty]:
    """The properties of the canary. make: how the engine's workers process images.

    The pixels come from a digest, because a new version of a library may draw other random numbers.
    """
    properties = []
    for number, shapes in enumerate(_SHAPES):
        images = []
        for index, (rows, columns) in enumerate(shapes):
            colours = hashlib.shake_256(f"canary {number} {index}".encode()).digest(3 * rows * columns)
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
    """One digest over JSON values: the answers, and the checksum of the weights where it can be computed."""
    content = json.dumps([list(answers), list(weights)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def weights_checksum(model: torch.nn.Module) -> list[list[Any]]:
    """Sums over the bits of all weights of a model, as integers, computed where they lie.

    Any one flipped bit changes a sum modulo 2^64. Each tensor gives its name, type and shape, and the sums of
    its chunks. Buffers that no file holds are left out: some models change theirs with the longest prompt.
    """
    return [
        [name, str(tensor.dtype), list(tensor.shape), _sums(tensor)]
        for name, tensor in sorted(model.state_dict().items())
        if hasattr(tensor, "is_meta")  # A quantized layer may keep other objects beside its weights.
    ]


def _sums(tensor: torch.Tensor) -> list[int]:
    import torch

    if not tensor.numel() or tensor.is_meta:
        return []
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    # Eight bytes at a time, at the speed of the memory and without a copy; the rest singly.
    whole = flat.numel() - flat.numel() % 8
    words, rest = flat[:whole], flat[whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    sums = [chunk.sum() for chunk in words.view(torch.int64).split(_CHUNK_BYTES // 8) if chunk.numel()]
    sums.append(rest.sum(dtype=torch.int64))
    return [int(number) for number in torch.stack(sums).tolist()]


def versions(*packages: str, device: str) -> str:
    """The versions of what computes in this process: packages, and the driver or the processor.

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
        """Ask before the first batch. Raises WrongAnswersError where two devices gave another answer."""
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

        A right answer proves the rows before it sound. It is recorded where none was.
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
        """Compare with the recorded answer. ended_at: end of the work, unix seconds; None before it.

        Before the work nothing is recorded: weights were loaded anew, so a right answer says nothing of
        earlier rows. A record that only one device has given is replaced by another answer.
        """
        kind = {
            "device_kind": self.device.model_name,
            "meaning": self.meaning,
            "versions": answer.versions,
        }
        id_ = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:32]
        device, table = self.device.id, known_canaries
        is_this_kind = table.c.id == id_

        def compare(connection: sa.Connection) -> Any:
            """The recorded answer, where it differs."""
            query = sa.select(table).where(is_this_kind)
            record = connection.execute(query).first() if answer.versions else None
            differs = record is not None and record.digest != answer.digest
            if ended_at is None or (record is not None and differs and record.confirmed):
                return record if differs else None
            if answer.versions and (record is None or differs):
                new = {"id": id_, "digest": answer.digest, "device": device, "at": ended_at} | kind
                put_row(connection, table, **new, confirmed=False)
            elif record is not None and record.device != device:
                connection.execute(table.update().where(is_this_kind).values(confirmed=True))
            put_row(connection, good_canaries, device=device, at=ended_at)
            return record if differs else None

        try:
            differing = self.state.read(compare) if ended_at is None else self.state.write(compare)
        except ControlStateError as error:
            self.log.warning("Whether %s answers the canary as known cannot be told: %s", device, error)
            return
        if differing is None:
            return
        if differing.confirmed:
            why = "they are not those which two devices have given"
            self._fail(why, id_, rows_in_doubt=ended_at is not None)
        self.log.warning(
            "%s answers the canary otherwise than %s did. One of the two may be sick: look at both. A third"
            " device, or the next run of one of them, decides.",
            device,
            differing.device,
        )

    def _fail(self, why: str, contradicted_id: str | None, *, rows_in_doubt: bool) -> NoReturn:
        device, now = self.device.id, self.clock()

        def fail(connection: sa.Connection) -> None:
            last_good = sa.select(good_canaries.c.at).where(good_canaries.c.device == device)
            good_at: float | None = connection.scalar(last_good)
            if good_at is not None and good_at > now:
                good_at = None  # The clock was ahead: nobody knows which rows that canary proved.
            failure = DeviceFailure(self.occurrence, f"It gave wrong answers to the canary: {why}.", now)
            leave_out(connection, device, failure)
            row = {"device": device, "at": now, "good_at": good_at, "why": why, "known": contradicted_id}
            connection.execute(failed_canaries.insert().values(**row, told=False))

        try:
            self.state.write(fail, copy=True)
            out = f"{device} is left out from now on"
        except ControlStateError as error:
            out = f"{device} could not be left out ({error}), so leave it out yourself (VLM_ASSETS_DEVICES)"
        consequence = (
            "Nothing is published, and the rows of this work are set aside in .quarantine"
            if rows_in_doubt
            else "Nothing was begun"
        )
        raise WrongAnswersError(
            f"{device} gives wrong answers to the canary ({self.occurrence}): {why}. {consequence}; {out}."
            f" The partition is tried again by itself, on another device. Look at this one, then:"
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
        """Whether rows that a device made between these times are in doubt."""
        return device == self.device and first <= self.at and last > (self.good_at or 0.0)


def read_failed(state: ControlState, *, not_alerted: bool = False) -> list[FailedCanary]:
    """The failed canaries, oldest first. not_alerted: those without an alert. Raises ControlStateError."""
    table = failed_canaries
    query = sa.select(table.c.device, table.c.at, table.c.good_at, table.c.why).order_by(table.c.at)
    if not_alerted:
        query = query.where(table.c.told.is_(False))
    return state.read(lambda connection: [FailedCanary(*row) for row in connection.execute(query)])


def note_alerted(state: ControlState, failed: Sequence[FailedCanary]) -> None:
    """Note that these have an alert. Raises ControlStateError."""
    table = failed_canaries

    def note(connection: sa.Connection) -> None:
        for canary in failed:
            is_this_canary = (table.c.device == canary.device) & (table.c.at == canary.at)
            connection.execute(table.update().where(is_this_canary).values(told=True))

    state.write(note)
