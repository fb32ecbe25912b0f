"""A process group tells of a child that ends by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_assets.orchestrator.process_group import ProcessEndedError, ProcessGroup, members


def test_child_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    """A process that dies is told at once, by name, with its exit code and log."""
    with ProcessGroup(grace_seconds=1.0) as group:
        group.start(
            "webserver",
            [sys.executable, "-c", "import sys; print('no such module'); sys.exit(3)"],
            environment=os.environ,
            directory=tmp_path,
            log=tmp_path / "webserver.log",
        )
        with pytest.raises(ProcessEndedError, match=r"(?s)webserver .*exit code 3.*no such module"):
            group.watch(30.0)


def test_stop_ends_what_runs(tmp_path: Path) -> None:
    """Leaving the context leaves no member of the group."""
    with ProcessGroup(grace_seconds=5.0) as group:
        group.start(
            "sleeper",
            [sys.executable, "-c", "import signal; signal.pause()"],
            environment=os.environ,
            directory=tmp_path,
            log=tmp_path / "sleeper.log",
        )
        assert len(members(group.id)) == 2
    assert members(group.id) == []


def test_children_do_not_inherit_an_ignored_interrupt(tmp_path: Path) -> None:
    """Started as a script's background job, where SIGINT is ignored, children can still be ended."""
    script = (
        "import os, pathlib, signal, sys; from vlm_assets.orchestrator.process_group import ProcessGroup\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with ProcessGroup(grace_seconds=1.0) as group:\n"
        "    child = [sys.executable, '-c', 'import signal; print(signal.getsignal(signal.SIGINT))']\n"
        "    folder = pathlib.Path(sys.argv[1])\n"
        "    group.start('c', child, environment=os.environ, directory=folder, log=folder / 'c.log')\n"
        "    try:\n        group.watch(30)\n    except Exception:\n        pass\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert "default_int_handler" in (tmp_path / "c.log").read_text()
