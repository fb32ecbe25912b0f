"""What S3 costs: python -m benchmarks.store_cost [--properties 600] [--rounds 3]

The same properties, described by runs of Dagster by turns from and to the local disk, and with images and
place of record on an S3 server on this machine. One process a run, as in a backfill; the rate is that of the
run, start-up and the first look at the store included. On a busy machine the ratio says little. ``held_up``
is the share of the run in which the model waited for commits. The server's CPU time is not taken away from
anything: on a machine of two cores it costs the rate what it uses.
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

import dagster as dg

from examples.rendered_properties import write_example
from faults.s3_server import BUCKET, S3Server
from resources.store.bucket import S3Folder
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.config.settings import current_settings

PUTS_AT_ONCE = 8
ASSET = "property_descriptions"
NUMBERS = ("properties/s", "seconds waiting for commit", "seconds in model")


def main() -> None:
    """Run all turns, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--properties", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_run()))
        return
    with tempfile.TemporaryDirectory(prefix="store-cost-") as folder, S3Server(Path(folder) / "s3") as server:
        os.environ |= server.environment
        listing = write_example(Path(folder) / "example", properties=options.properties, seed=7)
        _put_below("images", listing.parent, server)
        turns: dict[str, list[dict[str, float]]] = {"local": [], "s3": []}
        for number in range(options.rounds):
            for place in ("local", "s3") if number % 2 else ("s3", "local"):
                home = Path(folder) / f"{place}-{number}"
                store = S3Folder.parse(f"s3://{BUCKET}/{home.name}") if place == "s3" else None
                images = S3Folder.parse(f"s3://{BUCKET}/images") if place == "s3" else None
                ingest(
                    listing, home, image_root=images, range_size=options.properties, close=True, store=store
                )
                turns[place].append(_apart(home, store))
    rates = {place: statistics.median(one["properties/s"] for one in some) for place, some in turns.items()}
    told = {
        "properties_per_second": rates,
        "ratio": round(rates["s3"] / rates["local"], 3),
        "held_up": {
            place: max(one["seconds waiting for commit"] / one["seconds"] for one in some)
            for place, some in turns.items()
        },
        "turns": turns,
    }
    print(json.dumps(told))


def _put_below(prefix: str, folder: Path, server: S3Server) -> None:
    client = server.client()

    def put(path: Path) -> None:
        client.upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(folder)}")

    with ThreadPoolExecutor(PUTS_AT_ONCE) as pool:
        list(pool.map(put, (path for path in folder.rglob("*") if path.is_file())))


def _apart(home: Path, store: S3Folder | None) -> dict[str, float]:
    more = {"VLM_ASSETS_HOME": str(home), "VLM_ASSETS_DEVICES": "cpu:1", "VLM_ASSETS_MODEL": "example"}
    if store is not None:
        more["VLM_ASSETS_STORE"] = str(store)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.store_cost", "--one"],
        env=os.environ | more,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def one_run() -> dict[str, float]:
    """Materialize the one partition of the home in the environment; gives what its page says."""
    from vlm_assets.definitions import defs

    (wanted,) = Catalog.open(current_settings().home).ranges
    result = dg.materialize(
        [one for one in defs.assets or () if isinstance(one, dg.AssetsDefinition)],
        selection=[ASSET],
        partition_key=wanted.key,
        instance=dg.DagsterInstance.ephemeral(),
        resources=defs.resources,
    )
    (published,) = result.asset_materializations_for_node(ASSET)
    found = {name: float(str(published.metadata[name].value)) for name in NUMBERS}
    return found | {"seconds": (wanted.stop - wanted.start) / found["properties/s"]}


if __name__ == "__main__":
    main()
