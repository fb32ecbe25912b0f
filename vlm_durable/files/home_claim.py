"""The claim of the one machine that works in a home on a network file system, where locks may not hold."""

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
"""Advice for a machine that is refused because another one has the claim."""


def this_machine() -> dict[str, str]:
    """The identity of this machine: its host name, and its machine id where it has one."""
    return {"host": socket.gethostname(), "machine_id": _machine_id()}


def claim_home(home: Home) -> None:
    """Claim a home on a network file system for this machine; refuse a home that another machine claimed.

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
