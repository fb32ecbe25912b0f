"""Devices that failed twice and are left out until a person takes them back: one durable file for all runs.

What lives here: noting failures, leaving out, taking back. What does not: what counts as a device's failure
(``device_failures.py``), whether a device is sound at the moment (``health.py``), and telling people.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from resources.devices.errors import DeviceError
from resources.storage.files import make_directory, set_aside
from resources.storage.lock_files import locked
from resources.storage.sealed_json import BrokenSealError, read_sealed, write_sealed

FAILURES = 2
"""Failures of a device, each of another occurrence, after which it is left out."""

WITHIN_SECONDS = 24 * 3600.0
"""Failures that are further apart are those of software or of chance."""

_ABOUT = (
    "The truth about which devices are left out. Deleting it takes all of them back, as `vlm-assets devices"
    " --take-back ID` does with one."
)

_ASIDE = "damaged"

_log = logging.getLogger(__name__)


class UnknownDeviceError(DeviceError):
    """A device that is to be taken back is not left out."""


def at_work_on(asset: str, partition: str) -> str:
    """The occurrence of a failure at work, whatever run it was in.

    A partition counts once, so that one whose images are the trouble takes no device out by its retries.
    """
    return f"{asset}/{partition}"


@dataclass(frozen=True)
class DeviceFailure:
    """One failure. occurrence: tells it from others, see ``at_work_on``; at: unix seconds."""

    occurrence: str
    why: str
    at: float


@dataclass(frozen=True)
class DeviceRecord:
    """What is held against one device. left_out_at: unix seconds, None while it is used."""

    failures: tuple[DeviceFailure, ...] = ()
    left_out_at: float | None = None

    def sentence(self, device: str) -> str:
        """For people."""
        whys = " ".join(dict.fromkeys(failure.why for failure in self.failures))
        if self.left_out_at is None:
            return f"{device} has failed {len(self.failures)} time(s): {whys}"
        return (
            f"{device} is left out since it failed {len(self.failures)} times: {whys} When it is sound again:"
            f" vlm-assets devices --take-back {device}"
        )


@dataclass(frozen=True)
class LeftOutDevices:
    """The file, which any process may change at once."""

    path: Path
    clock: Callable[[], float] = field(default=time.time)

    def records(self) -> Mapping[str, DeviceRecord]:
        """Every device that something is held against, by id. A file that does not verify is kept aside."""
        try:
            return self._read()
        except BrokenSealError:
            with self._locked():
                return self._read_or_set_aside()

    def set_aside(self) -> list[Path]:
        """Files of this name that did not verify and are kept; what they said is not known any more."""
        return sorted((self.path.parent / _ASIDE).glob(f"{self.path.name}.*"))

    def left_out(self) -> dict[str, DeviceRecord]:
        """The devices that are left out, by id."""
        return {id_: one for id_, one in self.records().items() if one.left_out_at is not None}

    def note_failure(self, device: str, *, occurrence: str, why: str, on_one_device: bool = False) -> bool:
        """Note, durably, that a device failed; the same occurrence counts once within a day.

        on_one_device: nor where it is held against another device, for then it goes with the work. Returns
        whether this is what leaves the device out. Raises OSError.
        """
        now = self.clock()
        with self._locked():
            records = self._read_or_set_aside()
            before = records.get(device, DeviceRecord())
            recent = [one for one in before.failures if abs(now - one.at) <= WITHIN_SECONDS]
            counted = records.values() if on_one_device else [before]
            if any(
                one.occurrence == occurrence and abs(now - one.at) <= WITHIN_SECONDS
                for record in counted
                for one in record.failures
            ):
                return False
            failures = (*recent, DeviceFailure(occurrence, why, now))
            leaves = before.left_out_at is None and len(failures) >= FAILURES
            since = now if leaves else before.left_out_at
            self._write({**records, device: DeviceRecord(failures, since)})
        return leaves

    def take_back(self, device: str) -> DeviceRecord:
        """Use a device again and forget its failures. Returns what was held against it.

        Raises UnknownDeviceError, OSError.
        """
        with self._locked():
            records = self._read_or_set_aside()
            if device not in records:
                listed = ", ".join(sorted(records)) or "none"
                raise UnknownDeviceError(
                    f"Nothing is held against a device {device!r}, so it cannot be taken back. Devices that"
                    f" something is held against: {listed}."
                )
            self._write({id_: one for id_, one in records.items() if id_ != device})
        return records[device]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        make_directory(self.path.parent)
        with locked(self.path.with_suffix(".lock")):
            yield

    def _read(self) -> dict[str, DeviceRecord]:
        try:
            said = read_sealed(self.path)
        except FileNotFoundError:
            return {}
        return {
            id_: DeviceRecord(tuple(DeviceFailure(**one) for one in found["failures"]), found["left_out_at"])
            for id_, found in said["devices"].items()
        }

    def _read_or_set_aside(self) -> dict[str, DeviceRecord]:
        try:
            return self._read()
        except BrokenSealError as error:
            aside = set_aside(self.path, self.path.parent / _ASIDE)
            _log.error(
                "%s does not verify (%s), so it is not known which devices were left out: all are used until"
                " they fail again. It is kept as %s.",
                self.path,
                error,
                aside,
            )
            return {}

    def _write(self, records: Mapping[str, DeviceRecord]) -> None:
        devices = {id_: asdict(one) for id_, one in records.items()}
        write_sealed(self.path, {"about": _ABOUT, "devices": devices})
