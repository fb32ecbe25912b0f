"""Which settings changed since rows were made, in words: what a digest that differs does not say.

A published record keeps the settings beside their digests. Records of before that have the digests alone:
then only the name of what differs is known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = {"decoding": "processor and decoding options"}

_SHOWN = 60
"""Characters shown of a value, and of a prompt around its first difference."""


def field_kinds(schema: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Each field of an answer by its name, with its kind and a digest of all that is said of it."""
    kinds: dict[str, str] = {}
    for name, said in schema.get("properties", {}).items():
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]
        kinds[f"{above}{name}"] = f"{_kind(said)} {digest}"
        for inner in (said, said.get("items", {}), *said.get("anyOf", ())):
            kinds |= field_kinds(inner, f"{above}{name}.")
    return kinds


def _kind(said: Mapping[str, Any]) -> str:
    if "enum" in said:
        return f"one of {len(said['enum'])} values"
    if "anyOf" in said:
        return " or ".join(_kind(one) for one in said["anyOf"])
    if said.get("type") == "array":
        return f"list of {_kind(said.get('items', {}))}"
    return {"string": "text", "integer": "whole number"}.get(str(said.get("type")), str(said.get("type")))


def changed_in_words(
    part: str,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    digests: tuple[str, str],
    *,
    schema_too: bool,
) -> str | None:
    """How one part of the fingerprint changed; None where another part says it.

    before, now: all settings as people read them. digests: of this part, before and now. schema_too: the
    schema changed as well, and what is made from it with it.
    """
    name = _NAMES.get(part, part.replace("_", " "))
    if part not in before or part not in now:
        return f"{name}: from what to what is not on record"
    old, new = before[part], now[part]
    if part == "schema":
        return f"{name}: {_fields(old, new) or 'its description, or the order of its fields'}"
    if part == "prompt":
        made = old["made_from_schema"] and new["made_from_schema"]
        return None if made and schema_too else f"{name}: {_texts(old['text'], new['text'])}"
    if part == "decoding":
        return f"{name}: {'; '.join(_options(old, new)) or 'another way to decode'}"
    if old == new:
        old, new = (f"{old} {digest.removeprefix('sha256:')[:12]}" for digest in digests)
    return f"{name}: {old} -> {new}"


def _fields(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    added, removed = (", ".join(one for one in a if one not in b) for a, b in ((new, old), (old, new)))
    changed = []
    for one in old:
        if one in new and old[one] != new[one] and not _is_above_change(one, old, new):
            before, after = (kinds[one].rpartition(" ")[0] for kinds in (old, new))
            changed.append(f"{one} ({before} -> {after})" if before != after else one)
    parts = (("added", added), ("removed", removed), ("changed", ", ".join(changed)))
    return "; ".join(f"{fields} {what}" for what, fields in parts if fields)


def _is_above_change(field: str, old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Whether a field differs in the fields below it, which say so themselves."""
    below = [one for one in {*old, *new} if one.startswith(f"{field}.")]
    return any(old.get(one) != new.get(one) for one in below)


def _texts(old: str, new: str) -> str:
    same = next((at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
    if same is None and len(old) == len(new):
        return f"another text after its first {len(old)} characters"
    start = max(0, (min(len(old), len(new)) if same is None else same) - _SHOWN // 3)
    return " -> ".join(json.dumps(text[start : start + _SHOWN], ensure_ascii=False) for text in (old, new))


def _options(old: Mapping[str, Any], new: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key in dict.fromkeys((*old, *new)):
        before, now = old.get(key), new.get(key)
        if before == now:
            continue
        if isinstance(before, Mapping) or isinstance(now, Mapping):
            yield from _options(before or {}, now or {}, f"{above}{key}.")
        else:
            shown = (json.dumps(one, ensure_ascii=False)[:_SHOWN] for one in (before, now))
            yield f"{above}{key}: {' -> '.join('unset' if one == 'null' else one for one in shown)}"
