"""What a backfill says when it has ended."""

from __future__ import annotations

import io

from rich.console import Console

from vlm_assets.operate.backfill import Backfill, BackfillSummary
from vlm_assets.operate.dagster_server.api import DagsterApi


def summary_of(dataset) -> tuple[bool, str]:
    work = Backfill(DagsterApi("http://127.0.0.1:9"), dataset.settings.home, dataset.keys)
    found = BackfillSummary(dataset.keys, [], work.status(), [], None)
    console = Console(file=io.StringIO(), width=200)
    found.print(console)
    return found.ok, console.file.getvalue()


def test_the_summary_counts_what_status_calls_complete(dataset) -> None:
    """A partition whose file is gone is not complete, whatever Dagster shows: the exit code says so."""
    ok, said = summary_of(dataset)
    count = len(dataset.keys)
    assert ok, said
    assert f"{count} of {count} partitions are complete." in said
    dataset.descriptions.path(dataset.keys[0]).unlink()
    ok, said = summary_of(dataset)
    assert not ok
    assert f"{count - 1} of {count} partitions are complete." in said
