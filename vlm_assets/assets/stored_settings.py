"""Settings, schema, models and code must be the same on all machines that share a store.

The first run puts their digests into the store. A machine that differs from them is refused.
"""

from __future__ import annotations

import ast
import hashlib
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from vlm_assets.assets.fingerprint import OF_THE_PARTITION, Meanings, digest_of
from vlm_assets.config.settings import CHECKOUT, Settings
from vlm_catalog.ranges import DESCRIPTIONS, EMBEDDINGS
from vlm_durable.commands import command
from vlm_durable.files.sealed_json import BrokenSealError, sealed, unsealed
from vlm_durable.mirror.bucket import ObjectDeniedError, StoreAwayError, StoreError, TakenError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.mirror.store_claim import claim_store

FORMAT = 1

_MOST_BYTES = 1 << 20
_PACKAGES = frozenset({"vlm_durable", "vlm_engine", "vlm_catalog", "resources", "sensors", "vlm_assets"})


class MachineDiffersError(StoreError):
    """This machine would make other rows than those that the store's machines make."""


def refuse_other_settings(store: Mirror, asset: str, parts: Mapping[str, str], home: Path) -> None:
    """Raise MachineDiffersError where this machine's parts or code differ from the store's.

    The first machine puts its own there. parts: of a fingerprint of the asset. Raises StoreError too.
    """
    if not store.keeps_copies:
        return
    own_parts = {name: part for name, part in parts.items() if name not in OF_THE_PARTITION}
    own_parts["code"] = code_digest(asset)
    name, content = _name(asset), {"of": f"{socket.gethostname()}:{home}", "parts": own_parts}
    if store.head(name) is None:
        store.prove()
        try:
            store.put(name, sealed(content, format_=FORMAT), over=None)
        except TakenError:
            pass  # Another machine was first: compare with its content below.
        else:
            return
    try:
        stored = unsealed(store.get(name, most=_MOST_BYTES), name, format_=FORMAT)
        store_parts: dict[str, str] = stored["parts"]
    except (BrokenSealError, KeyError) as error:
        raise MachineDiffersError(
            f"{store.address(name)} cannot be read ({error}), so it is not known what the machines must have"
            f" alike. Nothing was computed. On a machine that is right, remove"
            f" it: {command('repair', '--accept-settings')}."
        ) from error
    differing = [
        f"{part} ({store_parts.get(part, 'none')[:12]} there, {own_parts.get(part, 'none')[:12]} here)"
        for part in sorted(own_parts.keys() | store_parts.keys())
        if own_parts.get(part) != store_parts.get(part)
    ]
    if differing:
        raise MachineDiffersError(
            f"This machine differs from {stored.get('of')}, which began {asset} in {store}, in"
            f" {', '.join(differing)}, so nothing was computed here: give both the same settings, models and"
            f" version of this program, or, if this one is right, change the others, and run here"
            f" {command('repair', '--accept-settings')}."
        )


def refuse_at_start(settings: Settings, say: Callable[[str], None]) -> None:
    """Refuse at the start what each run of this machine would refuse.

    Raises UnfitStoreError where the store ignores conditional writes, MachineDiffersError where this machine
    would make other rows, OtherMachineError where both this machine and another one of the store have a
    control state of their own. It writes a probe into the store, which it removes, and the claim of a machine
    that works alone. say: called with a sentence where the store or a model is away, so that this is unknown.
    """
    store = settings.mirror
    if not store.keeps_copies:
        return
    meanings = Meanings.from_settings(settings)
    try:
        store.prove()
        for asset in (folders.name for folders in settings.partitioned_assets):
            meaning = meanings.of_asset(asset)
            if meaning.parts and store.head(_name(asset)) is not None:
                refuse_other_settings(store, asset, meaning.parts, settings.home)
            if meaning.trouble:
                say(f"Whether {asset} is made here as elsewhere is asked by each run: {meaning.trouble}")
        if settings.state_url is None:
            claim_store(store, settings.home)
    except (StoreAwayError, ObjectDeniedError) as error:
        say(
            "The store could not be asked whether it is fit and whether this machine is like the others; each"
            f" run asks it: {error}"
        )


def accept_settings(store: Mirror, assets: Iterable[str]) -> None:
    """Let the next run, on any machine, put its own digests into the store. Raises StoreError."""
    for asset in assets:
        store.delete(_name(asset))


def code_digest(asset: str, checkout: Path = CHECKOUT) -> str:
    """A digest of the source files that make the asset's rows."""
    sources = sources_of_rows(asset, checkout)
    return digest_of({name: hashlib.sha256((checkout / name).read_bytes()).hexdigest() for name in sources})


def sources_of_rows(asset: str, checkout: Path = CHECKOUT) -> list[str]:
    """The files of this program that a materialization of the asset may run, relative to the checkout.

    They are the asset's module, one for all question sets, and all that it imports, directly or not, inside
    functions too. Sensors and commands are not among them: code that makes a row imports neither.
    """
    sources: set[str] = set()
    to_read = [f"vlm_assets.assets.{EMBEDDINGS if asset == EMBEDDINGS else DESCRIPTIONS}"]
    while to_read:
        name = to_read.pop().replace(".", "/")
        for source in (f"{name}.py", f"{name}/__init__.py"):
            if source not in sources and (checkout / source).is_file():
                sources.add(source)
                to_read += _imports((checkout / source).read_bytes())
    return sorted(sources)


@cache
def _imports(source: bytes) -> tuple[str, ...]:
    """The modules of this program that a file imports, and the packages that they are in.

    Cached: both assets import much of the same, and to parse all of it takes 0.3 s of a core.
    """
    modules: list[str] = []
    for node in _statements(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # What is taken out of a package by name may be a module too.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] in _PACKAGES:
                parts = name.split(".")
                modules += (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return tuple(modules)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in a node, without a look into expressions, which import nothing."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, name, ()):
            yield statement
            yield from _statements(statement)


def _name(asset: str) -> str:
    return f".state/settings/{asset}.json"
