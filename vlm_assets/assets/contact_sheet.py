"""The contact sheet of a partition as markdown: images of a few properties, and what the model said of them.

The images travel inside the text, and Dagster's event log keeps the text, so they are small: about 10 KB per
property. Thumbnails are made elsewhere: this module decodes no image of a person's.
"""

from __future__ import annotations

import base64
import io
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

THUMBNAIL_HEIGHT = 88
"""Pixels; a thumbnail is at most twice as wide."""

IMAGES_A_PROPERTY = 6

_GAP = 4
_PLACEHOLDER = (214, 210, 202)
_LONGEST_TEXT = 600
_LONGEST_WORD = 48
_MOST_ITEMS = 12


@dataclass(frozen=True)
class SheetRow:
    """One property on the sheet.

    thumbnails: a JPEG file for each image, ``THUMBNAIL_HEIGHT`` high; None for an image that failed.
    description: None where the property failed, and then ``error`` says why.
    """

    property_id: str
    thumbnails: Sequence[bytes | None]
    description: Mapping[str, object] | None
    error: str | None


def contact_sheet(rows: Sequence[SheetRow]) -> str:
    """Markdown of all rows; images are JPEG data URIs."""
    return "\n\n---\n\n".join(_property(row) for row in rows) or "No property to show."


def shown_id(property_id: str) -> str:
    """An id as markdown. Quotes show spaces at its ends; spaces in a row stay as many as they are."""
    text = _escaped(property_id, longest=None).replace("  ", "\N{NO-BREAK SPACE}" * 2)
    return text if property_id == property_id.strip() else f"“{text}”"


def _property(row: SheetRow) -> str:
    picture = f"![images of the property](data:image/jpeg;base64,{_strip(row.thumbnails)})"
    return f"**{shown_id(row.property_id)}**\n\n{picture}\n\n{_answer(row)}"


def _answer(row: SheetRow) -> str:
    if row.description is None:
        return f"*failed*: {_escaped(row.error or 'no reason recorded')}"
    prose, facts, nested = [], [], []
    for name, value in row.description.items():
        said = f"{_name(name)}: {_said(value)}"
        if isinstance(value, str) and " " in value:
            prose.append(_escaped(value))
        elif isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str)):
            nested.append(f"- {said}")
        else:
            facts.append(said)
    return "\n\n".join(part for part in (*prose, " · ".join(facts), "\n".join(nested)) if part)


def _name(name: object) -> str:
    return _escaped(str(name).replace("_", " "))


def _said(value: object, *, inside: bool = False) -> str:
    """A value as one line of markdown. inside: it is part of another value, so that it may need brackets."""
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _escaped(value if " " in value else value.replace("_", " "))
    if isinstance(value, Mapping):
        parts = [f"{_name(name)} {_said(part, inside=True)}" for name, part in value.items()]
        return f"({', '.join(parts)})" if inside else ", ".join(parts)
    if isinstance(value, Sequence):
        parts = [_said(part, inside=True) for part in value[:_MOST_ITEMS]]
        more = len(value) - _MOST_ITEMS
        return ", ".join([*parts, *([f"{more} more"] if more > 0 else [])])
    return _escaped(str(value))


def _escaped(text: str, *, longest: int | None = _LONGEST_TEXT) -> str:
    """Any text as plain markdown on one line: no markup, nothing invisible, no word wider than the page."""
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]} …"
    text = re.sub(r"[\r\n\t]+", " ", text)
    text = re.sub(rf"\S{{{_LONGEST_WORD}}}(?=\S)", lambda found: f"{found[0]}\N{ZERO WIDTH SPACE}", text)
    return "".join(_letter(letter) for letter in text)


def _letter(letter: str) -> str:
    if letter in r"\`*_{}[]<>()#+!|~&":
        return f"\\{letter}"
    if letter != "\N{ZERO WIDTH SPACE}" and unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp"):
        return f"\\\\u{ord(letter):04x}"
    return letter


def _strip(thumbnails: Sequence[bytes | None]) -> str:
    images = [_opened(one) for one in thumbnails[:IMAGES_A_PROPERTY]] or [_blank()]
    width = sum(image.width for image in images) + _GAP * (len(images) - 1)
    strip = Image.new("RGB", (width, THUMBNAIL_HEIGHT), "white")
    left = 0
    for image in images:
        strip.paste(image, (left, 0))
        left += image.width + _GAP
    stream = io.BytesIO()
    strip.save(stream, "JPEG", quality=72)
    return base64.b64encode(stream.getvalue()).decode("ascii")


def _opened(thumbnail: bytes | None) -> Image.Image:
    return _blank() if thumbnail is None else Image.open(io.BytesIO(thumbnail), formats=["JPEG"])


def _blank() -> Image.Image:
    """What stands for an image that failed: a crossed-out card."""
    side = THUMBNAIL_HEIGHT
    card = Image.new("RGB", (side, side), _PLACEHOLDER)
    draw = ImageDraw.Draw(card)
    near, far = side * 3 // 8, side * 5 // 8
    draw.line((near, near, far, far), fill="white", width=4)
    draw.line((near, far, far, near), fill="white", width=4)
    return card
