"""What the commands share: options, settings, questions, and text that can never steer the terminal.

An id may hold ``ESC ]0;…``, which renames the window, or U+202E, which turns the rest of the line around. So
every text is escaped before it is styled. Commands write with ``say`` (never ``typer.echo``) and with
``TerminalConsole``. What is said of progress (``services/progress.py``) is shown here.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from vlm_assets.config.component_settings import settings_of_home
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.progress import listen_to_progress, stop_listening
from vlm_durable.commands import HOME, given_command

_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_LINE_ENDS = "\u2028\u2029"
_CONTROLS = (chr(code) for code in range(0xA0) if unicodedata.category(chr(code)) == "Cc")
_ESCAPED = {
    ord(character): character.encode("unicode_escape").decode()
    for character in (*_CONTROLS, *_BIDI, *_LINE_ENDS)
}
_DELETE_AND_C1 = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
"""As JSON escapes them, which knows no ``\\x7f``. The controls below are escaped in any JSON."""
_ESCAPED_IN_LINES = {code: shown for code, shown in _ESCAPED.items() if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """The text with control and bidirectional characters escaped (``\\x1b``); ends of lines and tabs stay."""
    return text.translate(_ESCAPED_IN_LINES)


def visible_line(text: str) -> str:
    """The same in one line: an id with an end of line in it cannot pose as a line of ours."""
    return text.translate(_ESCAPED)


_FIRST_SECONDS = 1.0
"""What is done sooner is not worth a line that flickers."""

_FIRST_LINE_SECONDS, _LINE_SECONDS = 5.0, 30.0
"""When output goes to a file: the time until the first line, and from each line to the next."""


class _Activity:
    """What a command does at this moment, and how far it is, on stderr, until ``end``.

    On a terminal: one moving line that goes when it is over. Else: a plain line now and then.
    """

    def __init__(self, text: str, done: int, total: int) -> None:
        self.now(text, done, total)
        self.console = TerminalConsole(stderr=True, soft_wrap=True)
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="activity", daemon=True)
        self._thread.start()

    def now(self, text: str, done: int, total: int) -> None:
        """Say another activity, or how far it is."""
        self._text, self._done, self._total = visible_line(text), done, total

    def end(self) -> None:
        """Take the line away."""
        self._over.set()
        self._thread.join()

    def _line(self) -> str:
        far = f": {self._done:,} of {self._total:,}" if self._total else ""
        passed = timedelta(seconds=int(time.monotonic() - self._began))
        return f"{self._text}{far} ({passed})"

    def _show(self) -> None:
        if self.console.is_terminal:
            if not self._over.wait(_FIRST_SECONDS):
                with self.console.status(escape(self._line()), refresh_per_second=4) as line:
                    while not self._over.wait(0.25):
                        line.update(escape(self._line()))
            return
        wait = _FIRST_LINE_SECONDS
        while not self._over.wait(wait):
            self.console.print(self._line(), markup=False, highlight=False)
            wait = _LINE_SECONDS


_activities: list[_Activity | None] = []
"""The activities of the command that runs: None in it where nothing is shown; empty where no command runs."""


def show_activity(context: typer.Context) -> None:
    """Show what this command says of its progress, until it ends."""
    _activities[:] = [None]
    listen_to_progress(_show_progress)
    context.call_on_close(_show_no_activity)


def _show_progress(text: str, done: int, total: int) -> None:
    """Show an activity until anything else is written; not with ``--json``, or outside of a command."""
    if _activities:
        if (activity := _activities[0]) is not None:
            activity.now(text, done, total)
        else:
            _activities[0] = _Activity(text, done, total)


def doing_nothing() -> None:
    """Take the line away: a process that was started from here shows its own."""
    if _activities and _activities[0] is not None:
        _activities[0].end()
        _activities[0] = None


def _show_no_activity() -> None:
    doing_nothing()
    _activities.clear()
    stop_listening()


def _say_json_alone(value: bool) -> bool:
    if value:
        _show_no_activity()
    return value


def say(text: object = "", *, err: bool = False, **style: Any) -> None:
    """Write a text to the terminal, escaped. style: as for ``typer.secho`` (fg, bold)."""
    doing_nothing()
    typer.secho(visible(str(text)), err=err, **style)  # noqa: TID251 - here is where it is escaped


def say_json(text: str) -> None:
    """Write JSON, or another text for programs, as it is but for what a terminal would obey."""
    doing_nothing()
    typer.secho(visible(text.translate(_DELETE_AND_C1)))  # noqa: TID251 - here is where it is escaped


class TerminalConsole(Console):
    """A rich console that shows control and bidirectional characters escaped, whatever is printed."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, below what was done until now."""
        if not (_activities and _activities[0] is not None and _activities[0].console is self):
            doing_nothing()
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as it is laid out: escaped before its width is measured."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces of anything printed. Only rich's own control segments steer the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class VisibleFormatter(logging.Formatter):
    """Log records for the terminal, escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text."""
        return visible(super().format(record))


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
"""Each module of a command adds itself when it is imported."""

Home = Annotated[Path | None, typer.Option(help=f"Folder of all output; default {PREFIX}HOME, else data/.")]
AsJson = Annotated[bool, typer.Option("--json", callback=_say_json_alone, help="Write JSON, for programs.")]
Deep = Annotated[bool, typer.Option("--deep", help="Read every byte of every file, copy and journal.")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port of the pages, on loopback; 0: any that is free.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]

SHOWN = 20
"""Lines of a list for people; the rest is counted."""


def choose_home(home: Path | None) -> None:
    """Mean this home from here on, if one is given. Reads nothing."""
    if home is not None:
        os.environ[HOME] = str(home.absolute())


def chosen_settings(home: Path | None = None) -> Settings:
    """The settings, for this home where one is given.

    What is started from here, and every command that is suggested, has the same home, whether it was named
    here, in the environment or in ``.env``.
    """
    choose_home(home)
    settings = settings_of_home()
    if "home" in settings.model_fields_set:
        os.environ[HOME] = str(settings.home)
    return settings


def say_as_json(value: object) -> None:
    """Write a value as JSON; what JSON does not know (paths, times) as its text."""
    say_json(json.dumps(value, indent=2, default=str))


def say_all(sentences: Iterable[str]) -> None:
    """Write each of these sentences."""
    for sentence in sentences:
        say(sentence)


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
        say(f"Nothing was changed. To do it: {given_command('--yes')}.")
        return False
    return answered_yes(question)


def answered_yes(question: str) -> bool:
    """Ask a person. Without a terminal the answer is no."""
    if not sys.stdin.isatty():
        return False
    doing_nothing()
    return typer.confirm(question)
