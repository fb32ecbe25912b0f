"""What a writer does that fails on purpose; run by fork_server.py.

It opens a journal, reads it, submits what is missing, then a second try of every row that failed at its
first, and kills itself, stops, or meets an error at its Nth file operation. It reports what it was promised.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
from pathlib import Path

import pyarrow as pa

from resources.journal.errors import JournalError
from resources.journal.journal import Journal

SCHEMA = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("property_id", pa.string()),
        ("status", pa.string()),
        ("tries", pa.int32()),
        ("text", pa.string()),
    ]
)
OPERATIONS = ("open", "write", "fsync", "close", "link", "unlink", "rename", "replace", "mkdir", "rmdir")


def rows(ordinals: list[int], tries: int = 1) -> pa.Table:
    """Rows of which every third fails at its first try; one of these in two, at its second too."""
    failed = [n % 3 == 1 and (tries == 1 or n % 6 == 4) for n in ordinals]
    return pa.table(
        {
            "ordinal": ordinals,
            "property_id": [f"property-{n:05d}" for n in ordinals],
            "status": ["failed" if one else "ok" for one in failed],
            "tries": [tries] * len(ordinals),
            "text": [f"text {tries} of {n} " * 4 for n in ordinals],
        },
        schema=SCHEMA,
    )


class Failpoint:
    """Wraps the os functions that change a disk; acts before the Nth call (from 1), or inside a write."""

    def __init__(self, mode: str, at: int, only: str | None) -> None:
        self.mode, self.at, self.only = mode, at, only
        self.calls = itertools.count(1)
        self.guard = threading.Lock()
        for name in OPERATIONS:
            setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name, real):
        """The function to put in the place of ``os.name``."""

        def call(*arguments, **named):
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **named)
            if self.only is not None and name != self.only:
                return real(*arguments, **named)
            with self.guard:
                number = next(self.calls)
            if self.mode == "short" and name == "write":
                return real(arguments[0], bytes(arguments[1])[: max(1, len(arguments[1]) // 3)])
            if number != self.at:
                return real(*arguments, **named)
            if self.mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.mode == "torn":
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            if self.mode == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.mode.startswith("E"):
                if name == "close":
                    real(*arguments)
                raise OSError(getattr(errno, self.mode), os.strerror(getattr(errno, self.mode)), "injected")
            return real(*arguments, **named)

        return call


def work(order: dict, report) -> None:
    """Commit, and report an error that has its name by that."""
    try:
        commit(order, report)
    except JournalError as error:
        report(error=type(error).__name__, message=str(error))


def commit(order: dict, report) -> None:
    """Open, report what was restored, commit the rest batch by batch, report each as it is promised."""
    home = Path(order["home"])
    failpoint = Failpoint(order.get("mode", "none"), order.get("at", 0), order.get("only"))
    total, batch = order["total"], order["batch"]
    journal = Journal.open(
        home / "journal",
        key="key",
        generation="generation",
        fingerprints={"catalogue": "c", "model": "m"},
        schema=SCHEMA,
        expected_ids=[f"property-{n:05d}" for n in range(total)],
        high_water_mark=home / "state" / "mark.json",
        accept_loss=order.get("accept_loss"),
    )
    with journal:
        found = [row for part in journal.read_ordered(3) for row in part.to_pylist()]
        report(restored=[row["ordinal"] for row in found], exact=found == rows_of(found))
        report(restored_again=[row["ordinal"] for row in found if row["tries"] == 2])
        todo = [n for n in range(total) if f"property-{n:05d}" in journal.missing_ids]
        for start in range(0, len(todo), batch)[: order.get("batches")]:
            mine = todo[start : start + batch]
            journal.submit(rows(mine))
            report(submitted=mine)
            journal.flush()
            report(promised=mine)
        if order.get("batches") is None:
            again = sorted(int(one[-5:]) for one, tries in journal.failed_tries.items() if tries == 1)
            journal.submit(rows(again, tries=2))
            journal.flush()
            report(promised_again=again)
        found = [row for part in journal.read_ordered() for row in part.to_pylist()]
        report(final=[row["ordinal"] for row in found], exact=found == rows_of(found))
        report(final_again=[row["ordinal"] for row in found if row["tries"] == 2])
    report(finished=True, operations=next(failpoint.calls) - 1)


def rows_of(found: list[dict]) -> list[dict]:
    return [row for one in found for row in rows([one["ordinal"]], one["tries"]).to_pylist()]
