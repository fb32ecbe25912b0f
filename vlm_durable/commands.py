"""The commands of this program that messages suggest. One function writes them all."""

from __future__ import annotations

import os
import shlex

HOME = "VLM_ASSETS_HOME"


def command(*words: object) -> str:
    """A whole ``vlm-assets`` command in backticks, each word quoted for a shell.

    It names the home that this process works on, from whichever folder or mail it is copied: the home of the
    environment, which holds that of ``--home`` too. No home is named where the default one is meant, and
    where the words name one.
    """
    arguments = ["vlm-assets", *map(str, words)]
    home = os.environ.get(HOME)
    if home and "--home" not in arguments:
        arguments += ["--home", home]
    return f"`{shlex.join(arguments)}`"
