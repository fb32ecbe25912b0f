"""What several commands of the command line take, options and the settings that follow; and say of these."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.settings import PREFIX, Settings, load_settings

Home = Annotated[Path | None, typer.Option(help=f"Folder of all output; default {PREFIX}HOME, else data/.")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


def chosen_settings(home: Path | None = None) -> Settings:
    """The settings, for this home where one is given; what is started from here sees the same home."""
    if home is not None:
        os.environ[f"{PREFIX}HOME"] = str(home.absolute())
    return load_settings()
