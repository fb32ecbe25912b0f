"""The claim of the one machine that works over a store with a control state of its own.

The store itself lets only one machine write each partition and publication. But pauses, attempts and workers
are in the control state: two machines with one each would start the same work. Machines that share a Postgres
need no claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlm_durable.commands import command
from vlm_durable.files.home_claim import SEVERAL_MACHINES, this_machine
from vlm_durable.files.sealed_json import BrokenSealError, sealed, unsealed
from vlm_durable.mirror.bucket import ObjectDamagedError, StoredObject, StoreError, TakenError
from vlm_durable.mirror.mirror import Mirror

NAME = ".state/machine.json"
FORMAT = 1

_UNREADABLE = {"host": "unknown"}
_MOST_BYTES = 1 << 20


class OtherMachineError(StoreError):
    """Another machine, with a control state of its own, works over this store."""


def claim_store(store: Mirror, home: Path) -> None:
    """Note in a store that this machine works over it; refuse where another one does.

    Raises OtherMachineError, StoreError.
    """
    owner, claim = _read_claim(store)
    if claim is None:
        store.prove()
        try:
            store.put(NAME, _of_this_machine(home), over=None)
        except TakenError:  # Another machine claimed it at the same moment.
            owner, _ = _read_claim(store)
        else:
            return
    machine = this_machine()
    if any(owner.get(name) != value for name, value in machine.items()):
        host = owner.get("host")
        raise OtherMachineError(
            f"{store} is worked over by {host} (its home is {owner.get('home', 'unknown')}, machine id"
            f" {owner.get('machine_id') or 'unknown'}) since {owner.get('since', 'an unknown time')}. This"
            f" machine is {machine['host']} (machine id {machine['machine_id'] or 'unknown'}). Nothing was"
            f" changed. One machine at a time may work over a store without Postgres. {SEVERAL_MACHINES} If"
            f" {host} is gone for good, or was installed anew or renamed:"
            f" {command('devices', '--forget-node', host)},"
            " and start again."
        )


def forget_machine(store: Mirror, host: str, home: Path) -> bool:
    """Claim the store of a machine that is gone for good. False where ``host`` does not hold the claim.

    Raises TakenError where another machine does so at the same moment, StoreError.
    """
    owner, claim = _read_claim(store)
    if claim is None or owner.get("host") != host:
        return False
    store.put(NAME, _of_this_machine(home), over=claim)
    return True


def _of_this_machine(home: Path) -> bytes:
    since = datetime.now(UTC).isoformat(" ", "minutes")  # for people alone
    return sealed({**this_machine(), "home": str(home), "since": since}, format_=FORMAT)


def _read_claim(store: Mirror) -> tuple[Mapping[str, Any], StoredObject | None]:
    claim = store.head(NAME)
    if claim is None:
        return {}, None
    try:
        return unsealed(store.get(NAME, most=_MOST_BYTES), NAME, format_=FORMAT), claim
    except (BrokenSealError, ObjectDamagedError):
        return _UNREADABLE, claim
