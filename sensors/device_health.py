"""Devices over time: sickness is recorded against a device, and people are told of devices left out.

How a device is judged is in ``vlm_engine/devices/health.py``, when it is left out in ``left_out.py`` there.
``worker_health.py`` has the tick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from sensors.health_watch import Watch
from vlm_durable.commands import command
from vlm_engine.devices.find import Device, DeviceError
from vlm_engine.devices.health import DeviceHealth
from vlm_engine.devices.left_out import DeviceRecord, LeftOutDevices

NONE_LEFT = "devices/none left"
"""Subject of the alert that every device is left out."""

_NAMED = 8
_SICK_AGAIN_SECONDS = 600.0
"""A device that is sick for so long without a break has failed twice; sound for so long, its alert closes."""


@dataclass(frozen=True)
class DeviceWatcher:
    """Checks the devices of a machine. find: the devices that the settings name. judge: the health of each.

    node: this machine's name in a cluster, else empty.
    """

    outbox: Outbox
    left_out: LeftOutDevices
    find: Callable[[], Sequence[Device]]
    judge: Callable[[Sequence[Device]], Mapping[str, DeviceHealth]]
    node: str = ""

    @property
    def subject(self) -> str:
        """The subject of alerts about all devices: each node of a cluster has its own."""
        return f"devices of {self.node}" if self.node else "devices"

    def check(self, watch: Watch) -> list[str]:
        """One tick: changes ``watch``, posts alerts. Returns sentences."""
        subject, now = self.subject, watch.unix
        opened = self.outbox.open_subjects()
        # If the memory was lost, open alerts say which devices are sick: no second failure, no new alert.
        for name, alert in opened.items():
            if alert.kind == "device_sick" and not name.startswith("devices of ") and name != subject:
                watch.sick.setdefault(name.removeprefix("devices/"), alert.at)
        try:
            devices = self.find()
            watch.configured = [device.id for device in devices]
            # Devices that the driver does not list any more are judged too: else their loss stays unknown.
            watch.devices |= {device.id: asdict(device) for device in devices}
            verdicts = self.judge([Device(**fields) for fields in watch.devices.values()])
        except DeviceError as error:
            if watch.blind_since is None:
                watch.blind_since = opened[subject].at if subject in opened else now
            self.outbox.post(
                Alert(
                    kind="device_sick",
                    subject=subject,
                    occurrence=f"blind since {watch.blind_since:.0f}",
                    severity="error",
                    title="The devices cannot be looked at",
                    next_step="Look at `nvidia-smi` and the kernel log; a reboot may be needed.",
                    actual=str(error),
                    at=watch.blind_since,
                )
            )
            return [str(error)]
        watch.blind_since = None
        if subject in opened:
            sentence = "The driver answers again."
            self.outbox.note_recovery(subject, sentence=sentence, at=now)
        sentences: list[str] = []
        for device, verdict in verdicts.items():
            sentences.extend((*verdict.refused, *verdict.hot))
            if verdict.refused:
                self._note_sick(watch, device, " ".join(verdict.refused))
            elif device in watch.sick:
                self._note_sound(watch, device)
            self._note_hot(watch, device, " ".join(verdict.hot), is_open=_hot(device) in opened)
        return sentences

    def _note_hot(self, watch: Watch, device: str, why: str, *, is_open: bool) -> None:
        """Warn once while a device is too hot. It stays in use: a slow device is better than none."""
        now = watch.unix
        if why:
            watch.cool.pop(device, None)
            if not is_open:
                self.outbox.post(
                    Alert(
                        kind="device_hot",
                        subject=_hot(device),
                        occurrence=f"{now:.0f}",
                        severity="warning",
                        title=f"{device} is too hot, and slower for it",
                        next_step="Look at its cooling, its fans and the air in the room. It goes on.",
                        expected="clocks that its temperature does not hold down",
                        actual=why,
                        at=now,
                    )
                )
        elif is_open:
            since = watch.cool[device] = max(watch.cool.get(device, watch.at), watch.since)
            if watch.at - since >= _SICK_AGAIN_SECONDS:
                del watch.cool[device]
                sentence = f"{device} was not too hot for {_SICK_AGAIN_SECONDS / 60:.0f} minutes."
                self.outbox.note_recovery(_hot(device), sentence=sentence, at=now)

    def _note_sound(self, watch: Watch, device: str) -> None:
        """Close the alert of a device after it was sound for long: throttling on and off is one trouble."""
        watch.sick_again.pop(device, None)
        since = watch.sound[device] = max(watch.sound.get(device, watch.at), watch.since)
        if watch.at - since >= _SICK_AGAIN_SECONDS:
            del watch.sick[device], watch.sound[device]
            now = watch.unix
            sentence = f"Nothing has spoken against {device} for {_SICK_AGAIN_SECONDS / 60:.0f} minutes."
            self.outbox.note_recovery(f"devices/{device}", sentence=sentence, at=now)

    def _note_sick(self, watch: Watch, device: str, why: str) -> None:
        """Alert of a sick device, and record the failure; a second one if it stays sick without a break."""
        now = watch.unix
        occurrence = f"sick since {watch.sick.setdefault(device, now):.0f}"
        watch.sound.pop(device, None)
        since = watch.sick_again[device] = max(watch.sick_again.get(device, watch.at), watch.since)
        self.outbox.post(
            Alert(
                kind="device_sick",
                subject=f"devices/{device}",
                occurrence=occurrence,
                severity="warning",
                title=f"{device} is not sound",
                next_step=(
                    "Nothing new starts on it while this lasts. Look at it: after ten minutes without a"
                    " break, or a second failure within a day, it is left out until you take it back."
                ),
                expected="nothing that speaks against it",
                actual=why,
                at=now,
            )
        )
        self.left_out.note_failure(device, occurrence=occurrence, why=why)
        if watch.at - since >= _SICK_AGAIN_SECONDS:
            self.left_out.note_failure(device, occurrence=f"{occurrence}, still", why=why)


def usable_devices(watch: Watch, left_out: Collection[str]) -> int:
    """How many devices runs may take: 0 only if every device that the settings name is left out.

    A device that a cluster gave is taken whatever is recorded against it.
    """
    unusable = {id_ for id_ in left_out if not watch.devices.get(id_, {}).get("given")}
    if watch.configured and unusable.issuperset(watch.configured):
        return 0
    return max(len(watch.devices.keys() - unusable), 1)


def tell_left_out(
    watch: Watch, left_out: LeftOutDevices, outbox: Outbox, now: float, *, node: str = ""
) -> list[str]:
    """Alert of devices that were left out or taken back; changes ``watch``. Returns sentences.

    now: unix seconds. node: in a cluster, whose devices to check; empty: all devices.
    """
    records = {
        device: record
        for device, record in left_out.left_out().items()
        if not node or device in watch.devices
    }
    for device, record in records.items():
        if device not in watch.left_out:
            outbox.post(
                Alert(
                    kind="device_left_out",
                    subject=f"devices/{device}/left out",
                    occurrence=f"{record.left_out_at}",
                    severity="error",
                    title=f"{device} is left out; the others take over",
                    next_step=(
                        "Look at `nvidia-smi` and the kernel log. When it is sound again:"
                        f" {command('devices', '--take-back', device)}"
                    ),
                    expected="a device that works",
                    actual=_whys(record),
                    at=now,
                )
            )
    for device in watch.left_out:
        if device not in records:
            sentence = f"{device} was taken back and is used again."
            outbox.note_recovery(f"devices/{device}/left out", sentence=sentence, at=now)
    watch.left_out = sorted(records)
    if not node:
        _tell_none_left(watch, records, outbox, now)
    return [record.sentence(device) for device, record in records.items()]


def _tell_none_left(watch: Watch, records: Mapping[str, DeviceRecord], outbox: Outbox, now: float) -> None:
    if usable_devices(watch, records) > 0:
        # Just after a start it may not be known which devices there are: then the alert stays open.
        if watch.configured:
            sentence = "A device is used again, and what waits goes on by itself."
            outbox.note_recovery(NONE_LEFT, sentence=sentence, at=now)
        return
    configured = {device: records[device] for device in sorted(watch.configured)}
    outbox.post(
        Alert(
            kind="all_devices_left_out",
            subject=NONE_LEFT,
            occurrence=f"{max(record.left_out_at or 0.0 for record in configured.values())}",
            severity="error",
            title="Every device is left out: nothing is computed until one is taken back",
            next_step=(
                "No run is started meanwhile: what is queued waits, nothing is lost; it goes on by itself."
                " Look at `nvidia-smi` and the kernel log; where all failed alike, at what they share:"
                " driver, power, cooling, storage, the model. Then: "
                + "; ".join(command("devices", "--take-back", device) for device in [*configured][:_NAMED])
            ),
            expected="one device at least to work on",
            actual=" ".join(f"{device}: {_whys(record)}" for device, record in configured.items()),
            at=now,
        )
    )


def _whys(record: DeviceRecord) -> str:
    return " ".join(dict.fromkeys(failure.why for failure in record.failures))


def _hot(device: str) -> str:
    return f"devices/{device}/hot"
