"""The list of withdrawn ids, which outlives the catalogue: ingest, runs and the audit ask it.

It holds no id, only HMACs with a key of the home: ids can be guessed, and a plain digest would tell which of
them were withdrawn. It lies in ``.state`` and, as a copy, with the versions of the catalogue; machines that
share a store share it. Nobody but the owner may read it. An older copy takes nothing back: of each id the
higher number of changes counts.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vlm_catalog.catalog_copies import backup_paths, only_catalog_writer
from vlm_catalog.catalog_file import DIGITS, WITHDRAWN, CatalogError, CatalogFormatError
from vlm_durable.commands import command
from vlm_durable.files.files import TEMPORARY_SUFFIX, make_directory, write_replacing
from vlm_durable.files.layout import Home
from vlm_durable.files.sealed_json import BrokenSealError, FormatVersionError, read_sealed, sealed, unsealed
from vlm_durable.mirror.bucket import TakenError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.wording import counted

FORMAT = 1

_NAME = "property_catalog/withdrawn.json"
_MOST_BYTES = 1 << 30
_ATTEMPTS = 5
_ABOUT = "Properties that were withdrawn, as HMACs. Without it and its copy an ingest brings them back."


class WithdrawnListError(CatalogError):
    """The list of withdrawn ids is gone, damaged, or of another home."""


@dataclass(frozen=True)
class WithdrawnIds:
    """The list. ``changes`` counts, by HMAC, how often an id was withdrawn or taken off: odd is withdrawn."""

    key: bytes = field(repr=False)
    changes: Mapping[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def new(cls) -> WithdrawnIds:
        """An empty list with a key of its own."""
        return cls(secrets.token_bytes(32))

    def __contains__(self, property_id: str) -> bool:
        return self.changes.get(self._digest(property_id), 0) % 2 == 1

    def was_ever(self, property_id: str) -> bool:
        """Whether it was withdrawn at any time, taken off the list since or not."""
        return self._digest(property_id) in self.changes

    def changed(self, ids: Iterable[str], *, withdrawn: bool) -> WithdrawnIds:
        """The list with these ids withdrawn, or taken off it. Ids that are so already do not change."""
        changes = dict(self.changes)
        for property_id in ids:
            digest = self._digest(property_id)
            if (changes.get(digest, 0) % 2 == 1) is not withdrawn:
                changes[digest] = count = changes.get(digest, 0) + 1
                # Its tombstone too: a tombstone that is not on the list would count as forgotten.
                changes.setdefault(self._of_tombstone(property_id, count), 1)
        return replace(self, changes=changes)

    def tombstone(self, property_id: str) -> str:
        """The id of a withdrawn property's row. Each withdrawal of one id gives another: ids are unique."""
        return f"{WITHDRAWN}-{self._of_tombstone(property_id, self.changes[self._digest(property_id)])}"

    def _of_tombstone(self, property_id: str, count: int) -> str:
        text = property_id if count < 3 else "\0".join((property_id, str(count)))  # 1 is the first withdrawal
        return self._digest(text)

    def with_tombstones(self, tombstones: Iterable[str]) -> WithdrawnIds:
        """The list with the tombstones of a catalogue added, so that it has every withdrawn property."""
        digests = [tombstone.removeprefix(f"{WITHDRAWN}-") for tombstone in tombstones]
        return replace(self, changes={**dict.fromkeys(digests, 1), **self.changes})

    def merged(self, other: WithdrawnIds) -> WithdrawnIds:
        """Both lists as one. Raises WithdrawnListError where their keys differ."""
        if self.key != other.key:
            raise WithdrawnListError("the lists of withdrawn ids are of two homes: their keys differ")
        changes = dict(self.changes)
        for digest, count in other.changes.items():
            changes[digest] = max(count, changes.get(digest, 0))
        return replace(self, changes=changes)

    def to_bytes(self) -> bytes:
        """The file: sealed JSON."""
        content = {"about": _ABOUT, "key": self.key.hex(), "changes": dict(sorted(self.changes.items()))}
        return sealed(content, format_=FORMAT)

    @classmethod
    def from_content(cls, content: Mapping[str, object]) -> WithdrawnIds:
        """Read the content of a file. Raises LookupError, TypeError, ValueError."""
        key, changes = content["key"], content["changes"]
        if not isinstance(key, str) or not isinstance(changes, dict):
            raise TypeError("it is no list of withdrawn ids")
        return cls(bytes.fromhex(key), changes)

    def _digest(self, text: str) -> str:
        return keyed_digest(self.key, text)


def keyed_digest(key: bytes, text: str) -> str:
    """The HMAC by which a file names an id."""
    return hmac.digest(key, text.encode(errors="surrogatepass"), hashlib.sha256).hex()[:DIGITS]


def list_paths(home: Path) -> tuple[Path, Path]:
    """The list and its copy."""
    return Home(home).state / "withdrawn.json", backup_paths(home)[0].parent / "withdrawn.json"


def read_withdrawn(home: Path) -> WithdrawnIds | None:
    """The list merged with its copy; None where nothing was ever withdrawn here.

    Raises WithdrawnListError where neither reads, CatalogFormatError.
    """
    return _read(home)[0]


def restore_withdrawn(home: Path) -> str | None:
    """Make the list and its copy equal; returns a sentence about what was restored, or None.

    Raises WithdrawnListError, CatalogFormatError, OSError.
    """
    withdrawn, behind = _read(home)
    if withdrawn is None or not behind:
        return None
    save_withdrawn(home, withdrawn)
    other = next((path for path in list_paths(home) if path not in behind), "each other")
    return (
        f"The list of withdrawn ids was missing, damaged or an older copy in"
        f" {' and '.join(map(str, behind))}, and was restored from {other}."
    )


def save_withdrawn(home: Path, withdrawn: WithdrawnIds) -> WithdrawnIds:
    """Merge into the list and its copy, durably; returns the merged list.

    Raises WithdrawnListError where they are another home's, CatalogFormatError, OSError.
    """
    with only_catalog_writer(home):
        before = read_withdrawn(home)
        withdrawn = withdrawn if before is None else withdrawn.merged(before)
        data = withdrawn.to_bytes()
        for path in list_paths(home):
            make_directory(path.parent)
            for leftover in path.parent.glob(f".{path.name}.*{TEMPORARY_SUFFIX}"):
                leftover.unlink()
            if not path.is_file() or path.read_bytes() != data:
                write_replacing(path, data, mode=0o600)
    return withdrawn


def share_withdrawn(home: Path, store: Mirror) -> WithdrawnIds | None:
    """Merge the lists of the home and the store into both; returns the merged list.

    Raises CatalogError, StoreError, OSError.
    """
    withdrawn = read_withdrawn(home)
    for _ in range(_ATTEMPTS):
        stored = store.head(_NAME)
        data = None if withdrawn is None else withdrawn.to_bytes()
        if stored is not None and (data is None or hashlib.sha256(data).hexdigest() != stored.sha256):
            remote = _from_store(store)
            try:
                withdrawn = save_withdrawn(home, remote if withdrawn is None else remote.merged(withdrawn))
            except WithdrawnListError as error:
                raise WithdrawnListError(
                    f"{store.address(_NAME)} is not this home's list of withdrawn ids: {error}. Nothing was"
                    " changed. Properties were withdrawn here while no store was set: move"
                    f" {' and '.join(map(str, list_paths(home)))} away, and withdraw their ids again."
                ) from error
            data = withdrawn.to_bytes()
        if data is None or (stored is not None and hashlib.sha256(data).hexdigest() == stored.sha256):
            return withdrawn
        try:
            store.put(_NAME, data, over=stored)
        except TakenError:
            continue  # Another machine was faster: its list is taken in first.
        return withdrawn
    raise WithdrawnListError(f"Other machines keep changing {store.address(_NAME)}. Do it again.")


def lost_list(home: Path, tombstones: int) -> WithdrawnListError:
    """The error where a catalogue has tombstones, and no list says of which ids."""
    first, second = list_paths(home)
    return WithdrawnListError(
        f"The list of withdrawn ids is gone: neither {first} nor {second} is there, and "
        f"{counted(tombstones, 'properties were', 'property was')} withdrawn. An ingest could bring"
        f" them back, so nothing was changed. Put one of the"
        f" two files back from a copy. If there is none: {command('withdraw', '--new-list')}, then withdraw"
        " again"
        " what your listing still names."
    )


def _from_store(store: Mirror) -> WithdrawnIds:
    data = store.get(_NAME, most=_MOST_BYTES)
    try:
        return WithdrawnIds.from_content(unsealed(data, _NAME, format_=FORMAT))
    except FormatVersionError as error:
        raise CatalogFormatError(str(error)) from None
    except (BrokenSealError, LookupError, TypeError, ValueError) as error:
        raise WithdrawnListError(
            f"{store.address(_NAME)} cannot be read: {error}. Nothing was changed. Remove it: the next"
            " ingest or run of a machine that has the list puts it back."
        ) from error


def _read(home: Path) -> tuple[WithdrawnIds | None, list[Path]]:
    """The list merged with its copy, and the files that lack some of it."""
    lists: dict[Path, WithdrawnIds] = {}
    damaged = []
    for path in list_paths(home):
        try:
            lists[path] = WithdrawnIds.from_content(read_sealed(path, format_=FORMAT))
        except FileNotFoundError:
            continue
        except FormatVersionError as error:
            raise CatalogFormatError(str(error)) from None
        except (BrokenSealError, LookupError, TypeError, ValueError, OSError) as error:
            damaged.append(f"{path} cannot be read: {error}")
    if not lists:
        if damaged:
            raise WithdrawnListError(
                f"{'; '.join(damaged)}. It is the list of withdrawn ids, without which an ingest could bring"
                " them back. Nothing was changed. Put it back from a copy. If there is none: move it away,"
                f" then {command('withdraw', '--new-list')}."
            )
        return None, []
    merged, *others = lists.values()
    try:
        for other in others:
            merged = merged.merged(other)
    except WithdrawnListError as error:
        raise WithdrawnListError(
            f"{' and '.join(map(str, lists))}: {error}. Nothing was changed. Move the one of the other home"
            " away, and do it again."
        ) from error
    return merged, [path for path in list_paths(home) if path not in lists or lists[path] != merged]
