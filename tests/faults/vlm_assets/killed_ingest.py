"""Ingests once, and kills itself before one file operation; run by fork_server.py."""

from __future__ import annotations

from pathlib import Path

from faults.file_operations import FileOperations, Operation, strike_at
from vlm_assets.catalog.ingest import ingest


def work(order: dict, report) -> None:
    """Update the order's home from its listing; report the operation that this dies before."""
    dies = strike_at(order["at"], torn=True)

    def before(operation: Operation, operations: FileOperations) -> None:
        if operations.count == order["at"]:
            report(operation=operation.name)
        dies(operation, operations)

    FileOperations(Path(order["home"]), before).install()
    ingest(Path(order["source"]), Path(order["home"]), update=True)
