"""Commands as a script runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vlm_assets.commands.main import app


def run_command(home: Path, *words: str) -> Result:
    """Run a command on a home; an error of it is raised."""
    return CliRunner().invoke(app, [*words, "--home", str(home)], catch_exceptions=False)


@pytest.fixture
def call(dataset, monkeypatch: pytest.MonkeyPatch):
    """Runs a command on the home, as a script does: there is no terminal to ask on."""
    monkeypatch.setenv("VLM_ASSETS_HOME", str(dataset.settings.home))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments), catch_exceptions=False)

    return run
