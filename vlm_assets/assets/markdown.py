"""Markdown of Dagster's pages. Every text reaches them through here, and none of it is markup.

Ids, answers, file names and texts of a schema come from strangers. A page that renders them would fetch an
image from any address and show any link. What lives here: escaping, and the few forms that our pages have.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterable, Sequence

import dagster as dg


class Markdown(str):
    """Markdown in which every foreign text is escaped. What is put together from it is a ``str`` again."""

    __slots__ = ()


_LONGEST_TEXT = 600
_LONGEST_SENTENCE = 2_000
_MARKUP = r"\`*_{}[]<>!|~&"
_BLOCKS = re.compile(r"^(\s*\d*)([.)](?=\s|$)|(?<!\d)[-+#=])")
"""What begins a list, a heading, a rule or a number at the start of a line."""
_LINKED = re.compile(r"(?i)https?:(?=//)|ftp:(?=//)|www(?=\.)|@(?=\w)")
"""What begins an address: the page would make a link of it, after its escapes are gone."""
_LONG_WORD = re.compile(r"\S{48}(?=\S)")
_SPACES = re.compile(r"[\r\n\t]+")
_CODE_SPAN = re.compile(r"`([^`]*)`")


def escape(text: str, *, longest: int | None = _LONGEST_TEXT) -> Markdown:
    """Any text as plain markdown on one line: no markup, nothing invisible, no word wider than the page."""
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]} …"
    return _line_start(_escape_inline(text))


def sentence(text: str) -> Markdown:
    """A sentence of ours that may quote strangers. Only what stands between two backticks stays code.

    Text that is escaped already stays as it is.
    """
    if isinstance(text, Markdown):
        return text
    text = text if len(text) <= _LONGEST_SENTENCE else f"{text[:_LONGEST_SENTENCE]} …"
    parts: list[str] = []
    end = 0
    for span in _CODE_SPAN.finditer(text):
        code = "".join(_visible(letter) for letter in _SPACES.sub(" ", span[1]))
        # A bar would end the cell of a table; two backticks in a row would begin another kind of span.
        is_code = code.strip() != "" and "|" not in code and (span.start() > end or not parts)
        parts.append(_escape_inline(text[end : span.start()]))
        parts.append(f"`{code}`" if is_code else _escape_inline(span[0]))
        end = span.end()
    parts.append(_escape_inline(text[end:]))
    return _line_start("".join(parts))


def bullets(sentences: Iterable[str]) -> Markdown:
    """A list of sentences."""
    return Markdown("\n".join(f"- {sentence(text)}" for text in sentences))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False) -> Markdown:
    """A table of texts and numbers. numbers: every column but the first is set to the right."""
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
    """The value for a page of Dagster's. The only place that makes one."""
    return dg.MetadataValue.md(text)  # noqa: TID251


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape_inline(text: str) -> str:
    text = _SPACES.sub(" ", text)
    text = _LONG_WORD.sub(lambda word: f"{word[0]}\N{ZERO WIDTH SPACE}", text)
    text = _LINKED.sub(lambda begin: f"{begin[0]}\N{ZERO WIDTH SPACE}", text)
    return "".join(f"\\{letter}" if letter in _MARKUP else _visible(letter) for letter in text)


def _line_start(escaped: str) -> Markdown:
    return Markdown(_BLOCKS.sub(r"\1\\\2", escaped, count=1))


def _visible(letter: str) -> str:
    if letter != "\N{ZERO WIDTH SPACE}" and unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp"):
        return f"\\\\u{ord(letter):04x}"
    return letter
