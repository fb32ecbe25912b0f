"""The commands that messages suggest, all written by one function."""

from __future__ import annotations

import os
import shlex

HOME = "VLM_ASSETS_HOME"


def command(*words: object) -> str:
    """A whole ``vlm-assets`` command in backticks, each word quoted for a shell.

    It names this process's home, so that it works from whichever folder or mail it is copied. The home is
    taken from the environment, which holds that of ``--home`` too. None is named for the default home, or
    where the words name one.
    """
    arguments = ["vlm-assets", *map(str, words)]
    home = os.environ.get(HOME)
    if home and "--home" not in arguments:
        arguments += ["--home", home]
    return f"`{shlex.join(arguments)}`"
