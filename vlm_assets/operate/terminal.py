"""Text for the terminal: what a file, an id or a model's answer says can never steer it.

An id may hold ``ESC ]0;…``, which renames the window, or U+202E, which turns the rest of the line around. So
every text is escaped before it is styled. Commands write with ``say`` (never ``typer.echo``) and with
``TerminalConsole``.
"""

from __future__ import annotations

import logging
import re
import shlex
import unicodedata
from pathlib import Path
from typing import Any

import typer

_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_LINE_ENDS = "\u2028\u2029"
_CONTROLS = (chr(code) for code in range(0xA0) if unicodedata.category(chr(code)) == "Cc")
_ESCAPED = {ord(one): one.encode("unicode_escape").decode() for one in (*_CONTROLS, *_BIDI, *_LINE_ENDS)}
_ESCAPED_IN_LINES = {code: shown for code, shown in _ESCAPED.items() if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """The text with control and bidirectional characters escaped (``\\x1b``); ends of lines and tabs stay."""
    return text.translate(_ESCAPED_IN_LINES)


def visible_line(text: str) -> str:
    """The same in one line: an id with an end of line in it cannot pose as a line of ours."""
    return text.translate(_ESCAPED)


_COMMAND = re.compile(r"\bvlm-assets (?:alerts (?:test|close|deliver)|(?!settings\b)[a-z]+)\b(?! --home)")
_home_option: list[str] = []
"""The ``--home`` that this command was given, quoted for a shell; empty without one."""


def show_home_in_commands(home: Path | None) -> None:
    """Have every `vlm-assets` command that is shown from now on carry ``--home``; None: no more."""
    _home_option[:] = [] if home is None else [shlex.quote(str(home))]


def with_home(text: str) -> str:
    """The text; the commands in it name the home that this command was given."""
    return _COMMAND.sub(lambda found: f"{found[0]} --home {_home_option[0]}", text) if _home_option else text


def say(text: object = "", *, err: bool = False, **style: Any) -> None:
    """Write a text to the terminal, escaped. style: as for ``typer.secho`` (fg, bold)."""
    typer.secho(visible(with_home(str(text))), err=err, **style)  # noqa: TID251 - here is where it is escaped


def say_json(text: str) -> None:
    """Write JSON as it is; what a terminal would obey is escaped in it already."""
    typer.secho(visible(text))  # noqa: TID251 - here is where it is escaped


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why, and what to do. Nothing was changed."""


class VisibleFormatter(logging.Formatter):
    """Log records for the terminal, escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text."""
        return visible(super().format(record))


def duration(seconds: float) -> str:
    """Seconds in words, in the largest unit of which there is at least one."""
    for unit, of in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= of:
            return f"{seconds / of:.1f} {unit}"
    return f"{seconds:.0f} seconds"
