"""What the commands share: options, settings, questions, and text that can never steer the terminal.

An id may hold ``ESC ]0;…``, which renames the window, or U+202E, which turns the rest of the line around. So
every text is escaped before it is styled. Commands write with ``say`` (never ``typer.echo``) and with
``TerminalConsole``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from vlm_assets.config.settings import PREFIX, Settings, load_settings

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
    """Write JSON, or another text for programs, as it is but for what a terminal would obey."""
    typer.secho(visible(text))  # noqa: TID251 - here is where it is escaped


class TerminalConsole(Console):
    """A rich console that shows control and bidirectional characters escaped, whatever is printed."""

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as it is laid out: escaped before its width is measured."""
        return super().render_str(visible(with_home(text)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces of anything printed. Only rich's own control segments steer the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why, and what to do."""


class VisibleFormatter(logging.Formatter):
    """Log records for the terminal, escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text."""
        return visible(super().format(record))


def counted(number: int, what: str) -> str:
    """A number of things as people write it: ``1 device``, ``1,350 partitions``. what: the plural."""
    return f"{number:,} {what.removesuffix('s') if number == 1 else what}"


UNITS = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))


def duration(seconds: float) -> str:
    """Seconds in words, in the largest unit of which there is at least one."""
    for unit, of in UNITS:
        if seconds >= of:
            return f"{seconds / of:.1f} {unit}"
    return f"{seconds:.0f} seconds"


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
"""Each module of a command adds itself when it is imported."""

Home = Annotated[Path | None, typer.Option(help=f"Folder of all output; default {PREFIX}HOME, else data/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]
Deep = Annotated[bool, typer.Option("--deep", help="Read every byte of every file, copy and journal.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the pages, on loopback.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]

Where = Annotated[
    str | None,
    typer.Option(metavar="SQL", help='Only properties for which this holds, such as "floors <= 2".'),
]

SHOWN = 20
"""Lines of a list for people; the rest is counted."""


def chosen_settings(home: Path | None = None) -> Settings:
    """The settings, for this home where one is given; what is started from here sees the same home."""
    if home is not None:
        os.environ[f"{PREFIX}HOME"] = str(home.absolute())
        show_home_in_commands(home)
    return load_settings()


def say_as_json(value: object) -> None:
    """Write a value as JSON; what JSON does not know (paths, times) as its text."""
    say_json(json.dumps(value, indent=2, default=str))


def say_list(sentences: Sequence[str], color: str | None = None) -> None:
    """Write the first sentences of a list, and how many more there are."""
    for sentence in sentences[:SHOWN]:
        say(sentence, fg=color)
    if len(sentences) > SHOWN:
        say(f"... and {len(sentences) - SHOWN} more", fg=color)


def agreed(question: str, yes: bool) -> bool:
    """Ask before anything is changed. Without a terminal and without ``--yes`` the answer is no."""
    if yes:
        return True
    if not sys.stdin.isatty():
        say("Nothing was changed. Repeat the command with --yes to do it.")
        return False
    return typer.confirm(question)
