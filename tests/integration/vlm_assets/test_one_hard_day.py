"""One hard day of a real Dagster: its run, its daemon and its database are lost; no row is."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import duckdb
import psutil
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.listings import read_source, write_listing
from tests.support.processes import command_line, descendants
from tests.support.waiting import wait_until
from vlm_assets.commands.main import app
from vlm_assets.webserver.process_group import ProcessEndedError
from vlm_assets.webserver.server import DagsterServer, dagster_server, prepare_home
from vlm_catalog.ingest import ingest

ASSETS = ["property_descriptions", "property_embeddings"]
PROPERTIES = 120
"""Enough that a partition is under way for many seconds, one property a batch."""
KEYS = [f"{start:09d}-{start + PROPERTIES - 1:09d}" for start in (0, PROPERTIES)]
SMALL_STEPS = {
    "VLM_ASSETS_BATCH_SIZE": "1",
    "VLM_ASSETS_COMMIT_SECONDS": "0.3",
    "VLM_ASSETS_DEVICES": "cpu:2",
    "OMP_NUM_THREADS": "1",
}

pytestmark = [pytest.mark.serves, pytest.mark.long]


@dataclass
class Day:
    """A home that several Dagsters run on, one after the other."""

    home: Path
    launch: Callable[..., str]

    @property
    def dagster_home(self) -> Path:
        return self.home / "dagster"

    @contextmanager
    def dagster(self) -> Iterator[DagsterServer]:
        """A running Dagster with its daemon, as `vlm-assets serve` starts it."""
        prepare_home(self.home, self.dagster_home, slots=2, console=Console(quiet=True))
        with dagster_server(
            self.home, self.dagster_home, port=3500, grace_seconds=10.0, environment=SMALL_STEPS
        ) as server:
            server.start_pages()
            server.start_daemon()
            yield server

    def committed_rows(self, key: str) -> int:
        """Rows in the segments of a partition that is not published yet."""
        segments = [one for one in self.home.rglob("segment-*.parquet") if key in one.parts]
        return sum(pq.read_metadata(one).num_rows for one in segments if one.exists())

    def wait_until(self, server: DagsterServer, reached: Callable[[], bool], seconds: float = 240.0) -> None:
        """Wait for what the disk or Dagster says; a process of the group that ends is an error at once."""
        wait_until(reached, seconds=seconds, pause=server.watch)


def process_of(instance: dg.DagsterInstance, run_id: str) -> psutil.Process:
    """The process that executes a run, as Dagster's own log of the run names it."""
    said = " ".join(entry.message for entry in instance.all_logs(run_id))
    (pid,) = set(re.findall(r"\(pid: (\d+)\)", said))
    return psutil.Process(int(pid))


@pytest.fixture
def day(listing: Path, tmp_path: Path, launch_run: Callable[..., str]) -> Day:
    """Two partitions of 120 properties, over the images of sixteen rendered ones."""
    home = tmp_path / "home"
    images = itertools.cycle(read_source(listing).values())
    many = {f"p{number:04d}": next(images) for number in range(2 * PROPERTIES)}
    ingest(write_listing(listing.with_name("many.jsonl"), many), home, range_size=PROPERTIES)
    return Day(home, launch_run)


def test_runs_daemon_and_database_are_lost_and_every_row_comes_out_once(day: Day) -> None:
    """Both assets end with each property exactly once; rows that were finished are not computed again."""
    first, second = KEYS
    with day.dagster() as server, dg.DagsterInstance.from_config(str(day.dagster_home)) as instance:
        # 1. The process of a run is killed in the middle of its work. Dagster starts it again by itself.
        run = day.launch(server.api, ASSETS, first)
        day.wait_until(server, lambda: day.committed_rows(first) >= 20)
        process_of(instance, run).kill()
        survived = day.committed_rows(first)
        assert 20 <= survived < PROPERTIES, "it must be killed in the middle"
        failed = dg.DagsterRunStatus.FAILURE
        day.wait_until(server, lambda: instance.get_run_by_id(run).status is failed)
        day.wait_until(server, lambda: day.committed_rows(first) >= survived + 5)
        # 2. The same partition is launched twice: the second never writes beside the first.
        day.launch(server.api, ASSETS, second)
        day.wait_until(server, lambda: day.committed_rows(second) >= 20)
        twin = day.launch(server.api, ASSETS, second)
        ended = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS]
        day.wait_until(
            server, lambda: instance.get_run_by_id(twin).status in [*ended, dg.DagsterRunStatus.STARTED]
        )
        # 3. The daemon is killed. Everything that this Dagster started ends with it.
        (daemon,) = (
            process
            for process in descendants(os.getpid())
            if any(word.endswith("dagster-daemon") for word in command_line(process))
        )
        daemon.kill()
        with pytest.raises(ProcessEndedError, match="daemon"):
            server.watch(30.0)
    # 4. Dagster's database is damaged while nobody looks. It is set aside, and the work is found on disk.
    damaged = day.dagster_home / "history" / "runs.db"
    damaged.write_bytes(b"\0" * 4096 + damaged.read_bytes()[4096:])
    before = {key: day.committed_rows(key) for key in KEYS}
    with day.dagster() as server:
        for key in KEYS:
            day.launch(server.api, ASSETS, key)
        published = [day.home / asset / f"{key}.parquet" for asset in ASSETS for key in KEYS]
        day.wait_until(server, lambda: all(one.exists() for one in published), seconds=400.0)
    assert before[second] >= 20, "there was work under way when the database was lost"
    for asset in ASSETS:
        files = [str(day.home / asset / f"{key}.parquet") for key in KEYS]
        ids = duckdb.execute("SELECT property_id FROM read_parquet($1)", [files]).fetchall()
        assert sorted(ids) == [(f"p{number:04d}",) for number in range(2 * PROPERTIES)]
    audited = CliRunner().invoke(app, ["audit", "--deep", "--home", str(day.home)])
    assert audited.exit_code == 0, audited.output
