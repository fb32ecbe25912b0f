"""A process group tells of a child that ends by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from vlm_assets.webserver.process_group import ProcessEndedError, ProcessGroup, rotate_log
from vlm_durable.files.processes import processes_of_group


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
        assert len(processes_of_group(group.id)) == 2
    assert processes_of_group(group.id) == []


def test_children_do_not_inherit_an_ignored_interrupt(tmp_path: Path) -> None:
    """Started as a script's background job, where SIGINT is ignored, children can still be ended."""
    script = (
        "import os, pathlib, signal, sys\n"
        "from vlm_assets.webserver.process_group import ProcessGroup\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with ProcessGroup(grace_seconds=1.0) as group:\n"
        "    child = [sys.executable, '-c', 'import signal; print(signal.getsignal(signal.SIGINT))']\n"
        "    folder = pathlib.Path(sys.argv[1])\n"
        "    group.start('c', child, environment=os.environ, directory=folder, log=folder / 'c.log')\n"
        "    try:\n        group.watch(30)\n    except Exception:\n        pass\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert "default_int_handler" in (tmp_path / "c.log").read_text()


LONGEST = 1 << 20

WRITER = f"""
import os, signal, subprocess, sys, time
for number in range(20_000):
    print("x" * 99)
sys.stdout.flush()
while os.fstat(1).st_size > {LONGEST}:
    time.sleep(0.01)
print("the last of many", flush=True)
subprocess.run([sys.executable, "-c", "print('of a child of its own', flush=True)"])
signal.pause()
"""


def test_a_log_is_bounded_while_its_process_writes(tmp_path: Path) -> None:
    """A month of words fills no disk: begun anew at a size, one older kept; who writes is not disturbed."""
    log = tmp_path / "daemon.log"
    with ProcessGroup(grace_seconds=5.0, longest_log=LONGEST) as group:
        command = [sys.executable, "-c", WRITER]
        group.start("daemon", command, environment=os.environ, directory=tmp_path, log=log)
        wait_until(
            lambda: "of a child of its own" in log.read_text(),
            "the last words",
            seconds=60,
            every=0.01,
            pause=group.watch,
        )
        last = ["the last of many", "of a child of its own"]
        assert log.read_text().splitlines()[-2:] == last, "a grandchild writes into the same file"
        assert log.stat().st_size <= LONGEST
        # Written at the file's end and not where the writer had been: no hole before it.
        assert b"\0" not in log.read_bytes()
        assert log.with_suffix(".log.1").stat().st_size > LONGEST
    assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.log", "daemon.log.1"]


def test_a_log_that_cannot_be_kept_is_not_emptied(tmp_path: Path) -> None:
    """On a full disk the words that say so stay; the next look tries again."""
    log = tmp_path / "daemon.log"
    log.write_bytes(b"x" * 100)
    older = tmp_path / "daemon.log.1"
    older.mkdir()
    rotate_log(log, 99)
    assert log.stat().st_size == 100
    older.rmdir()
    rotate_log(log, 100)
    assert not older.exists()
    rotate_log(log, 99)
    assert (log.stat().st_size, older.stat().st_size) == (0, 100)
