"""A process's end in words. That one process is told from another with its pid, the fault tests show."""

import subprocess

import pytest

from vlm_durable.files.processes import how_it_ended


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
