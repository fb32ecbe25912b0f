"""The page of a finished partition of descriptions: a contact sheet, and the quality of its rows.

The images of the sheet travel inside its markdown, and Dagster's event log keeps the text, so they are small:
about 10 KB per property. Thumbnails are made elsewhere: this module decodes no image of a person's.
"""

from __future__ import annotations

import hashlib
import heapq
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, ImageDraw

from vlm_assets.assets.markdown import Markdown, escape, paragraphs, picture, table
from vlm_assets.assets.partition import CONFIDENCE, FAILED, NOT_ASKED, OK
from vlm_assets.assets.shown_confidence import BANDS, LEGEND, shown_confidence
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.wording import counted

THUMBNAIL_HEIGHT = 88
"""Pixels; a thumbnail is at most twice as wide."""

IMAGES_A_PROPERTY = 6

_GAP = 4
_PLACEHOLDER = (214, 210, 202)
_MOST_ITEMS = 12
_SQUARE = 10

SAMPLED = 4
"""Described properties that the sheet shows."""

FAILED_SHOWN = 4
"""Failed properties that the sheet shows; more are named."""

_NAMED = 10

_OF_PROPERTY = ["property_id", "ordinal", "status", "error_kind", "error"]

_COUNTED = ["attempts", "images_seen", "images_failed"]


@dataclass(frozen=True)
class SheetRow:
    """One property on the sheet.

    thumbnails: a JPEG file for each image, ``THUMBNAIL_HEIGHT`` high; None for an image that failed. images:
    how many the property has. description: None where the property failed, and then ``error`` says why.
    confidence: of each field, where it is known.
    """

    property_id: str
    thumbnails: Sequence[bytes | None]
    description: Mapping[str, object] | None
    error: str | None
    images: int = 0
    confidence: Mapping[str, object] | None = None


def contact_sheet(rows: Sequence[SheetRow]) -> Markdown:
    """Markdown of all rows; images are JPEG data URIs."""
    sheet = Markdown("\n\n---\n\n".join(_property(row) for row in rows) or "No property to show.")
    if not any(map(shown_confidence, (sure for row in rows for sure in (row.confidence or {}).values()))):
        return sheet
    bands = ", ".join(f"{_square(band.colour)} {band.text}" for band in BANDS)
    return paragraphs(Markdown(f"*{LEGEND}: {bands}*"), sheet)


def shown_id(property_id: str) -> Markdown:
    """An id as markdown. Quotes show spaces at its ends; spaces in a row stay as many as they are."""
    text = escape(property_id, longest=None).replace("  ", "\N{NO-BREAK SPACE}" * 2)
    return Markdown(text if property_id == property_id.strip() else f"“{text}”")


def _property(row: SheetRow) -> Markdown:
    images = picture(_strip(row.thumbnails), alt="images of the property", kind="jpeg")
    shown = min(len(row.thumbnails), IMAGES_A_PROPERTY)
    more = f"*{shown} of {counted(row.images, 'images')}*" if row.images > shown else ""
    return paragraphs(Markdown(f"**{shown_id(row.property_id)}**"), images, Markdown(more), _answer(row))


def _answer(row: SheetRow) -> Markdown:
    if row.description is None:
        return Markdown(f"*failed*: {escape(row.error or 'no reason recorded')}")
    prose, facts, nested = [], [], []
    for name, value in row.description.items():
        shown = shown_confidence((row.confidence or {}).get(name))
        sure = "" if shown is None else f" {_square(shown.band.colour)} {shown.number}"
        line = f"{_name(name)}: {_value(value)}{sure}"
        if isinstance(value, str) and " " in value:
            prose.append(Markdown(escape(value) + sure))
        elif isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str)):
            nested.append(f"- {line}")
        else:
            facts.append(line)
    return paragraphs(*prose, Markdown(" · ".join(facts)), Markdown("\n".join(nested)))


@cache
def _square(colour: str) -> Markdown:
    """A small picture in one colour: markdown has no colours, and not every machine has coloured letters."""
    stream = io.BytesIO()
    Image.new("RGB", (_SQUARE, _SQUARE), colour).save(stream, "PNG")
    return picture(stream.getvalue(), alt="")


def _name(name: object) -> str:
    return escape(str(name).replace("_", " "))


def _value(value: object, *, inside: bool = False) -> str:
    """A value as one line of markdown. inside: it is part of another value, so that it may need brackets."""
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return escape(value if " " in value else value.replace("_", " "))
    if isinstance(value, Mapping):
        parts = [f"{_name(name)} {_value(part, inside=True)}" for name, part in value.items()]
        return f"({', '.join(parts)})" if inside else ", ".join(parts)
    if isinstance(value, Sequence):
        parts = [_value(part, inside=True) for part in value[:_MOST_ITEMS]]
        more = len(value) - _MOST_ITEMS
        return ", ".join([*parts, *([f"{more} more"] if more > 0 else [])])
    return escape(str(value))


def _strip(thumbnails: Sequence[bytes | None]) -> bytes:
    images = [_opened(thumbnail) for thumbnail in thumbnails[:IMAGES_A_PROPERTY]] or [_blank()]
    width = sum(image.width for image in images) + _GAP * (len(images) - 1)
    strip = Image.new("RGB", (width, THUMBNAIL_HEIGHT), "white")
    offset = 0
    for image in images:
        strip.paste(image, (offset, 0))
        offset += image.width + _GAP
    stream = io.BytesIO()
    strip.save(stream, "JPEG", quality=72)
    return stream.getvalue()


def _opened(thumbnail: bytes | None) -> Image.Image:
    return _blank() if thumbnail is None else Image.open(io.BytesIO(thumbnail), formats=["JPEG"])


def _blank() -> Image.Image:
    """The placeholder of an image that failed: a crossed-out card."""
    side = THUMBNAIL_HEIGHT
    card = Image.new("RGB", (side, side), _PLACEHOLDER)
    draw = ImageDraw.Draw(card)
    near, far = side * 3 // 8, side * 5 // 8
    draw.line((near, near, far, far), fill="white", width=4)
    draw.line((near, far, far, near), fill="white", width=4)
    return card


Row = dict[str, Any]


@dataclass
class PartitionQuality:
    """Counts of a partition's rows. sample, failed: rows to look at, as dicts of the file's columns."""

    rows: int = 0
    ok: int = 0
    not_asked: int = 0
    failed_by_kind: Counter[str] = field(default_factory=Counter)
    images_seen: int = 0
    images_failed: int = 0
    properties_with_failed_images: int = 0
    asked_again: int = 0
    sample: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    """The first failed rows, at most as many as are named."""

    def table(self) -> Markdown:
        """Markdown for a person."""
        failed = sum(self.failed_by_kind.values())
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.failed_by_kind.most_common())
        asked = self.rows - self.not_asked
        lines: list[tuple[str, str]] = [
            (
                "described",
                f"{self.ok:,} of {counted(asked, 'properties')} ({self.ok / max(1, asked):.1%})",
            ),
            ("failed", f"{failed:,} ({kinds})" if failed else "none"),
        ]
        if self.not_asked:
            lines.append(("not asked", f"{self.not_asked:,}: `where` leaves them out"))
        if failed:
            named = [shown_id(row["property_id"]) for row in self.failed[:_NAMED]]
            more = [f"{failed - len(named):,} more"] if failed > len(named) else []
            lines.append(("which", Markdown(", ".join([*named, *more]))))
        images = f"{self.images_failed:,} of {self.images_seen + self.images_failed:,}"
        properties = counted(self.properties_with_failed_images, "properties")
        lines.append(("images left out", f"{images}, in {properties}" if self.images_failed else "none"))
        if self.asked_again:
            lines.append(("asked more than once", counted(self.asked_again, "properties")))
        return table(("", ""), lines)


def read_quality(rows: PartitionRows) -> PartitionQuality:
    """Read a finished file once. The sample is random but the same each time the partition is computed."""
    quality = PartitionQuality()
    smallest: list[tuple[bytes, int]] = []
    for batch in rows.iter_batches([*_OF_PROPERTY, *_COUNTED]):
        _count(quality, batch)
        ok = batch.filter(pc.equal(batch["status"], OK)).select(["property_id", "ordinal"])
        lots = [
            (hashlib.blake2b(row["property_id"].encode(), digest_size=8).digest(), row["ordinal"])
            for row in ok.to_pylist()
        ]
        smallest = heapq.nsmallest(SAMPLED, [*smallest, *lots])
    ordinals = pa.array([ordinal for _, ordinal in smallest], pa.int64())
    columns = ["property_id", "ordinal", "error", "description", CONFIDENCE]
    for batch in rows.iter_batches(columns) if smallest else ():
        quality.sample += batch.filter(pc.is_in(batch["ordinal"], value_set=ordinals)).to_pylist()
    return quality


def _count(quality: PartitionQuality, batch: pa.RecordBatch) -> None:
    quality.rows += batch.num_rows
    failed = batch.filter(pc.equal(batch["status"], FAILED))
    quality.ok += pc.sum(pc.equal(batch["status"], OK)).as_py() or 0
    quality.not_asked += pc.sum(pc.equal(batch["status"], NOT_ASKED)).as_py() or 0
    quality.failed_by_kind.update(kind or "unknown" for kind in failed["error_kind"].to_pylist())
    quality.failed += failed.slice(0, _NAMED - len(quality.failed)).to_pylist()
    quality.images_seen += pc.sum(batch["images_seen"]).as_py() or 0
    left_out = pc.list_value_length(batch["images_failed"])
    quality.images_failed += pc.sum(left_out).as_py() or 0
    quality.properties_with_failed_images += pc.sum(pc.greater(left_out, 0)).as_py() or 0
    quality.asked_again += pc.sum(pc.greater(batch["attempts"], 1)).as_py() or 0
