"""Foreign text in the markdown of Dagster's pages, escaped so that none of it is markup.

Ids, answers, file names and texts of a schema come from strangers. A page that rendered them would fetch an
image from any address and show any link. The forms of this program's pages, such as tables, are in
``vlm_assets/assets/markdown.py``.
"""

from __future__ import annotations

import re
import unicodedata


class Markdown(str):
    """Markdown in which every foreign text is escaped. A text that is composed of it is a ``str`` again."""

    __slots__ = ()


_LONGEST_TEXT = 600
_LONGEST_SENTENCE = 2_000
_MARKUP = r"\`*_{}[]<>!|~&"
_BLOCKS = re.compile(r"^(\s*\d*)([.)](?=\s|$)|(?<!\d)[-+#=])")
"""The beginning of a list, a heading, a rule or a number at the start of a line."""
_LINKED = re.compile(r"(?i)https?:(?=//)|ftp:(?=//)|www(?=\.)|@(?=\w)")
"""The beginning of an address: the page would make a link of it, even where it is escaped."""
_LONG_WORD = re.compile(r"\S{48}(?=\S)")
_SPACES = re.compile(r"[\r\n\t]+")
_CODE_SPAN = re.compile(r"`([^`]*)`")
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])|`[^`]*`")
"""A backslash with what it escapes, or a code span, in which a backslash is one."""


def escape(text: str, *, longest: int | None = _LONGEST_TEXT) -> Markdown:
    """Any text as plain markdown on one line: no markup, nothing invisible, no word wider than the page."""
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]} …"
    return _line_start(_escape_inline(text))


def sentence(text: str) -> Markdown:
    """A sentence of this program that may quote strangers. Only text between two backticks stays code.

    Text that is escaped already is returned as it is.
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


def plain(markdown: str) -> str:
    """The plain text of what ``escape`` or ``sentence`` made, for a terminal or a mail."""
    text = _ESCAPED.sub(lambda match: match[1] or match[0], markdown)
    return text.replace("\N{ZERO WIDTH SPACE}", "")


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
