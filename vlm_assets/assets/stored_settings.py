"""What all machines over one store must have alike: settings, schema, models and this program's code.

What lives here: the digests of these, as the first run puts them into the store, and the refusal of a machine
that differs. What does not: the catalogue, which every machine takes from the store itself.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from resources.storage.sealed_json import BrokenSealError, refuse_newer_format, sealed, unseal
from resources.store.bucket import ObjectDeniedError, S3Folder, StoreAwayError, StoreError, TakenError
from resources.store.store_claim import claim_store
from vlm_assets.assets.fingerprint import CATALOGUE_SLICE, TEXTS, Meanings, digest_of
from vlm_assets.config.settings import CHECKOUT, Settings

FORMAT = 1

ACCEPT_COMMAND = "vlm-assets repair --accept-settings"

_OF_THE_PARTITION = frozenset({CATALOGUE_SLICE, TEXTS})
_MOST_BYTES = 1 << 20


class MachineDiffersError(StoreError):
    """This machine would make other rows than those that the store's machines make."""


def refuse_other_settings(store: S3Folder, asset: str, parts: Mapping[str, str], home: Path) -> None:
    """Return where this machine's parts and code are those of the store; the first one puts its own there.

    parts: of a fingerprint of the asset. Raises MachineDiffersError, StoreError.
    """
    ours = {name: part for name, part in parts.items() if name not in _OF_THE_PARTITION}
    ours["code"] = code_digest()
    name, said = _name(asset), {"of": f"{socket.gethostname()}:{home}", "parts": ours}
    if store.head(name) is None:
        store.prove()
        try:
            store.put(name, sealed(said, format_=FORMAT), over=None)
        except TakenError:
            pass  # Another machine was first: it is compared with that one's.
        else:
            return
    try:
        found = unseal(store.get(name, most=_MOST_BYTES))
        refuse_newer_format(found.get("format"), FORMAT, Path(name))
        theirs: dict[str, str] = found["parts"]
    except (BrokenSealError, KeyError) as error:
        raise MachineDiffersError(
            f"{store.address(name)} cannot be read ({error}), so it is not known what the machines must have"
            f" alike. Nothing was computed. Remove it: `{ACCEPT_COMMAND}` on a machine that is right."
        ) from error
    differing = [
        f"{part} ({theirs.get(part, 'none')[:12]} there, {ours.get(part, 'none')[:12]} here)"
        for part in sorted(ours.keys() | theirs.keys())
        if ours.get(part) != theirs.get(part)
    ]
    if differing:
        raise MachineDiffersError(
            f"This machine differs from {found.get('of')}, which began {asset} in {store}, in"
            f" {', '.join(differing)}, so nothing was computed here: give both the same settings, models and"
            f" version of this program, or, if this one is right, run `{ACCEPT_COMMAND}` here and change the"
            " others."
        )


def refuse_at_start(settings: Settings, say: Callable[[str], None]) -> None:
    """Raise before anything is given to a machine that would refuse each of its runs.

    UnfitStoreError: the store does not honour what the order of writers depends on. MachineDiffersError:
    this machine would make other rows. OtherMachineError: it has a control state of its own, and so has
    another one that works over this store. Put are a probe, which is removed, and the claim of a machine that
    works alone. say: told where it cannot be known yet: the store is away, or a model is.
    """
    if (store := settings.store) is None:
        return
    meanings = Meanings.of(settings)
    try:
        store.prove()
        for asset in ("property_descriptions", "property_embeddings"):
            meaning = meanings.of_asset(asset)
            if meaning.now and store.head(_name(asset)) is not None:
                refuse_other_settings(store, asset, meaning.now, settings.home)
            if meaning.trouble:
                say(f"Whether {asset} is made here as elsewhere is asked by each run: {meaning.trouble}")
        if settings.state_url is None:
            claim_store(store, settings.home)
    except (StoreAwayError, ObjectDeniedError) as error:
        say(
            "The store could not be asked whether it is fit and whether this machine is like the others; each"
            f" run asks it: {error}"
        )


def accept_settings(store: S3Folder, assets: tuple[str, ...]) -> None:
    """Let the next run, on whichever machine, say anew what all must have. Raises StoreError."""
    for asset in assets:
        store.delete(_name(asset))


def code_digest() -> str:
    """A digest of the source files that make rows."""
    found = {}
    for package in ("resources", "vlm_assets"):
        for path in sorted((CHECKOUT / package).rglob("*.py")):
            found[str(path.relative_to(CHECKOUT))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digest_of(found)


def _name(asset: str) -> str:
    return f".state/settings/{asset}.json"
