"""One holder a device, by an operating-system lock that dies with its process: leases and who holds them.

The lock (flock) on ``ID.lock`` is the truth; the record ``ID.json`` beside it is for people, may be deleted,
and is never asked whether the holder lives. find.py lists the devices, and health.py refuses
sick ones. A process has one lease: its first step takes it, and every later step gets the same one.

CUDA reads CUDA_VISIBLE_DEVICES once, when it is initialised: pin before torch is imported.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from vlm_durable.files.files import TEMPORARY_SUFFIX, make_directory, write_replacing
from vlm_durable.files.lock_files import LockFile, is_held
from vlm_durable.files.processes import process_start
from vlm_durable.files.sealed_json import refuse_newer_format
from vlm_engine.devices.find import Device, DeviceError

_POLL_SECONDS = 0.25
_NOTICE_SECONDS = 60.0
FORMAT = 2
_ABOUT = (
    "For people; this file may be deleted. Whether the device is held is decided by the lock on the .lock "
    "file beside it, which must stay while anything runs."
)

Refusals = Callable[[Device], Sequence[str]]
"""Why a device should not be used now, in sentences; asked with its lock held, so that nobody else moves."""


WillBeFree = Callable[[Collection[str]], bool]
"""Whether one of these runs, which hold the devices, works and so gives its device back, however late."""


class LeaseDirectoryError(DeviceError):
    """The directory of the lease files cannot be used, or its file system does not keep locks."""


class NoDeviceFreeError(DeviceError):
    """No device came free in time. The message names who holds them, and why others are not used."""


class Clock(Protocol):
    """Time as waiting needs it; the ``time`` module is one."""

    def monotonic(self) -> float:
        """Seconds that only grow."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait; a signal handler that raises ends it."""
        ...


@dataclass(frozen=True)
class LeaseHolder:
    """The run, partition and step that a device works for.

    home: the state directory of the run's home. Homes that share devices share their locks, and each knows
    the heartbeats of its own runs alone. Records of format 1 name none.
    """

    run_id: str
    partition: str
    step: str
    home: str = ""

    def is_of(self, home: str) -> bool:
        """Whether this home watches the run. A record that names no home is everybody's own."""
        return self.home in ("", home)


@dataclass(frozen=True)
class LeaseRecord:
    """One holder. ``process_start``, in clock ticks since boot, differs for a later process with its pid."""

    device: str
    holder: LeaseHolder
    pid: int
    process_start: int | None
    host: str
    since: str

    def write(self, path: Path) -> None:
        """Write to ``path``, in the place of an earlier record. Raises OSError."""
        write_replacing(
            path, json.dumps({"format": FORMAT, "about": _ABOUT, **asdict(self)}, indent=2).encode()
        )

    @classmethod
    def read(cls, path: Path) -> LeaseRecord | None:
        """The record at ``path``; None where there is no legible one."""
        try:
            fields = json.loads(path.read_bytes())
            refuse_newer_format(fields.pop("format", 0), FORMAT, path)
            fields.pop("about", None)
            return cls(**{**fields, "holder": LeaseHolder(**fields["holder"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def written_by_the_dead(self) -> bool:
        """Whether its process is certainly gone; false where that cannot be seen from this machine."""
        return self.host == socket.gethostname() and process_start(self.pid) != self.process_start


@dataclass(frozen=True)
class HeldDevice:
    """A device whose lock is held, and the record beside it, if there is one."""

    device: Device
    record: LeaseRecord | None

    @property
    def is_at_work(self) -> bool:
        """Whether a process that lives, as far as this machine can tell, says that it holds the device."""
        return self.record is not None and not self.record.written_by_the_dead()

    def sentence(self) -> str:
        """Who holds the device, for people."""
        record = self.record
        if record is None or not self.is_at_work:
            return f"{self.device.id} is held by a process that has not said who it is."
        holder = record.holder
        home = f" of {holder.home}" if holder.home else ""
        return (
            f"{self.device.id} is held by run {holder.run_id} (partition {holder.partition}, {holder.step})"
            f"{home}, pid {record.pid} on {record.host}, since {record.since}."
        )


class Lease:
    """A device that this process holds until ``release``, the end of the ``with`` block, or its own death."""

    def __init__(self, device: Device, locks: Sequence[LockFile], record_paths: Sequence[Path]) -> None:
        self.device = device
        self._locks = locks
        self._record_paths = record_paths
        self._since = datetime.now(UTC).isoformat(timespec="seconds")

    @property
    def held(self) -> bool:
        """Whether this process still holds it: false after release, and in a forked child."""
        return self._locks[0].is_open

    def hand_to(self, holder: LeaseHolder, log: logging.Logger) -> None:
        """Write beside the lock who works on the device now. A failure is only logged: the lock counts."""
        record = LeaseRecord(
            device=self.device.id,
            holder=holder,
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            host=socket.gethostname(),
            since=self._since,
        )
        try:
            for path in self._record_paths:
                # Of holders that were killed while they wrote: nobody else writes while the lock is held.
                for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY_SUFFIX}"):
                    leftover.unlink(missing_ok=True)
                record.write(path)
        except OSError as error:
            log.warning(
                "%s is leased, but the note of who holds it was not written: %s", self.device.id, error
            )

    def release(self) -> None:
        """Give the device back. Safe to call twice."""
        if not self.held:
            return
        # While the lock is still held: a moment later the record may be the next holder's.
        for path in self._record_paths:
            # A note that stays does no harm: the lock decides whether the device is held.
            with contextlib.suppress(OSError):
                path.unlink()
        for lock in self._locks:
            lock.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class DeviceLeases:
    """The leases of some devices, kept as files in a directory that all processes on this machine share.

    Machines that share the directory may hold each other's CPU slots up (they are named alike); they never
    hold one device twice.
    """

    def __init__(self, directory: Path, devices: Sequence[Device], refusals: Refusals = lambda _: ()) -> None:
        self.directory = directory
        self.devices = tuple(devices)
        self._refusals = refusals

    def acquire(
        self,
        holder: LeaseHolder,
        *,
        wait_seconds: float,
        log: logging.Logger,
        clock: Clock = time,
        will_be_free: WillBeFree | None = None,
    ) -> Lease:
        """The first device that is free and sound; waits for one, logging who holds them.

        It logs at once and then each minute. will_be_free: asked at each look; where it says so, that time
        does not count against ``wait_seconds``. With it, a living run of another home counts as at work:
        that home has its heartbeats, and ends it if it hangs. Raises NoDeviceFreeError after these (at once
        with 0), LeaseDirectoryError where the directory cannot keep locks. The health of a device that a
        cluster gave is logged, not judged.
        """
        self._prepare_directory()
        started = next_notice = deadline_from = clock.monotonic()
        while True:
            refused: dict[str, Sequence[str]] = {}
            for device in self.devices:
                locks = self._locks_if_sound(device, refused, log)
                if locks is not None:
                    lease = Lease(device, locks, self._paths(device, ".json"))
                    lease.hand_to(holder, log)
                    waited = clock.monotonic() - started
                    log.info("%s (%s) is leased after %.0f s", device.id, device.name, waited)
                    return lease
            now = clock.monotonic()
            others = [held.record.holder for held in self.holders() if held.record and held.is_at_work]
            at_work = will_be_free is not None and (
                will_be_free({other.run_id for other in others})
                or not all(other.is_of(holder.home) for other in others)
            )
            if at_work:
                deadline_from = now
            seconds_left = deadline_from + wait_seconds - now
            if seconds_left <= 0:
                raise NoDeviceFreeError(
                    f"No device came free within {wait_seconds:.0f} s. {self._standing(refused)} "
                    "Nothing was computed and nothing is lost; start it again when one is free."
                )
            if now >= next_notice:
                how_long = "until one is" if at_work else f"up to {seconds_left:.0f} s more"
                log.info("No device is free; waiting %s. %s", how_long, self._standing(refused))
                next_notice = now + _NOTICE_SECONDS
            clock.sleep(min(_POLL_SECONDS, seconds_left))

    def holders(self) -> list[HeldDevice]:
        """The devices whose lock is held at this moment, with their holders' records.

        This takes each free lock shared for an instant, which can cost a waiting process one poll.
        """
        held = []
        for device in self.devices:
            paths = zip(self._paths(device, ".lock"), self._paths(device, ".json"), strict=True)
            record_paths = [record_path for lock_path, record_path in paths if _is_held(lock_path)]
            if record_paths:
                held.append(HeldDevice(device, LeaseRecord.read(record_paths[0])))
        return held

    def lock_path(self, device: Device) -> Path:
        """The file whose lock is the lease of a device; for several devices together, the first one's."""
        return self._paths(device, ".lock")[0]

    def _locks_if_sound(
        self, device: Device, refused: dict[str, Sequence[str]], log: logging.Logger
    ) -> list[LockFile] | None:
        """The locks of the device, or of all that work together, taken; None where one of them is held.

        It takes all or none and waits for none: where one is held, those before it are given back at once.
        """
        locks: list[LockFile] = []
        keep = False
        try:
            for path in self._paths(device, ".lock"):
                locks.append(_open(path))
                if not _try_lock(locks[-1]):
                    return None
                _refuse_if_locks_do_not_hold(path)
            reasons = self._refusals(device)
            if reasons and device.given:
                log.warning(
                    "%s was given by the cluster and is taken as it is. %s", device.id, " ".join(reasons)
                )
            elif reasons:
                refused[device.id] = reasons
                return None
            keep = True
            return locks
        finally:
            if not keep:
                for lock in locks:
                    lock.close()

    def _standing(self, refused: Mapping[str, Sequence[str]]) -> str:
        sentences = [held.sentence() for held in self.holders()]
        sentences += [sentence for reasons in refused.values() for sentence in reasons]
        return " ".join(sentences) or "All devices were held a moment ago."

    def _paths(self, device: Device, ending: str) -> list[Path]:
        # Quoted because old drivers write MIG ids with slashes.
        return [self.directory / f"{quote(member, safe='')}{ending}" for member in device.members]

    def _prepare_directory(self) -> None:
        try:
            make_directory(self.directory)
        except OSError as error:
            raise LeaseDirectoryError(
                f"The leases cannot be kept in {self.directory}: {error.strerror or error}. Give this user "
                "the right to write there, or name another directory on a local disk."
            ) from error


def _is_held(path: Path) -> bool:
    try:
        return bool(is_held(path))
    except OSError as error:
        raise LeaseDirectoryError(f"The lease file {path} cannot be read: {error.strerror}.") from error


def _open(path: Path) -> LockFile:
    try:
        return LockFile(path)
    except OSError as error:
        raise LeaseDirectoryError(f"The lease file {path} cannot be opened: {error.strerror}.") from error


def _try_lock(file: LockFile) -> bool:
    """Try to lock without waiting; whether it worked."""
    try:
        return file.try_lock()
    except OSError as error:
        raise LeaseDirectoryError(
            f"The file system of the leases cannot lock ({error.strerror}): put them on a local disk."
        ) from error


def _refuse_if_locks_do_not_hold(path: Path) -> None:
    """Lock a second time through a new descriptor, which must fail; some network file systems let it pass."""
    file = _open(path)
    try:
        if _try_lock(file):
            raise LeaseDirectoryError(
                f"The file system of {path.parent} does not keep locks (a network mount?), so two processes "
                "could take one device. Put the leases on a local disk."
            )
    finally:
        file.close()


_lock = threading.Lock()
_lease: Lease | None = None


def lease_for_process(
    open_leases: Callable[[], DeviceLeases],
    holder: LeaseHolder,
    *,
    wait_seconds: float,
    log: logging.Logger,
    will_be_free: WillBeFree | None = None,
) -> Lease:
    """Lease and pin a device at the first call; later calls hand the same lease to ``holder``.

    A process has one lease, because torch cannot move to another device once it runs. ``open_leases`` is
    called only where there is none yet: pinning narrows what the environment shows. Raises as
    ``DeviceLeases.acquire`` and ``pin`` do; a device that cannot be pinned is given back.
    """
    global _lease
    with _lock:
        if _lease is not None and _lease.held:
            _lease.hand_to(holder, log)
            return _lease
        lease = open_leases().acquire(holder, wait_seconds=wait_seconds, log=log, will_be_free=will_be_free)
        try:
            pin(lease.device)
        except BaseException:
            lease.release()
            raise
        _lease = lease
        return lease


def pin(device: Device, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set CUDA_VISIBLE_DEVICES (and the order that numbers count in), for this process and its children.

    A CPU slot hides every GPU, and bounds the threads that torch will compute with. Raises
    DeviceError where torch already runs CUDA here with another CUDA_VISIBLE_DEVICES.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if uses_cuda() and visible != device.visible:
        before = "not set" if visible is None else f"= {visible!r}"
        raise DeviceError(
            f"torch has already initialised CUDA in this process (pid {os.getpid()}), with "
            f"CUDA_VISIBLE_DEVICES {before}: it cannot be moved to {device.id} any more. Lease the device "
            "before anything uses CUDA, or start a new process."
        )
    environment["CUDA_VISIBLE_DEVICES"] = device.visible
    if device.kind == "cuda":
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if device.threads is not None:
        # A number that a person has set stays.
        environment.setdefault("OMP_NUM_THREADS", str(device.threads))


def uses_cuda() -> bool:
    """Whether this process has a CUDA context, which keeps memory of its device until the process ends."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def refuse_another_gpu(device: Device) -> None:
    """Raise DeviceError where torch computes on another GPU than the leased one.

    Call it once torch has a GPU. A container or a proxy driver may show other GPUs than NVML lists, and
    two runs would then share one. Only whole GPUs are compared: torch and NVML name MIG instances each in
    their own way, and a cluster's device may have no UUID.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not device.id.startswith("GPU-"):
        return
    uuids = [
        getattr(torch.cuda.get_device_properties(index), "uuid", None)
        for index in range(torch.cuda.device_count())
    ]
    computed_on = [f"GPU-{str(uuid).removeprefix('GPU-')}" for uuid in uuids if uuid is not None]
    if len(computed_on) == len(uuids) and computed_on != list(device.members):
        raise DeviceError(
            f"{device.id} is leased, and torch computes on {', '.join(computed_on)}. Nothing was described."
            " Something between this process and the driver shows it other GPUs: look at what sets"
            " CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES here, and compare `nvidia-smi -L`."
        )


def _renew_in_forked_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_in_forked_child)
