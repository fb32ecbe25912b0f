"""What S3 costs: python -m benchmarks.store_cost [--model SHAPE --side N] [--properties 600] [--rounds 3]

The same properties, described by runs by turns from and to the local disk, and with images and place of
record on an S3 server on this machine. One process a run. ``ratio`` is of the steady rates, from the first
batch on; ``whole`` of whole runs, start-up and the first look at the store included; ``held_up`` the
share of the steady time in which the model waited for commits. On a busy machine a ratio says little. The
server's CPU time is not taken away from anything: on a machine of two cores it costs the rate what it uses.

The example's model sees several hundred images a second on a CPU, more than a node of GPUs. --model takes a
shape of gpu_models.py with random weights instead: tiny-qwen2.5-vl sees some hundred of 224 pixels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu_loops import PROMPT
from benchmarks.partitions import SCHEMA, save_model, seconds_of_work
from examples.rendered_properties import write_example
from faults.s3_server import BUCKET, S3Server
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_durable.mirror.bucket import S3Folder
from vlm_durable.mirror.mirror import NO_MIRROR

PUTS_AT_ONCE = 8
Found = dict[str, float]


def main() -> None:
    """Run all turns, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="example")
    parser.add_argument("--side", type=int, default=224, help="pixels of an image for another model")
    parser.add_argument("--properties", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="store-cost-") as name, S3Server(Path(name) / "s3") as server:
        folder = Path(name)
        os.environ |= (
            server.environment | {"VLM_ASSETS_DEVICES": "cpu:1"} | _model(options.model, options.side, folder)
        )
        listing = write_example(folder / "example", properties=options.properties, seed=7)
        _put_below("images", listing.parent, server)
        turns: dict[str, list[Found]] = {"local": [], "s3": []}
        for number in range(options.rounds):
            for place in ("local", "s3") if number % 2 else ("s3", "local"):
                home = folder / f"{place}-{number}"
                turns[place].append(_run(home, listing, options.properties, on_s3=place == "s3"))
    rates = {
        place: {
            kind: statistics.median(rate[kind] for rate in rates_of_place)
            for kind in ("steady", "properties/s")
        }
        for place, rates_of_place in turns.items()
    }
    figures = {
        "properties_per_second": {place: round(rate["steady"], 2) for place, rate in rates.items()},
        "ratio": round(rates["s3"]["steady"] / rates["local"]["steady"], 3),
        "whole": round(rates["s3"]["properties/s"] / rates["local"]["properties/s"], 3),
        "held_up": {
            place: max(rate["held up"] for rate in rates_of_place) for place, rates_of_place in turns.items()
        },
        "rounds": {
            place: [round(rate["steady"], 2) for rate in rates_of_place]
            for place, rates_of_place in turns.items()
        },
    }
    print(json.dumps(figures))


def _model(name: str, side: int, folder: Path) -> dict[str, str]:
    """What of the environment says which model it is."""
    if name == "example":
        return {"VLM_ASSETS_MODEL": "example"}
    save_model(name, folder / "model", device="cpu", side=side)
    return {
        "VLM_ASSETS_MODEL": str(folder / "model"),
        "VLM_ASSETS_DESCRIPTION_SCHEMA": SCHEMA,
        "VLM_ASSETS_PROMPT": PROMPT.text,
        "VLM_ASSETS_MAX_PIXELS": str(side * side),
    }


def _put_below(prefix: str, folder: Path, server: S3Server) -> None:
    client = server.client()

    def put(path: Path) -> None:
        client.upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(folder)}")

    with ThreadPoolExecutor(PUTS_AT_ONCE) as pool:
        list(pool.map(put, (path for path in folder.rglob("*") if path.is_file())))


def _run(home: Path, listing: Path, properties: int, *, on_s3: bool) -> Found:
    """Describe all properties in a process of their own; gives what the partition's page says."""
    store = S3Folder.parse(f"s3://{BUCKET}/{home.name}") if on_s3 else NO_MIRROR
    images = S3Folder.parse(f"s3://{BUCKET}/images") if on_s3 else None
    ingest(listing, home, image_root=images, range_size=properties, close=True, store=store)
    (property_range,) = Catalog.open(home).ranges
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.partitions", property_range.key, DESCRIPTIONS],
        env={
            **os.environ,
            "VLM_ASSETS_HOME": str(home),
            **({"VLM_ASSETS_STORE": str(store)} if store.keeps_copies else {}),
        },
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    measured: Found = json.loads(done.stdout.splitlines()[-1])
    seconds = seconds_of_work(measured)
    held_up = measured["seconds waiting for commit"] / seconds
    return measured | {"steady": properties / seconds, "held up": round(held_up, 5)}


if __name__ == "__main__":
    main()
