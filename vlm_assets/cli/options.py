"""What the commands share: the application, options, the settings that follow, questions, lists and JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.operate.terminal import say, say_json, show_home_in_commands
from vlm_assets.settings import PREFIX, Settings, load_settings

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
