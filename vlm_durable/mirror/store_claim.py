"""Which machine works over a store with a control state of its own.

Of each partition and publication the store itself lets only one machine be the writer. But pauses, attempts
and workers are in the control state, and two machines with one each would start the same work. Machines that
share a Postgres need no claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlm_durable.commands import command
from vlm_durable.files.home_claim import SEVERAL_MACHINES, this_machine
from vlm_durable.files.sealed_json import BrokenSealError, refuse_newer_format, sealed, unseal
from vlm_durable.mirror.bucket import ObjectDamagedError, S3Folder, Stored, StoreError, TakenError

NAME = ".state/machine.json"
FORMAT = 1

_UNREADABLE = {"host": "unknown"}
_MOST_BYTES = 1 << 20


class OtherMachineError(StoreError):
    """Another machine works over this store, and each has a control state of its own."""


def claim_store(store: S3Folder, home: Path) -> None:
    """Note in a store that this machine works over it; refuse where another one does.

    Raises OtherMachineError, StoreError.
    """
    theirs, at = _standing(store)
    if at is None:
        store.prove()
        try:
            store.put(NAME, _of_this_machine(home), over=None)
        except TakenError:  # By another one, at the same moment.
            theirs, _ = _standing(store)
        else:
            return
    ours = this_machine()
    if any(theirs.get(name) != value for name, value in ours.items()):
        host = theirs.get("host")
        raise OtherMachineError(
            f"{store} is worked over by {host} (its home is {theirs.get('home', 'unknown')}, machine id"
            f" {theirs.get('machine_id') or 'unknown'}) since {theirs.get('since', 'an unknown time')}. This"
            f" machine is {ours['host']} (machine id {ours['machine_id'] or 'unknown'}). Nothing was changed."
            f" One machine at a time may work over a store without Postgres. {SEVERAL_MACHINES} If {host} is"
            f" gone for good, or was installed anew or renamed: {command('devices', '--forget-node', host)},"
            " and start again."
        )


def forget_machine(store: S3Folder, host: str, home: Path) -> bool:
    """Put this machine in the place of one that is gone for good. False where it is not that one's.

    Raises TakenError where another machine does so at the same moment, StoreError.
    """
    theirs, at = _standing(store)
    if at is None or theirs.get("host") != host:
        return False
    store.put(NAME, _of_this_machine(home), over=at)
    return True


def _of_this_machine(home: Path) -> bytes:
    since = datetime.now(UTC).isoformat(" ", "minutes")  # for people alone
    return sealed({**this_machine(), "home": str(home), "since": since}, format_=FORMAT)


def _standing(store: S3Folder) -> tuple[Mapping[str, Any], Stored | None]:
    at = store.head(NAME)
    if at is None:
        return {}, None
    try:
        found = unseal(store.get(NAME, most=_MOST_BYTES))
    except (BrokenSealError, ObjectDamagedError):
        return _UNREADABLE, at
    refuse_newer_format(found.get("format"), FORMAT, Path(NAME))
    return found, at
