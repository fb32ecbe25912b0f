"""Forks a child an order, which costs milliseconds where a fresh interpreter takes seconds.

``fork_server.py MODULE.py``, run as a script by forking.py, reads one order a line (JSON) on stdin. Each
child calls the module's ``work(order, report)``; what it reports comes over a pipe that survives a kill.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType

import pyarrow as pa


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, order: dict) -> dict:
    """Let a child work; one with ``after`` is killed after so many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        write = os.write  # a failpoint must not count our own reports
        report = lambda **said: write(writing, (json.dumps(said) + "\n").encode())  # noqa: E731
        code = 1
        try:
            module.work(order, report)
            code = 0
        except BaseException as error:
            report(error=f"UNNAMED {type(error).__name__}", message=str(error))
        finally:
            os._exit(code)
    os.close(writing)
    if "after" not in order:
        return gather(child, reading)
    timer = threading.Timer(order["after"], os.kill, (child, signal.SIGKILL))
    timer.start()
    answer = gather(child, reading)
    timer.cancel()
    return answer


def gather(child: int, reading: int) -> dict:
    """What a child said before it ended."""
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        return {"killed": os.WIFSIGNALED(status), "said": [json.loads(line) for line in stream]}


if __name__ == "__main__":
    working = loaded(Path(sys.argv[1]))
    # Its first array has pyarrow import pandas where that is installed: 0.2 s here, or else in each child.
    pa.array([0])
    gc.freeze()  # so that children share these pages
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run(working, order)), flush=True)
