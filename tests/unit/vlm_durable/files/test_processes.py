"""A process's end: in one order, and in words. That one is told from another: fault tests show it."""

import signal
import subprocess
from functools import partial

import pytest

from vlm_durable.files.processes import ProcessIdentity, child_has_ended, end_processes, how_it_ended


@pytest.mark.parametrize(
    ("ends_at", "grace", "steps", "ended"),
    [
        ("SIGTERM", 5.0, ["SIGTERM", 5.0], True),
        ("SIGKILL", 5.0, ["SIGTERM", 5.0, "SIGKILL", 7.0], True),
        (None, 5.0, ["SIGTERM", 5.0, "SIGKILL", 7.0], False),
        ("SIGKILL", None, ["SIGKILL", 7.0], True),
        (None, None, ["SIGKILL", 7.0], False),
    ],
    ids=["ends when told", "has to be killed", "outlives even that", "killed at once", "outlives a kill"],
)
def test_processes_are_ended_in_one_order(ends_at, grace, steps, ended):
    """Who ends in its grace is not killed; who outlives SIGKILL is said, and not waited for for ever."""
    done = []

    def send(number):
        done.append(number.name)

    def have_ended(seconds):
        done.append(seconds)
        return ends_at in done

    assert end_processes(send, have_ended, grace=grace, kill_seconds=7.0) is ended
    assert done == steps


@pytest.mark.parametrize("deaf", [False, True])
def test_a_process_is_waited_for_by_the_event_of_its_end(deaf):
    """A child and a process that is none, both at once: who ignores SIGTERM is killed after the grace."""
    trap = 'trap "" TERM; ' if deaf else ""
    with subprocess.Popen(
        ["sh", "-c", f"{trap}echo ready; while :; do sleep 0.01; done"], stdout=-1
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        identity = ProcessIdentity.from_pid(process.pid)
        assert identity is not None
        assert not identity.has_ended(0.0)
        assert not child_has_ended(process, 0.0)
        if deaf:
            assert end_processes(identity.send, identity.has_ended, grace=0.2)
        else:
            assert end_processes(process.send_signal, partial(child_has_ended, process), grace=20.0)
        assert process.wait(0) == -(signal.SIGKILL if deaf else signal.SIGTERM)
        assert identity.has_ended(0.0), "and again, once it is collected"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exit 3", "ended with exit code 3"),
        ("kill -TERM $$", "was killed by SIGTERM"),
        ("kill -KILL $$", "was killed by SIGKILL (where no person did that, the machine ran out of memory)"),
        ("kill -35 $$", "was killed by signal 35"),
    ],
)
def test_how_a_process_ended_is_said_in_words(command, words):
    """Whoever reads that a worker or a server died learns what ended it, a nameless signal too."""
    assert how_it_ended(subprocess.run(["sh", "-c", command], check=False).returncode) == words
