"""Pages that can be sent to somebody: one HTML file with its images inside, which loads nothing.

Everything on a page is escaped: ids, answers and errors may hold markup.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_assets.assets.shown_confidence import BANDS, LEGEND, Band, shown_confidence
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import Catalog
from vlm_durable.files.files import make_directory, write_replacing
from vlm_durable.wording import counted
from vlm_engine.images.images import PropertyJob
from vlm_engine.images.thumbnails import make_thumbnails

_TOGETHER = 500
"""Properties whose images are made small at a time."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 0 0 .4rem; overflow-wrap: anywhere }
.card { border-top: 1px solid #8886; padding: 1rem 0 }
.images { display: flex; flex-wrap: wrap; gap: 4px; margin-bottom: .5rem }
.images img, .gone { height: 120px; border-radius: 3px } .images p { align-self: end; margin: 0 .5rem }
.gone { width: 120px; background: #8884; font-size: 12px; overflow: hidden; overflow-wrap: anywhere }
.gone { padding: 6px; box-sizing: border-box }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: 0 1rem; margin: 0 }
dt { opacity: .65 } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-line }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .25rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr + tr { border-top: 1px solid #8884 }
.card th, .card td { text-align: left; vertical-align: top }
.note { opacity: .65 }
.sure { border-left: .9em solid; margin-left: .6em; padding-left: .3em }
.sure { white-space: nowrap; font-size: .85em }
"""


@dataclass(frozen=True)
class ModelValue:
    """A value that a model gave. confidence: a number, or None where it is not known."""

    value: object
    confidence: object = None


@dataclass(frozen=True)
class Card:
    """A property: its id, a note beside it, JPEG files (None for a failed one), and named values.

    values: those that a model gave as ``ModelValue``, to be shown with their confidence.

    columns: heads of a table in which each value is a row; without them each value is a single one. uris: of
    the images, if they are to be named. image_count: how many images the property has, if not all are shown.
    """

    name: str
    note: str
    images: Sequence[bytes | None]
    values: Mapping[str, object]
    columns: Sequence[str] = ()
    uris: Sequence[str] = ()
    image_count: int = 0


def page(
    title: str,
    cards: Sequence[Card],
    *,
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[object]]]] = (),
) -> str:
    """The whole page. tables: caption, head and rows, before the cards."""
    shown = [_card(card) for card in cards]
    legend = [f"<p>{LEGEND}:{''.join(_sure(band.text, band) for band in BANDS)}</p>"]
    legend = legend if any(_SURE in card for card in shown) else []
    parts = [_table(*table) for table in tables] + legend + shown
    if not parts:
        parts = ["<p>Nothing to show.</p>"]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{_text(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def thumbnails(catalog: Catalog, images: Iterable[Sequence[str]], *, height: int) -> list[list[bytes | None]]:
    """Small JPEGs of the images of some properties, in the order of their URIs; None for an unreadable one.

    A link that leads out of the image root is never opened.
    """
    jobs = [PropertyJob(str(number), number, tuple(uris)) for number, uris in enumerate(images)]
    made: list[list[bytes | None]] = []
    for start in range(0, len(jobs), _TOGETHER):
        doing("making small images, of properties", start, len(jobs))
        batch = jobs[start : start + _TOGETHER]
        made += make_thumbnails(batch, height=height, source=catalog.images)
    return made


def write_page(path: Path, text: str) -> None:
    """Write a page in one step, in place of an earlier one. Raises OSError."""
    make_directory(path.absolute().parent)
    write_replacing(path.absolute(), text.encode("utf-8", "backslashreplace"))


def _card(card: Card) -> str:
    uris = card.uris or [""] * len(card.images)
    images = "".join(_image(file, uri) for file, uri in zip(card.images, uris, strict=True))
    if card.image_count > len(card.images):
        images += f'<p class="note">{len(card.images)} of {counted(card.image_count, "images")}</p>'
    if card.columns:
        rows = "".join(
            f"<tr><td>{_text(name)}</td>{''.join(f'<td>{_value(cell)}</td>' for cell in cells)}</tr>"
            for name, cells in card.values.items()
            if isinstance(cells, Sequence)
        )
        head = "".join(f"<th>{_text(column)}</th>" for column in ("", *card.columns))
        values = f"<table><tr>{head}</tr>{rows}</table>"
    else:
        pairs = (f"<dt>{_text(name)}</dt><dd>{_value(value)}</dd>" for name, value in card.values.items())
        values = f"<dl>{''.join(pairs)}</dl>"
    head = f'<h2>{_text(card.name)} <span class="note">{_text(card.note)}</span></h2>'
    return (
        f'<section class="card">{head if card.name else ""}'
        f'<div class="images">{images}</div>{values}</section>'
    )


def _image(file: bytes | None, uri: str) -> str:
    if file is None:
        return f'<div class="gone">{_text(uri)} cannot be shown</div>'
    data = base64.b64encode(file).decode("ascii")
    return f'<img alt="{_text(uri)}" title="{_text(uri)}" src="data:image/jpeg;base64,{data}">'


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    top = "".join(f"<th>{_text(column)}</th>" for column in head)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<h2>{_text(caption)}</h2><table><tr>{top}</tr>{body}</table>"


_SURE = '<span class="sure"'
"""Begins each confidence; in no text, for quotes are escaped."""


def _sure(text: str, band: Band) -> str:
    return f'{_SURE} style="border-color: {band.colour}">{_text(text)}</span>'


def _value(value: object) -> str:
    if isinstance(value, ModelValue):
        sure = shown_confidence(value.confidence)
        return _value(value.value) + ("" if sure is None else _sure(sure.number, sure.band))
    if isinstance(value, str) or value is None:
        return _text("none" if value is None else value)
    return _text(json.dumps(value, ensure_ascii=False, default=str))


def _text(value: object) -> str:
    return html.escape(str(value))
