"""A contact sheet: a few properties of a partition, their images and what the model said, as markdown.

What lives here: picking the properties, thumbnails, the text beneath. What does not: decoding
(``resources/engine/images``). The images travel inside the text, which the event log keeps for ever, so they
are small: about 10 KB a property.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from resources.images.images import ImageError, load_image

THUMBNAIL_HEIGHT = 88
IMAGES_A_PROPERTY = 6
_GAP = 4
_PLACEHOLDER = (214, 210, 202)


@dataclass(frozen=True)
class SheetRow:
    """One property on the sheet."""

    property_id: str
    image_paths: tuple[Path, ...]
    description: Mapping[str, object] | None
    error: str | None


def contact_sheet(rows: Sequence[SheetRow]) -> str:
    """Markdown of all rows; images are JPEG data URIs."""
    return "\n\n".join(_property(row) for row in rows) or "No property to show."


def _property(row: SheetRow) -> str:
    title = f"**{_escaped(row.property_id)}**"
    picture = f"![images of the property](data:image/jpeg;base64,{_strip(row.image_paths)})"
    return f"{title}\n\n{picture}\n\n{_answer(row)}"


def _answer(row: SheetRow) -> str:
    if row.description is None:
        return f"*failed*: {_escaped(row.error or 'no reason recorded')}"
    facts = [
        f"{name.replace('_', ' ')}: {_said(value)}"
        for name, value in row.description.items()
        if not isinstance(value, str) or " " not in value
    ]
    prose = [value for value in row.description.values() if isinstance(value, str) and " " in value]
    return "\n\n".join([*(_escaped(text) for text in prose), " · ".join(_escaped(fact) for fact in facts)])


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).replace("_", " ")


def _escaped(text: str) -> str:
    # An id or an answer may hold anything; none of it may become markup in the page.
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>()#+!|~" else letter for letter in text).replace(
        "\n", " "
    )


def _strip(paths: Sequence[Path]) -> str:
    thumbnails = [_thumbnail(path) for path in paths[:IMAGES_A_PROPERTY]] or [_blank()]
    width = sum(image.width for image in thumbnails) + _GAP * (len(thumbnails) - 1)
    strip = Image.new("RGB", (width, THUMBNAIL_HEIGHT), "white")
    left = 0
    for image in thumbnails:
        strip.paste(image, (left, 0))
        left += image.width + _GAP
    stream = io.BytesIO()
    strip.save(stream, "JPEG", quality=72)
    return base64.b64encode(stream.getvalue()).decode("ascii")


def _thumbnail(path: Path) -> Image.Image:
    try:
        image = load_image(path, max_pixels=512 * 512)
    except ImageError:
        return _blank()
    # A panorama must not push the others off the page.
    width = min(2 * THUMBNAIL_HEIGHT, max(1, round(image.width * THUMBNAIL_HEIGHT / image.height)))
    return image.resize((width, THUMBNAIL_HEIGHT), Image.Resampling.LANCZOS)


def _blank() -> Image.Image:
    return Image.new("RGB", (THUMBNAIL_HEIGHT, THUMBNAIL_HEIGHT), _PLACEHOLDER)
