"""JSON that carries its own SHA-256: any changed, missing or added byte is noticed when it is read.

The file is valid JSON, ``{"sha256":"<hex>","content":<the digested bytes>}`` and a newline. The meaning of
the content lives with its writer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlm_durable.files.files import make_directory, set_aside, write_replacing

_HEAD = b'{"sha256":"'
_MIDDLE = b'","content":'
_TAIL = b"}\n"
_START = len(_HEAD) + 64 + len(_MIDDLE)


class BrokenSealError(ValueError):
    """The bytes are not those that were written."""


class FormatVersionError(ValueError):
    """A file was written by a newer version of this program. It is neither damaged nor touched."""


def refuse_newer_format(version: object, supported: int, where: Path | str) -> None:
    """Raise FormatVersionError for a format that is newer than the supported one."""
    if not isinstance(version, int) or version > supported:
        raise FormatVersionError(
            f"{where} has format {version!r} and this version reads {supported}: a newer version wrote it. "
            "Install that version, or finish the work with it. Nothing was changed."
        )


def seal(content: bytes) -> bytes:
    """Wrap JSON text (UTF-8 bytes) with its digest."""
    return b"".join((_HEAD, hashlib.sha256(content).hexdigest().encode(), _MIDDLE, content, _TAIL))


def unseal(data: bytes) -> dict[str, Any]:
    """The JSON object in sealed bytes. Raises BrokenSealError where a single bit differs."""
    check_seal(data)
    content = json.loads(data[_START : -len(_TAIL)])
    if not isinstance(content, dict):
        raise BrokenSealError("the content is not a JSON object")
    return content


def check_seal(data: bytes) -> None:
    """Compare sealed bytes with their digest, without parsing them. Raises BrokenSealError."""
    if not data:
        raise BrokenSealError("the file is empty")
    digest = hashlib.sha256(data[_START : -len(_TAIL)]).hexdigest().encode()
    if data[:_START] != _HEAD + digest + _MIDDLE or data[-len(_TAIL) :] != _TAIL:
        raise BrokenSealError("the digest does not fit the content")


def read_sealed(path: Path, *, format_: int = 1) -> dict[str, Any]:
    """Read a file of ``write_sealed``. Raises BrokenSealError, OSError, and FormatVersionError (newer)."""
    content = unsealed(path.read_bytes(), path, format_=format_)
    content.pop("format", None)
    return content


def unsealed(data: bytes, where: Path | str, *, format_: int = 1) -> dict[str, Any]:
    """The content of ``sealed`` bytes, its format with it. Raises BrokenSealError, FormatVersionError."""
    content = unseal(data)
    refuse_newer_format(content.get("format", 0), format_, where)
    return content


def set_aside_damaged(path: Path, directory: Path) -> str:
    """Move a sealed file into ``directory`` if its seal is broken, and say so; else return an empty text.

    Whoever writes such a file anew calls this first: a damaged file is never overwritten. Raises OSError.
    """
    try:
        check_seal(path.read_bytes())
    except FileNotFoundError:
        return ""
    except BrokenSealError as error:
        return f"{path} was damaged ({error}) and is kept as {set_aside(path, directory)}."
    return ""


def sealed(content: Mapping[str, object], *, format_: int = 1) -> bytes:
    """A sealed file's bytes, with its format's number; raise that when the shape of ``content`` changes."""
    assert "format" not in content, "the file's own format has that name"
    return seal(json.dumps({"format": format_, **content}, separators=(",", ":")).encode())


def write_sealed(path: Path, content: Mapping[str, object], *, format_: int = 1) -> None:
    """Replace a sealed file, its folder made if need be; durable when it returns. Raises OSError."""
    make_directory(path.parent)
    write_replacing(path, sealed(content, format_=format_))
