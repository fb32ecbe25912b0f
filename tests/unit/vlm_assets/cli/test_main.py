"""vlm_assets/cli/main.py: what goes wrong is a sentence, on any terminal."""

import os
import subprocess
import sys

import pytest

from vlm_assets.cli import main as cli


def test_a_file_that_may_not_be_written_is_a_sentence(monkeypatch, capsys):
    """A read-only or full disk is named with its file, without a traceback."""

    def refuse():
        raise PermissionError(30, "Read-only file system", "/srv/home/.ingest.lock")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "/srv/home/.ingest.lock: Read-only file system." in capsys.readouterr().err


def test_what_a_terminal_cannot_show_is_shown_escaped(empty):
    """An arrow that the terminal's encoding lacks ends no look at how things stand."""
    program = "from vlm_assets.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "status", "--home", str(empty.settings.home)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert r"\u2192 " in done.stdout
