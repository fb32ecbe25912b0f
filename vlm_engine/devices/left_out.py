"""Devices that failed twice and are left out until a person takes them back, as the control state has them.

This module decides which errors are a device's own and not the model's or the data's. It notes them, leaves
devices out, and takes them back. Whether a device is sound at the moment is in ``health.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from vlm_durable.commands import command
from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import device_failures, devices_left_out, failed_canaries, known_canaries
from vlm_durable.wording import counted
from vlm_engine.devices.find import DeviceError

FAILURES = 2
"""Failures of a device, each of another occurrence, after which it is left out."""

WITHIN_SECONDS = 24 * 3600.0
"""Failures that are further apart are those of software or of chance."""


_SIGNS = ("cuda error", "cublas_status", "cudnn_status", "nccl error", "uncorrectable ecc")
"""In an error, and in the end of a model server's log, which names NCCL at each start."""

_NOT_ITS_OWN = ("out of memory", "alloc_failed", "device-side assert")
"""Too large a batch, and an index out of range in a model's code, fail on any device."""


class ImpossibleResultError(RuntimeError):
    """What was computed cannot be right; the first sentence of the message says what it is.

    The device may have done it, or the model: an occurrence of it counts on one device alone.
    """


def device_failure(error: BaseException) -> str | None:
    """A sentence where the error is a device's own failure, else None. Looks at its causes too."""
    for cause in _causes(error):
        if isinstance(cause, MemoryError):
            return None
        text = str(cause)
        if isinstance(cause, ImpossibleResultError):
            return f"{text.partition('. ')[0].rstrip('.')}."
        lower_text = text.lower()
        if any(sign in lower_text for sign in _NOT_ITS_OWN):
            return None
        lines = text.splitlines()
        signed_lines = [line for line in lines if any(sign in line.lower() for sign in _SIGNS)]
        name = type(cause).__name__
        # By name: torch is not imported where no model ran.
        if signed_lines or name == "AcceleratorError":
            return f"{name}: {(signed_lines or lines or [''])[0].strip()}"
    return None


def is_impossible_result(error: BaseException) -> bool:
    """Whether the error, or what caused it, is an ImpossibleResultError."""
    return any(isinstance(cause, ImpossibleResultError) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error's causes, the first one first, and then itself."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    yield from reversed(chain)


def at_work_on(asset: str, partition: str) -> str:
    """The occurrence of a failure while a partition was computed, in whatever run.

    A partition counts once, so that one with bad images takes no device out by its retries.
    """
    return f"{asset}/{partition}"


@dataclass(frozen=True)
class DeviceFailure:
    """One failure. occurrence: the same for all its reports, see ``at_work_on``; at: unix seconds."""

    occurrence: str
    why: str
    at: float


@dataclass(frozen=True)
class DeviceRecord:
    """The failures of one device. left_out_at: unix seconds, None while it is used."""

    failures: tuple[DeviceFailure, ...] = ()
    left_out_at: float | None = None

    def sentence(self, device: str) -> str:
        """For people."""
        whys = " ".join(dict.fromkeys(failure.why for failure in self.failures))
        if self.left_out_at is None:
            return f"{device} has failed {len(self.failures)} time(s): {whys}"
        return (
            f"{device} is left out since it failed {counted(len(self.failures), 'times')}: {whys} When"
            f" it is sound again:"
            f" {command('devices', '--take-back', device)}"
        )


@dataclass(frozen=True)
class LeftOutDevices:
    """The devices of one home. Every method raises ControlStateError (an OSError)."""

    state: ControlState
    clock: Callable[[], float] = field(default=time.time)

    def records(self) -> Mapping[str, DeviceRecord]:
        """Every device with failures, by id."""
        return self.state.read(_records)

    def left_out(self) -> dict[str, DeviceRecord]:
        """The devices that are left out, by id."""
        return {device: record for device, record in self.records().items() if record.left_out_at is not None}

    def note_failure(self, device: str, *, occurrence: str, why: str, on_one_device: bool = False) -> bool:
        """Note, durably, that a device failed; the same occurrence counts once within a day.

        on_one_device: the occurrence counts for one device only, the first: on a second one its cause is the
        work. Returns whether this failure leaves the device out.
        """
        now = self.clock()

        def is_noted(records: Mapping[str, DeviceRecord]) -> bool:
            compared = records.values() if on_one_device else [records.get(device, DeviceRecord())]
            return any(
                failure.occurrence == occurrence and abs(now - failure.at) <= WITHIN_SECONDS
                for record in compared
                for failure in record.failures
            )

        def note(connection: sa.Connection) -> bool:
            records = _records(connection)
            if is_noted(records):
                return False
            before = records.get(device, DeviceRecord())
            recent = [failure for failure in before.failures if abs(now - failure.at) <= WITHIN_SECONDS]
            failures = (*recent, DeviceFailure(occurrence, why, now))
            connection.execute(device_failures.delete().where(device_failures.c.device == device))
            for failure in failures:
                connection.execute(device_failures.insert().values(_row(device, failure)))
            leaves = before.left_out_at is None and len(failures) >= FAILURES
            if leaves:
                connection.execute(devices_left_out.insert().values(device=device, since=now))
            return leaves

        # A failure is reported at each check while it lasts: a noted one is neither written nor copied again.
        return not is_noted(self.records()) and self.state.write(note, copy=True)

    def take_back(self, device: str) -> DeviceRecord:
        """Use a device again and forget its failures, which are returned.

        Raises DeviceError.
        """

        def forget(connection: sa.Connection) -> DeviceRecord:
            records = _records(connection)
            if device not in records:
                listed = ", ".join(sorted(records)) or "none"
                raise DeviceError(
                    f"Nothing is held against a device {device!r}, so it cannot be taken back. Devices that"
                    f" something is held against: {listed}."
                )
            for table in (device_failures, devices_left_out):
                connection.execute(table.delete().where(table.c.device == device))
            _forget_contradicted(connection, device)
            return records[device]

        return self.state.write(forget, copy=True)


def leave_out(connection: sa.Connection, device: str, failure: DeviceFailure) -> None:
    """Leave a device out at once, with one failure that says why, in the caller's transaction."""
    connection.execute(device_failures.insert().values(_row(device, failure)))
    is_out = sa.select(devices_left_out).where(devices_left_out.c.device == device)
    if connection.execute(is_out).first() is None:
        connection.execute(devices_left_out.insert().values(device=device, since=failure.at))


def _row(device: str, failure: DeviceFailure) -> dict[str, object]:
    return {"device": device, "occurrence": failure.occurrence, "at": failure.at, "why": failure.why}


def _forget_contradicted(connection: sa.Connection, device: str) -> None:
    """Forget known answers to the canary that a device contradicted: a person says that it is sound.

    Two devices that agree make an answer known again.
    """
    contradicted = sa.select(failed_canaries.c.known).where(failed_canaries.c.device == device)
    connection.execute(known_canaries.delete().where(known_canaries.c.id.in_(contradicted)))


def _records(connection: sa.Connection) -> dict[str, DeviceRecord]:
    since = {row.device: row.since for row in connection.execute(sa.select(devices_left_out))}
    failures: dict[str, list[DeviceFailure]] = {device: [] for device in since}
    for row in connection.execute(sa.select(device_failures).order_by(device_failures.c.at)):
        failures.setdefault(row.device, []).append(DeviceFailure(row.occurrence, row.why, row.at))
    return {
        device: DeviceRecord(tuple(own_failures), since.get(device))
        for device, own_failures in failures.items()
    }
