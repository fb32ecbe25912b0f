"""What a writer does that fails on purpose; run by fork_server.py.

It opens a journal, reads it, submits what is missing, then a second try of every row that failed at its
first, and kills itself, stops, or meets an error at its Nth file operation. It reports what it was promised.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pyarrow as pa

from faults.file_operations import FileOperations, fail_at, strike_at
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.journal_errors import JournalError

SCHEMA = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("property_id", pa.string()),
        ("status", pa.string()),
        ("tries", pa.int32()),
        ("text", pa.string()),
    ]
)


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


def installed(home: Path, mode: str, at: int, only: str) -> FileOperations:
    """Record this process, which meets what its order says at its ``at``-th file operation."""
    if mode in errno.__dict__:
        before = fail_at(at, getattr(errno, mode), only=only)
    elif mode == "stop":
        before = strike_at(at, lambda: os.kill(os.getpid(), signal.SIGSTOP), only=only)
    else:
        before = strike_at(at if mode in ("kill", "torn") else 0, torn=mode == "torn", only=only)
    operations = FileOperations(home, before)
    if mode == "short":
        operations.longest_write = 100
    operations.install()
    return operations


def work(order: dict, report) -> None:
    """Commit, and report an error that has its name by that."""
    try:
        commit(order, report)
    except JournalError as error:
        report(error=type(error).__name__, message=str(error))


def commit(order: dict, report) -> None:
    """Open, report what was restored, commit the rest batch by batch, report each as it is promised."""
    home = Path(order["home"])
    operations = installed(home, order.get("mode", "none"), order.get("at", 0), order.get("only") or "")
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
    report(finished=True, operations=operations.count)


def rows_of(found: list[dict]) -> list[dict]:
    return [row for one in found for row in rows([one["ordinal"]], one["tries"]).to_pylist()]
