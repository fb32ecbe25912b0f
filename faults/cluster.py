"""The product on several machines: Ray, Dagster, a real Postgres and a real S3 store, and the example.

What lives here: how each is started, and what is asked from outside, without the product's own code:
heartbeats by SQL, rows by DuckDB from the store. What does not: the machines (``faults/machines.py``) and
what is done to them (``faults/cluster_demo.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow.dataset as ds
import sqlalchemy as sa
from pyarrow.fs import S3FileSystem

from examples.rendered_properties import write_example
from faults.machines import OUTSIDE, Machine
from faults.postgres_server import PostgresServer
from faults.s3_server import BUCKET, KEY, SECRET, S3Server

ASSETS = ("property_descriptions", "property_embeddings")
STORE, POSTGRES, DAGSTER, RAY = PARTS = ("the store", "Postgres", "Dagster's daemon", "Ray's head")
"""What all machines depend on, and what may be restarted while they work."""

_KILLED = {DAGSTER: "dagster-daemon run", RAY: "gcs_server"}
"""What the command of the process has in it, on the head."""
HEAD_PORT, JOBS_PORT, REDIS_PORT = 6379, 8265, 6380
_PROGRAM = Path(sys.executable).with_name("vlm-assets")
_CHECKOUT = Path(__file__).resolve().parent.parent
_STORE, _IMAGES = f"{BUCKET}/dataset", f"{BUCKET}/images"
_LOOK_SECONDS = 0.25
_START_SECONDS = 180.0

_SERVICE = ("bash", "-c", 'while :; do "$@"; sleep 2; done', "service")
"""Before a command: it is started again where it ends, as by systemd."""

_SETTINGS = {
    "VLM_ASSETS_MODEL": "example",
    "VLM_ASSETS_EMBEDDING_MODEL": "example",
    "VLM_ASSETS_DEVICES": "cpu:1",
    "VLM_ASSETS_DECODE_WORKERS": "1",
    # A partition of the example takes seconds: small batches and early commits make them like minutes.
    "VLM_ASSETS_BATCH_SIZE": "4",
    "VLM_ASSETS_COMMIT_SECONDS": "1",
    "VLM_ASSETS_GRACE_SECONDS": "10",
}

_BACKFILL = f"""
import json, sys, time
from pathlib import Path
from sqlalchemy.exc import SQLAlchemyError
from vlm_catalog.catalog import Catalog
from vlm_assets.services.backfill import dagster_facts
from vlm_assets.webserver.api import DagsterApi
from vlm_assets.webserver.home import running_address
from vlm_assets.config.settings import load_settings

settings = load_settings()
launched = Path(sys.argv[2])
if not launched.exists():
    api = DagsterApi(running_address(settings.dagster_home), settings.dagster_home)
    keys = [one.key for one in Catalog.open(settings.home).ranges]
    config = {{"ops": {{asset: {{"config": json.loads(sys.argv[1])}} for asset in {ASSETS!r}}}}}
    launched.write_text(api.launch_backfill({ASSETS!r}, keys, title="all", tags={{}}, run_config=config))
backfill = launched.read_text()

def is_unfinished():
    # Dagster, or its database, may be away: it goes on with the backfill when it is back.
    try:
        with dagster_facts(settings) as dagster:
            return dagster.backfill(backfill).unfinished
    except Exception as error:
        # Dagster's exception for Postgres has the database's as its cause. Nothing else passes by waiting.
        if not isinstance(error.__cause__ or error, SQLAlchemyError):
            raise
        print(error, flush=True)
        return True

while is_unfinished():
    time.sleep(1)
"""
"""Run on the head, for Dagster's pages are on its loopback. Started again, it follows what it had launched.

Arguments: config of each run, a file on the head's disk that keeps the backfill's id.
"""


class ClusterError(RuntimeError):
    """The cluster did not start, or did not come to an end; the message says what to look at."""


@dataclass(frozen=True)
class Beat:
    """The heartbeat of a materialization, as its row in Postgres says it.

    changed_at: when it was last seen to change, by this process's clock.
    """

    run_id: str
    asset: str
    partition: str
    host: str
    phase: str
    expected: int
    restored: int
    computed: int
    committed: int
    changed_at: float

    @property
    def name(self) -> tuple[str, str, str]:
        """Run, asset and host."""
        return self.run_id, self.asset, self.host

    @property
    def rows(self) -> int:
        """Rows that it has, committed or not."""
        return self.restored + self.computed


class Cluster:
    """Machines and what they share; a context manager, in which all of it runs."""

    def __init__(self, folder: Path, *, machines: int, redis: bool = False) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.password = secrets.token_urlsafe(16)
        self.postgres = PostgresServer(address=OUTSIDE, password=self.password)
        self.store = S3Server(folder / "s3", OUTSIDE)
        place = folder / "disk"
        self.machines = [
            Machine(f"node-{number}", number + 1, folder / f"node-{number}", place)
            for number in range(1, machines + 1)
        ]
        self._redis = redis
        self.ids: list[str] = []
        self.beats: dict[tuple[str, str, str], Beat] = {}
        """The last heartbeat of each run, asset and host, the dead ones' too."""
        self.rows_at: dict[tuple[str, str, str], list[tuple[float, int]]] = {}
        """All that each of them said: when, and how many rows it had."""
        self._stack = ExitStack()
        self._over = threading.Event()
        self._round = 0
        self._config: Mapping[str, bool] = {}
        self._follower: subprocess.Popen[bytes] | None = None
        self._node_of_head: subprocess.Popen[bytes] | None = None

    @property
    def head(self) -> Machine:
        """The machine where Dagster and Ray's head run; it takes partitions too."""
        return self.machines[0]

    @property
    def at_risk(self) -> Sequence[Machine]:
        """Machines that may be struck now: never the head."""
        return self.machines[1:]

    def is_current(self, beat: Beat) -> bool:
        """Whether it is of the run that has its partition now, as far as is known here."""
        return True

    def is_done(self, partition: str) -> bool:
        """Whether a run of this round has published a partition, as far as is known here."""
        return False

    def __enter__(self) -> Self:
        self.logs.mkdir()
        with ExitStack() as stack:
            stack.enter_context(self.postgres)
            stack.enter_context(self.store)
            stack.callback(self._over.set)
            for machine in self.machines:
                machine.environment = self._environment(machine)
                machine.start()
                (machine.disk / "tmp").mkdir(exist_ok=True)
                stack.callback(machine.cut_power)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _environment(self, machine: Machine) -> dict[str, str]:
        """All that its programs see; nothing of what this process was given but where programs are."""
        place = machine.place
        return {
            **_SETTINGS,
            **self.store.environment,
            "PATH": f"{_PROGRAM.parent}:{os.environ['PATH']}",
            "HOME": str(place),
            "TMPDIR": str(place / "tmp"),
            "RAY_TMPDIR": str(place / "tmp"),
            "VLM_ASSETS_HOME": str(place / "home"),
            "VLM_ASSETS_STORE": f"s3://{_STORE}",
            "VLM_ASSETS_STATE_URL": self.postgres.url,
            "VLM_ASSETS_RAY_ADDRESS": f"http://{self.head.address}:{JOBS_PORT}",
        }

    def begin(self, *, properties: int, range_size: int, seed: int) -> None:
        """Render the example, put its images into the store, take it into the catalogue, and start it all."""
        listing = self._fill_store(properties, seed)
        if self._redis:
            self.head.environment = {**self.head.environment, "RAY_REDIS_ADDRESS": f"127.0.0.1:{REDIS_PORT}"}
        self.start_node(self.head)
        self._wait("is a node with", self.logs / f"{self.head.name}.log")
        self._ingest(listing, range_size)
        for machine in self.machines[1:]:
            self.start_node(machine)
        self._serve()
        self._wait("Schedules, sensors and alerts are on", self.logs / "serve.log")
        self._begin_to_listen()

    def _serve(self) -> None:
        self.head.popen(*_SERVICE, _PROGRAM, "serve", log=self.logs / "serve.log")

    def _fill_store(self, properties: int, seed: int) -> Path:
        """Render the example and put its images into the store; gives the listing."""
        listing = write_example(self.folder, properties=properties, seed=seed)
        self.ids = [json.loads(line)["property_id"] for line in listing.read_text().splitlines()]
        client = self.store.client()
        images = sorted(path for path in listing.parent.rglob("*") if path.is_file())
        with ThreadPoolExecutor(8) as pool:
            prefix = _IMAGES.partition("/")[2]
            for done in [
                pool.submit(
                    client.upload_file, str(path), BUCKET, f"{prefix}/{path.relative_to(listing.parent)}"
                )
                for path in images
            ]:
                done.result()
        return listing

    def _ingest(self, listing: Path, range_size: int) -> None:
        size = str(range_size)
        self.ask("ingest", listing, "--image-root", f"s3://{_IMAGES}", "--range-size", size, "--close")

    def _begin_to_listen(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, *command: str | Path) -> None:
        """Run a command of the product on the head. Raises ClusterError."""
        log = self.logs / f"{command[0]}.log"
        if code := self.head.run(_PROGRAM, *command, log=log):
            raise ClusterError(f"vlm-assets {command[0]} ended with exit code {code}: see {log}")

    def start_node(self, machine: Machine) -> None:
        """Have a machine that is switched on be a node."""
        is_head = machine is self.head
        if is_head and self._redis:
            redis = ("redis-server", "--bind", "127.0.0.1", "--port", str(REDIS_PORT))
            machine.popen(*_SERVICE, *redis, log=self.logs / "redis.log")
        role = ("--head",) if is_head else ("--join", f"{self.head.address}:{HEAD_PORT}")
        log = self.logs / f"{machine.name}.log"
        service = machine.popen(
            *_SERVICE, _PROGRAM, "devices", "node", *role, "--address", machine.address, log=log
        )
        if is_head:
            self._node_of_head = service

    def _wait(self, sentence: str, log: Path) -> None:
        """Wait until a program has said something. Raises ClusterError where it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while sentence.encode() not in log.read_bytes():
            if time.monotonic() > deadline:
                raise ClusterError(f"It did not say {sentence!r} within {_START_SECONDS:.0f} s: see {log}")
            time.sleep(_LOOK_SECONDS)

    def _listen(self) -> None:
        """Read all heartbeats, again and again: those of the dead are taken away by the product."""
        engine = sa.create_engine(self.postgres.url)
        before: dict[str, Mapping[str, Any]] = {}
        while not self._over.wait(_LOOK_SECONDS):
            try:
                with engine.connect() as connection:
                    records = connection.execute(sa.text("SELECT record FROM workers")).scalars().all()
            except sa.exc.DBAPIError:
                continue  # no table yet, or Postgres is away
            now = time.monotonic()
            for record in records:
                if before.get(record["run_id"] + record["asset"]) != record:
                    before[record["run_id"] + record["asset"]] = record
                    values = {name: record[name] for name in Beat.__dataclass_fields__ if name in record}
                    beat = Beat(**values, changed_at=now)
                    self.beats[beat.name] = beat
                    self.rows_at.setdefault(beat.name, []).append((now, beat.rows))

    def backfill(self, config: Mapping[str, bool]) -> Callable[[], bool]:
        """Launch a backfill of all partitions, with this config of each run; gives whether it has ended."""
        self._round += 1
        self._config = config
        self._follow()
        return self._has_ended

    def _follow(self) -> None:
        launched = self.head.place / f"backfill-{self._round}"
        arguments = (json.dumps(self._config), launched)
        log = self.logs / "backfill.log"
        self._follower = self.head.popen(sys.executable, "-c", _BACKFILL, *arguments, log=log)

    def _has_ended(self) -> bool:
        code = None if self._follower is None else self._follower.poll()
        if not self.head.is_reachable or code is None:
            return False
        if code:
            raise ClusterError(f"The backfill cannot be followed: see {self.logs / 'backfill.log'}")
        return True

    def switch_on(self, machine: Machine) -> None:
        """Start a machine that lost its power, with its disk, and all that a boot starts there."""
        machine.start()
        self.start_node(machine)
        if machine is self.head:
            self._serve()
            self._follow()

    def kill_node_of_head(self) -> None:
        """End Ray's part on the head whole, its runs too, as systemd ends a service; it is started again."""
        assert self._node_of_head is not None
        (service,) = _children(self._node_of_head.pid)
        killed: list[int] = []
        # What is stopped starts nothing more, and then nothing is forgotten.
        while pids := [descendant for descendant in _below(service) if descendant not in killed]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            killed += pids
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, part: str) -> None:
        """End a part as a power cut does. Dagster and Ray come back by themselves, the others by ``mend``."""
        if part == STORE:
            self.store.kill()
        elif part == POSTGRES:
            self.postgres.stop()
        elif code := self.head.run("pkill", "-KILL", "-f", _KILLED[part], log=self.logs / "killed.log"):
            raise ClusterError(f"{part} was not there to be killed: pkill ended with exit code {code}")

    def mend(self, part: str) -> None:
        """Start again what ``kill`` has ended."""
        if part == STORE:
            self.store.start()
        elif part == POSTGRES:
            self.postgres.start()

    def leaked_secrets(self) -> list[str]:
        """Files and tables that hold a password or a key of the store.

        Not looked at is what Postgres and the store keep for themselves.
        """
        secrets = (self.password, SECRET, KEY)
        places = [f"Postgres' table {table}" for table in self.postgres.tables_with(secrets)]
        for top in (self.logs, *(machine.disk for machine in self.machines)):
            for path in top.rglob("*"):
                with contextlib.suppress(FileNotFoundError):  # what lives there goes on
                    content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                    if any(secret.encode() in content for secret in secrets):
                        places.append(str(path))
        return places

    def rows(self, asset: str) -> tuple[int, int]:
        """Rows that the published files in the store lack, and rows that they have too many."""
        listing = self.store.client().list_objects_v2(Bucket=BUCKET, Prefix=f"dataset/{asset}/")
        if not listing["KeyCount"]:
            return len(self.ids), 0
        files = S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            endpoint_override=f"{OUTSIDE}:{self.store.port}",
            scheme="http",
            region="us-east-1",
        )
        database = duckdb.connect()
        database.execute("CREATE TABLE wanted (property_id VARCHAR)")
        database.executemany("INSERT INTO wanted VALUES (?)", [[property_id] for property_id in self.ids])
        database.register("published", ds.dataset(f"{_STORE}/{asset}", filesystem=files, format="parquet"))
        row = database.execute(
            """
            WITH counted AS (SELECT property_id, count(*) AS rows FROM published GROUP BY property_id)
            SELECT count(*) FILTER (counted.rows IS NULL),
                   coalesce(sum(counted.rows - if(wanted.property_id IS NULL, 0, 1)), 0)::BIGINT
            FROM wanted FULL JOIN counted USING (property_id)
            """
        ).fetchone()
        assert row is not None
        return row[0], row[1]


def _children(process: int) -> list[int]:
    pids: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            pids += map(int, path.read_text().split())
    return pids


def _below(process: int) -> list[int]:
    """All that descends from a process, and not itself."""
    children = _children(process)
    return children + [descendant for child in children for descendant in _below(child)]
