"""The commands that messages suggest, all written by one function."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

HOME = "VLM_ASSETS_HOME"

_named_home: ContextVar[str | None] = ContextVar("named_home", default=None)


def name_home(home: Path) -> None:
    """Have the commands that this thread suggests name this home: a process may work for several."""
    _named_home.set(str(home))


def command(*words: object) -> str:
    """A whole ``vlm-assets`` command in backticks, each word quoted for a shell.

    It names this process's home, so that it works from whichever folder or mail it is copied. The home is
    taken from ``name_home``, else from the environment, which holds that of ``--home`` too. None is named for
    the default home, or where the words name one.
    """
    arguments = ["vlm-assets", *map(str, words)]
    home = _named_home.get() or os.environ.get(HOME)
    if home and "--home" not in arguments:
        arguments += ["--home", home]
    return f"`{shlex.join(arguments)}`"


_given: list[str] = []
"""The words of the command that runs."""


def note_given(words: Sequence[str]) -> None:
    """Note which command runs, for ``given_command``."""
    _given[:] = words


def given_command(*more: object) -> str:
    """The whole command that was given, with more words. Of an option that is in both, the last counts.

    In a run of Dagster's no command was given: the words alone.
    """
    return command(*_given, *more) if _given else f"`{shlex.join(map(str, more))}`"
