"""Prunes or repairs each home it is handed, in a forked child that kills itself at one file operation.

``killed_care.py prune|repair AT HOME [AT HOME …]``: the home's child dies at operation AT; half of a write's
bytes reach the file before. Prints ``killed`` or ``finished`` for each. AT 0: it does not die, and the number
of operations is printed instead.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from faults.file_operations import FileOperations, strike_at
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.settings import load_settings
from vlm_assets.operate.audit import audit
from vlm_assets.operate.prune import plan_prune, remove
from vlm_assets.operate.repair import plan_repairs, put_right


def main(action: str, homes: list[tuple[int, Path]]) -> None:
    for at, home in homes:
        settings = load_settings(home=home)
        catalog = Catalog.open(home)
        # What is to be done is decided before the fork: DuckDB's threads do not outlive it.
        if action == "prune":
            removals = plan_prune(settings, catalog).removals
        else:
            repairs = plan_repairs(settings, audit(settings, catalog, deep=True))
        child = os.fork()
        if child == 0:
            operations = FileOperations(home, strike_at(at, torn=True))
            operations.install()
            if action == "prune":
                list(remove(settings, removals))
            else:
                for repair in repairs:
                    put_right(settings, repair)
            if not at:
                print(operations.count, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            print("killed", flush=True)
        else:
            print("finished" if status == 0 else f"failed with {status}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], list(zip(map(int, sys.argv[2::2]), map(Path, sys.argv[3::2]), strict=True)))
