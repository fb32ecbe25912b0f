"""Publishes once for each folder it is handed, in a forked child that kills itself at one operation.

``killed_publisher.py KEY TEXT START FOLDER…``: the first folder's child dies at operation START, the second's
at the next one, and so on; half of a write's bytes reach the file before. Prints, for each folder, ``killed``
or ``finished``. With ``--verify`` as TEXT the child only verifies: it dies while it recovers.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pyarrow as pa

from faults.file_operations import FileOperations, strike_at
from vlm_durable.files.layout import Home
from vlm_durable.versions.published import PublishedPartitions

SCHEMA = pa.schema([("property_id", pa.string()), ("text", pa.string())])


def publish(folder: Path, key: str, text: str) -> None:
    partitions = PublishedPartitions(Home(folder).asset("a"))
    if text == "--verify":
        partitions.verify(key)
        return
    batch = pa.record_batch([["x", "y"], [text, text]], schema=SCHEMA)
    staged = partitions.stage(key, [batch], SCHEMA, expected_ids=["x", "y"], fingerprint=text)
    partitions.publish(staged)


def main(key: str, text: str, start: int, folders: list[Path]) -> None:
    for number, folder in enumerate(folders, start):
        child = os.fork()
        if child == 0:
            FileOperations(folder, strike_at(number, torn=True)).install()
            publish(folder, key, text)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            print("killed")
        else:
            print("finished" if status == 0 else f"failed with {status}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), [Path(one) for one in sys.argv[4:]])
