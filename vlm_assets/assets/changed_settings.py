"""Which settings changed since rows were made, in words. A digest alone says only that something changed.

A published record keeps the settings beside their digests. Older records have the digests alone: then only
the name of the part that differs can be shown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = {"decoding": "processor and decoding options"}

_ONE_OF = "one of "
_MOST_OF_VALUES = 4_000
"""Characters of a field's values that are kept on record: beyond, only how many they are."""
_SHOWN = 60
"""Characters shown of a value, and of a prompt around its first difference."""


def field_kinds(schema: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Each field of an answer by its name, with its kind and a digest of its whole schema."""
    kinds: dict[str, str] = {}
    for name, field in schema.get("properties", {}).items():
        digest = hashlib.sha256(json.dumps(field, sort_keys=True).encode()).hexdigest()[:8]
        kinds[f"{above}{name}"] = f"{_kind(field)} {digest}"
        for inner in (field, field.get("items", {}), *field.get("anyOf", ())):
            kinds |= field_kinds(inner, f"{above}{name}.")
    return kinds


def _kind(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        values = json.dumps(field["enum"], ensure_ascii=False)
        return (
            f"{_ONE_OF}{values}" if len(values) <= _MOST_OF_VALUES else f"one of {len(field['enum'])} values"
        )
    if "anyOf" in field:
        return " or ".join(_kind(choice) for choice in field["anyOf"])
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return {"string": "text", "integer": "whole number"}.get(str(field.get("type")), str(field.get("type")))


def _values(kind: str) -> list[Any] | None:
    """The values of a field that is one of some; None of another kind, or where they are not on record."""
    if not kind.startswith(f"{_ONE_OF}["):
        return None
    values: list[Any] = json.loads(kind.removeprefix(_ONE_OF))
    return values


def changed_in_words(
    part: str,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    digests: tuple[str, str],
    *,
    schema_too: bool,
) -> str | None:
    """How one part of the fingerprint changed; None where another part says it.

    before, now: all settings as people read them. digests: of this part, before and now. schema_too: whether
    the schema changed as well; a prompt that is made from it then changed with it.
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
    added, removed = (
        [field for field in new if field not in old],
        [field for field in old if field not in new],
    )
    renamed = []
    for before in removed.copy():
        # The same question under another name. Of two that are alike, nobody knows which became which.
        alike = [field for field in added if _digest(new[field]) == _digest(old[before])]
        if len(alike) == 1 and sum(_digest(old[field]) == _digest(old[before]) for field in removed) == 1:
            renamed.append(f"{before} renamed to {alike[0]}")
            removed.remove(before)
            added.remove(alike[0])
    changed = [
        f"{field}{_how(*(kinds[field].rpartition(' ')[0] for kinds in (old, new)))}"
        for field in old
        if field in new
        and _digest(old[field]) != _digest(new[field])
        and not _is_above_change(field, old, new)
    ]
    parts = ((" added", added), (" removed", removed), ("", renamed), (" changed", changed))
    return "; ".join(f"{', '.join(fields)}{change}" for change, fields in parts if fields)


def _digest(kind: str) -> str:
    return kind.rpartition(" ")[2]


def _how(before: str, after: str) -> str:
    """How a field changed, in brackets; nothing where only its text did."""
    values, values_now = _values(before), _values(after)
    if values is not None and values_now is not None:
        more = ", ".join(json.dumps(value, ensure_ascii=False) for value in values_now if value not in values)
        fewer = ", ".join(
            json.dumps(value, ensure_ascii=False) for value in values if value not in values_now
        )
        parts = (("values added", more), ("values removed", fewer))
        changes = "; ".join(f"{part}: {_cut(listed)}" for part, listed in parts if listed)
        return f" ({changes})" if changes else ""
    if before == after:
        return ""
    return f" ({' -> '.join('one of some values' if _values(kind) else kind for kind in (before, after))})"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_above_change(field: str, old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Whether a field differs in the fields below it, which say so themselves."""
    below = [name for name in {*old, *new} if name.startswith(f"{field}.")]
    return any(old.get(name) != new.get(name) for name in below)


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
            shown = (json.dumps(text, ensure_ascii=False)[:_SHOWN] for text in (before, now))
            yield f"{above}{key}: {' -> '.join('unset' if text == 'null' else text for text in shown)}"
