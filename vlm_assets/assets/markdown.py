"""Markdown for Dagster's pages: bullets, tables, pictures. All text in it is escaped, so none is markup.

The escaping is in ``vlm_durable/markdown_text.py``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

import dagster as dg

from vlm_durable.markdown_text import Markdown, escape, sentence

__all__ = ["Markdown", "bullets", "escape", "metadata", "paragraphs", "picture", "sentence", "table"]


def bullets(sentences: Iterable[str]) -> Markdown:
    """A list of sentences."""
    return Markdown("\n".join(f"- {sentence(text)}" for text in sentences))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False) -> Markdown:
    """A table of texts and numbers. numbers: align every column but the first to the right."""
    rule = ["---", *(["--:" if numbers else "---"] * (len(head) - 1))]
    lines = [_line(sentence(name) for name in head), _line(rule)]
    lines += [_line(sentence(cell if isinstance(cell, str) else str(cell)) for cell in row) for row in rows]
    return Markdown("\n".join(lines))


def picture(image: bytes, *, alt: str, kind: str = "png") -> Markdown:
    """An image inside the text, so that the page fetches nothing. kind: ``png`` or ``jpeg``."""
    return Markdown(f"![{escape(alt)}](data:image/{kind};base64,{base64.b64encode(image).decode('ascii')})")


def paragraphs(*parts: Markdown) -> Markdown:
    """Parts with an empty line between them; empty ones are left out."""
    return Markdown("\n\n".join(part for part in parts if part))


def metadata(text: Markdown) -> dg.MarkdownMetadataValue:
    """The metadata value for a page of Dagster's. The only place that makes one."""
    return dg.MetadataValue.md(text)  # noqa: TID251


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
