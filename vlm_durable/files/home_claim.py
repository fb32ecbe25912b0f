"""Which machine works in a home on a network file system, where locks need not keep two machines apart."""

from __future__ import annotations

import socket
from pathlib import Path

from vlm_durable.files.file_systems import NETWORK, mount_of
from vlm_durable.files.files import make_directory, write_new
from vlm_durable.files.layout import Home, UnusableHomeError
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, sealed

_MACHINE_ID = Path("/etc/machine-id")

SEVERAL_MACHINES = (
    "For several machines set VLM_ASSETS_STATE_URL (Postgres) and VLM_ASSETS_STORE (S3), and give each a home"
    " of its own on a local disk."
)
"""What a machine is told that is refused beside another one."""


def this_machine() -> dict[str, str]:
    """What tells this machine from others: its host name, and its machine id where it has one."""
    return {"host": socket.gethostname(), "machine_id": _machine_id()}


def claim_home(home: Home) -> None:
    """Note in a home on a network file system that it is this machine's; refuse one that is another's.

    A home on a local disk needs no note: no other machine reaches it. Raises UnusableHomeError, OSError.
    """
    try:
        kind = mount_of(home.root).kind
    except OSError:
        return  # Not Linux: the system does not say.
    if kind not in NETWORK:
        return
    machine = this_machine()
    make_directory(home.root)
    try:
        write_new(home.claim, sealed(machine))
        return
    except FileExistsError:
        pass
    try:
        owner = read_sealed(home.claim)
    except BrokenSealError as error:
        owner = {"host": f"a machine that cannot be read ({error})"}
    if owner != machine:
        raise UnusableHomeError(
            f"{home.root} is on a network file system ({kind}) and belongs to {owner.get('host')}. This"
            f" machine is {machine['host']} (machine id {machine['machine_id'] or 'unknown'}). Nothing was"
            f" changed. One machine at a time may work in such a home. {SEVERAL_MACHINES} If that machine was"
            f" replaced or renamed, and nothing of it runs any more: bring its {home.state} here, remove"
            f" {home.claim}, and start again."
        )


def _machine_id() -> str:
    try:
        return _MACHINE_ID.read_text().strip()
    except OSError:
        return ""
