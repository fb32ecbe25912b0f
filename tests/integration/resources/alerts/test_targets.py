"""Sending in a process of its own, to a real HTTP receiver."""

import json
import os
import subprocess
import sys

import pytest

MODULE = "resources.alerts.targets"


@pytest.mark.parametrize(("is_alive", "answer"), [(True, "null\n"), (False, "")])
def test_what_a_dead_process_has_ordered_is_not_sent(is_alive, answer, receiver):
    """When its claim is over another process sends it: sent by both, it would come twice."""
    order = {"url": receiver.url(), "id": "i", "title": "a title", "body": "b", "type": "info"}
    parent = os.getpid() if is_alive else os.getppid()
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "20", str(parent)],
        input=f"{json.dumps(order)}\n",
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout == answer
    assert receiver.titles == ["a title"] * is_alive
