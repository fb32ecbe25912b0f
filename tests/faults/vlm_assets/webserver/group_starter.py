"""Starts a process group whose child has a child of its own, says their pids, and waits to be killed."""

import json
import os
import signal
import sys
from pathlib import Path

from vlm_assets.webserver.process_group import ProcessGroup
from vlm_durable.files.processes import processes_of_group

CHILD = """
import pathlib, signal, subprocess, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "parent":
    subprocess.Popen([sys.executable, "-c", sys.argv[4], "child", *sys.argv[2:]])
pathlib.Path(sys.argv[3], sys.argv[1]).touch()
while True:
    time.sleep(60)
"""


def main(kind: str, folder: Path, grace_seconds: float) -> None:
    with ProcessGroup(grace_seconds=grace_seconds) as group:
        group.start(
            "tree",
            [sys.executable, "-c", CHILD, "parent", kind, str(folder), CHILD],
            environment=os.environ,
            directory=folder,
            log=folder / "tree.log",
        )
        while not (folder / "parent").exists() or not (folder / "child").exists():
            group.watch(0.05)
        pids = [pid for pid, _ in processes_of_group(group.id)]
        print(json.dumps({"group": group.id, "members": pids}), flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
