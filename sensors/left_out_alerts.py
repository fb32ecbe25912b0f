"""Devices that are left out: each is told of once, and that none is left; how many may still be used.

What lives here: the alerts and the count. What does not: what leaves a device out
(``resources/devices/left_out.py``), and the tick (``worker_health.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from resources.devices.left_out import DeviceRecord, LeftOutDevices
from sensors.health_watch import Watch

NONE_LEFT = "devices/none left"
"""Subject of the alert that every device is left out."""

_NAMED = 8


def usable_devices(watch: Watch, left_out: Collection[str]) -> int:
    """Devices that runs may take: 0 only where every one that the settings mean is left out.

    A device that a cluster gave is taken whatever is held against it.
    """
    out = {id_ for id_ in left_out if not watch.devices.get(id_, {}).get("given")}
    if watch.here and out.issuperset(watch.here):
        return 0
    return max(len(watch.devices.keys() - out), 1)


def tell_left_out(watch: Watch, left_out: LeftOutDevices, outbox: Outbox, now: float) -> list[str]:
    """Post what is new of the devices left out; changes ``watch``. Returns sentences. now: unix seconds."""
    records = left_out.left_out()
    for device, record in records.items():
        if device not in watch.left_out:
            outbox.post(
                Alert(
                    kind="device_left_out",
                    subject=f"devices/{device}/left out",
                    occurrence=f"{record.left_out_at}",
                    severity="error",
                    title=f"{device} has failed twice and is left out; the others take over",
                    next_step=(
                        f"Look at `nvidia-smi` and the kernel log. When it is sound again:"
                        f" vlm-assets devices --take-back {device}"
                    ),
                    expected="a device that works",
                    found=_whys(record),
                    at=now,
                )
            )
    for device in watch.left_out:
        if device not in records:
            sentence = f"{device} was taken back and is used again."
            outbox.recovered(f"devices/{device}/left out", sentence=sentence, at=now)
    watch.left_out = sorted(records)
    _tell_none_left(watch, records, outbox, now)
    return [record.sentence(device) for device, record in records.items()]


def _tell_none_left(watch: Watch, records: Mapping[str, DeviceRecord], outbox: Outbox, now: float) -> None:
    if usable_devices(watch, records) > 0:
        # Between two starts it may not be known which devices there are: nothing is over then.
        if watch.here:
            sentence = "A device is used again, and what waits goes on by itself."
            outbox.recovered(NONE_LEFT, sentence=sentence, at=now)
        return
    here = {device: records[device] for device in sorted(watch.here)}
    outbox.post(
        Alert(
            kind="all_devices_left_out",
            subject=NONE_LEFT,
            occurrence=f"{max(record.left_out_at or 0.0 for record in here.values())}",
            severity="error",
            title="Every device is left out: nothing is computed until one is taken back",
            next_step=(
                "No run is started meanwhile: what is queued waits, nothing is lost; it goes on by itself."
                " Look at `nvidia-smi` and the kernel log; where all failed alike, at what they share:"
                " driver, power, cooling, storage, the model. Then: "
                + "; ".join(f"vlm-assets devices --take-back {device}" for device in [*here][:_NAMED])
            ),
            expected="one device at least to work on",
            found=" ".join(f"{device}: {_whys(record)}" for device, record in here.items()),
            at=now,
        )
    )


def _whys(record: DeviceRecord) -> str:
    return " ".join(dict.fromkeys(failure.why for failure in record.failures))
