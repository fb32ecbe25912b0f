"""What durability costs the model: python -m benchmarks.durability_cost [--properties 200] [--rounds 10]

The same properties, images in memory, are described by turns with the journal (a verified commit each
``--commit-seconds``, and a flush at the end) and with the rows merely kept in a list. One process, one loaded
model, the order changing from round to round, so that what else the machine does meets both alike. The
example model describes; other settings come from the environment. On a busy machine the ratio says little;
the CPU time of the commit thread, which Linux counts, says what it can cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from examples.rendered_properties import write_example
from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.assets.partition import Partition
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.config.settings import EXAMPLE_MODEL, Settings, load_settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_engine.devices.find import Device
from vlm_engine.devices.leases import pin
from vlm_engine.images.images import LoadedProperty
from vlm_engine.ladder import describe_batch
from vlm_engine.protocol import Engine

IMAGES = 3


@dataclass(frozen=True)
class Turn:
    """One pass over all properties. waited: seconds that the model's thread spent in ``submit``.

    commit_seconds: CPU time of the commit thread.
    """

    seconds: float
    cpu_seconds: float
    waited: float = 0.0
    commit_seconds: float = 0.0
    segments: int = 0


class Bench:
    """The work, loaded: what a run has in its hands when the first batch comes."""

    def __init__(self, settings: Settings) -> None:
        catalog = Catalog.open(settings.home)
        self._settings = settings
        self._device: Device = build_gpu(settings).find()[0]
        pin(self._device)
        model = build_vision_language_model(settings)
        (self._range,) = catalog.ranges
        self._work = DescriptionWork.for_range(settings, catalog, self._range, model)
        batches = self._work.batch_sizes().plan(self._work.jobs, max_images=settings.max_images)
        with self._work.workers(self._device) as workers:
            self._batches: Sequence[Sequence[LoadedProperty]] = list(workers.feed(batches))
        self._engine: Engine = model.load(self._device, schema=self._work.schema, prompt=self._work.prompt)

    def without(self) -> Turn:
        """The rows kept in memory."""
        kept: list[pa.Table] = []
        started, cpu = time.perf_counter(), time.process_time()
        for batch in self._batches:
            kept.append(self._rows(batch))
        return Turn(time.perf_counter() - started, time.process_time() - cpu)

    def journaled(self, generation: str) -> Turn:
        """The rows committed beside the model; the last of them are durable when the time stops."""
        settings = self._settings
        work = self._work
        partition = Partition(
            settings, settings.descriptions.name, self._range.key, work.ids, work.fingerprint
        )
        with partition.open_journal(generation, self._work.rows_schema()) as journal:
            started, cpu = time.perf_counter(), time.process_time()
            for batch in self._batches:
                journal.submit(self._rows(batch))
            waited = journal.commit_wait_seconds
            journal.flush()
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            committing = _commit_thread_seconds()
        segments = len(list(partition.paths.journal(generation).glob("segment-*")))
        return Turn(seconds, cpu, waited, committing, segments)

    def _rows(self, batch: Sequence[LoadedProperty]) -> pa.Table:
        work = self._work
        described = describe_batch(self._engine, work.schema, batch, work.settings.max_new_tokens)
        return work.rows(described, self._engine, self._device)


def _commit_thread_seconds() -> float:
    """CPU seconds of the open journal's commit thread so far."""
    (thread,) = [running for running in threading.enumerate() if running.name == "journal-commits"]
    nanoseconds = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
    return int(nanoseconds) / 1e9


def main() -> None:
    """Measure by turns and print the paired ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--properties", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--commit-seconds", type=float, default=5.0, help="the default setting is 30")
    parser.add_argument("--directory", type=Path, help="where the journal lies (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        home = catalogued(Path(folder), arguments.properties)
        settings = load_settings(home=home, model=str(EXAMPLE_MODEL), commit_seconds=arguments.commit_seconds)
        bench = Bench(settings)
        bench.without()  # what is compiled and allocated once
        pairs = []
        for number in range(arguments.rounds):
            if number % 2:
                on, off = bench.journaled(f"round-{number}"), bench.without()
            else:
                off, on = bench.without(), bench.journaled(f"round-{number}")
            pairs.append((off, on))
            print(
                f"round {number}: off {off.seconds:.2f} s ({off.cpu_seconds:.2f} s of CPU),"
                f" on {on.seconds:.2f} s ({on.cpu_seconds:.2f}), {on.segments} commits,"
                f" {1000 * on.commit_seconds:.0f} ms of CPU for them, waited {1000 * on.waited:.1f} ms",
                flush=True,
            )
    _print_ratios(pairs)


def _print_ratios(pairs: Sequence[tuple[Turn, Turn]]) -> None:
    for name, ratios in (
        ("throughput on/off", [off.seconds / on.seconds for off, on in pairs]),
        ("the same by CPU seconds", [off.cpu_seconds / on.cpu_seconds for off, on in pairs]),
    ):
        low, _, high = statistics.quantiles(ratios, n=4)
        print(f"{name}: median {statistics.median(ratios):.4f}, half of the rounds {low:.4f} to {high:.4f}")
    committing = sum(on.commit_seconds for _, on in pairs)
    share = committing / sum(on.cpu_seconds for _, on in pairs)
    each = committing / sum(on.segments for _, on in pairs)
    print(f"commit thread: {100 * share:.2f}% of the CPU time, {1000 * each:.1f} ms a commit")
    waited = sum(on.waited for _, on in pairs) / sum(on.seconds for _, on in pairs)
    print(f"waiting for the commit: {100 * waited:.4f}% of the model's time; load {os.getloadavg()[0]:.1f}")


def catalogued(folder: Path, properties: int) -> Path:
    """A home of one range whose properties share the images of a few."""
    listing = write_example(folder, properties=8, seed=1)
    shown = [json.loads(line)["images"][:IMAGES] for line in listing.read_text().splitlines()]
    many = listing.with_name("many.jsonl")
    lines = [json.dumps({"property_id": f"p{n}", "images": shown[n % len(shown)]}) for n in range(properties)]
    many.write_text("\n".join(lines))
    home = folder / "home"
    ingest(many, home, range_size=properties)
    return home


if __name__ == "__main__":
    main()
