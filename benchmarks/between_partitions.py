"""Seconds in which a device has nothing to do between two partitions: python -m benchmarks.between_partitions

The real Dagster (code server, queue, a process a run) describes and embeds partitions one after the other on
one device, with a run prepared for the next partition and without one. The describing model is a server that
answers each question after a fixed time, as a fast GPU would: what it says is not the point. The seconds are
those from the last vector of a partition to the first question that the server hears of the next one. With
--home they are those of its published rows, which know only roughly when a batch was asked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow.parquet as pq

from examples.rendered_properties import write_example
from vlm_assets.config.settings import load_settings
from vlm_assets.services.backfill import dagster_facts
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import dagster_server
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest

_ANSWER_SECONDS: Final = 0.5
_ASSETS: Final = ("property_descriptions", "property_embeddings")
_ANSWER: Final = {
    "building_type": "detached_house",
    "facade_material": "brick",
    "roof": "gable",
    "floors": 2,
    "garage": "none",
    "has_solar_panels": False,
    "garden": "lawn",
    "has_pool": False,
    "kitchen": "white",
    "living_floor": "tile",
    "has_fireplace": False,
    "bathroom": "bath",
    "summary": "A brick house.",
}


class _Answers(BaseHTTPRequestHandler):
    """A server's pages: its one model, and the same answer to every question."""

    def do_GET(self) -> None:
        self._respond({"data": [{"id": "house", "root": "/models/house"}]})

    questions: ClassVar[list[datetime]] = []
    """When each was heard."""

    def do_POST(self) -> None:
        self.questions.append(datetime.now(UTC))
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(_ANSWER_SECONDS)
        choice = {"message": {"content": json.dumps(_ANSWER)}, "finish_reason": "stop"}
        self._respond({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 9}})

    def _respond(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def _model_server() -> Iterator[str]:
    """Its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def seconds_between(home: Path, questions: Sequence[datetime] = ()) -> list[float]:
    """Of each two partitions that followed each other. questions: when each was heard, if known."""
    spans = []
    for part in Catalog.open(home).ranges:
        described, embedded = (pq.read_table(home / asset / f"{part.key}.parquet") for asset in _ASSETS)
        rows = described.select(["described_at", "seconds"]).to_pylist()
        asked = min(row["described_at"] - timedelta(seconds=row["seconds"]) for row in rows)
        spans.append((asked, max(embedded["embedded_at"].to_pylist())))
    spans.sort()
    gaps = []
    for (_, last_vector), (asked, _) in itertools.pairwise(spans):
        first_question = min((at for at in questions if at > last_vector), default=asked)
        gaps.append((first_question - last_vector).total_seconds())
    return gaps


def measure(folder: Path, url: str, *, partitions: int, properties: int, prepared: int) -> list[float]:
    """Describe the partitions in a new home. prepared: runs that wait for the device."""
    home = folder / f"home-{prepared}"
    ingest(write_example(home, properties=partitions * properties, seed=7), home, range_size=properties)
    catalog, dagster_home = Catalog.open(home), home / "dagster"
    prepare_dagster_home(dagster_home, catalog_id=catalog.catalog_id, slots=1 + prepared)
    environment = {
        "VLM_ASSETS_DEVICES": "cpu:1",
        "VLM_ASSETS_ENGINE": "server",
        "VLM_ASSETS_SERVER_URL": url,
        "VLM_ASSETS_EMBEDDING_MODEL": "example",
    }
    with dagster_server(home, dagster_home, port=3900, environment=environment) as server:
        server.start_pages()
        keys = [part.key for part in catalog.ranges]
        backfill = server.api.launch_backfill(_ASSETS, keys, title="all", tags={})
        server.start_daemon()
        with dagster_facts(load_settings(home=home)) as dagster:
            while (launched := dagster.backfill(backfill)) is not None and launched.unfinished:
                server.watch(1.0)
    return seconds_between(home, _Answers.questions)


def main(arguments: list[str]) -> None:
    """Measure and print, without a prepared run and with one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.between_partitions", description=__doc__)
    parser.add_argument("--partitions", type=int, default=7)
    parser.add_argument("--properties", type=int, default=400, help="a partition")
    parser.add_argument("--home", type=Path, help="read the seconds of this home, and describe nothing")
    options = parser.parse_args(arguments)
    if options.home is not None:
        print(_sentence(seconds_between(load_settings(home=options.home).home)))
        return
    with tempfile.TemporaryDirectory() as folder, _model_server() as url:
        for prepared in (0, 1):
            seconds = measure(
                Path(folder),
                url,
                partitions=options.partitions,
                properties=options.properties,
                prepared=prepared,
            )
            print(f"{prepared} prepared: {_sentence(seconds)}", flush=True)


def _sentence(seconds: list[float]) -> str:
    if not seconds:
        return "fewer than two partitions"
    each = ", ".join(f"{gap:.1f}" for gap in seconds)
    return f"median {statistics.median(seconds):.1f} s between two partitions ({each})"


if __name__ == "__main__":
    main(sys.argv[1:])
