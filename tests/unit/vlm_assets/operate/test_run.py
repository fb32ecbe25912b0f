"""What ``publish`` says before anything is launched, and a backfill when it has ended."""

import io

import pyarrow as pa
import pytest
from rich.console import Console
from typer.testing import CliRunner

from resources.journal.journal import Journal
from vlm_assets.operate.dagster_server.api import DagsterApi
from vlm_assets.operate.main import app
from vlm_assets.operate.run import Backfill, BackfillSummary

ROWS = pa.schema(
    [
        ("property_id", pa.string()),
        ("ordinal", pa.int64()),
        ("status", pa.string()),
        ("error_kind", pa.string()),
        ("error", pa.string()),
        ("tries", pa.int32()),
    ]
)


def publish(dataset, *arguments):
    return CliRunner().invoke(
        app, ["publish", dataset.keys[0], "--home", str(dataset.settings.home), *arguments]
    )


@pytest.fixture
def refused(empty):
    """The first of the three ranges is finished and not published: two of three properties failed."""
    paths = empty.settings.descriptions.partition(empty.keys[0])
    failed = {"status": "failed", "error_kind": "io_error", "error": "the disk is bad", "tries": 3}
    ok = {"status": "ok", "error_kind": None, "error": None, "tries": 1}
    first = [{"property_id": f"p{n}", "ordinal": n, **(ok if n == 0 else failed)} for n in range(3)]
    for row in first[1:]:
        row["tries"] = 1
    with Journal.open(
        paths.journal("g"),
        key=paths.key,
        generation="g",
        fingerprints={},
        schema=ROWS,
        expected_ids=["p0", "p1", "p2"],
        high_water_mark=paths.high_water_mark("g"),
        quarantine=paths.quarantine,
    ) as journal:
        journal.submit(pa.Table.from_pylist(first, schema=ROWS))
        journal.flush()
        journal.submit(pa.Table.from_pylist([{**first[1], "tries": 2, "error": "still bad"}], schema=ROWS))
    return empty


def test_the_failed_rows_are_named_before_anything_is_accepted(refused):
    """How many of how many, of which kinds, and the first with its reason, that of its last try."""
    said = publish(refused)
    assert said.exit_code == 1
    assert "2 of 3 properties failed (2 io_error). First: p1: io_error: still bad." in said.output
    assert "--accept-failed" in said.output


def test_without_a_yes_nothing_is_published(refused):
    """Without a terminal to ask in, only --yes accepts."""
    said = publish(refused, "--accept-failed")
    assert said.exit_code == 1
    assert "Nothing was changed" in said.output
    assert not refused.settings.descriptions.partition(refused.keys[0]).published.exists()


def test_what_is_published_already_is_left_alone(dataset):
    """There is nothing to accept."""
    said = publish(dataset, "--accept-failed", "--yes")
    assert said.exit_code == 0
    assert "published. Nothing was done." in said.output


def summary_of(dataset) -> tuple[bool, str]:
    work = Backfill(
        DagsterApi("http://127.0.0.1:9", dataset.settings.dagster_home), dataset.settings, dataset.keys
    )
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
