"""Memory and time of one run as its partition grows: python -m benchmarks.growth [--sizes 50 500 5000]

Each size is a process of its own that materializes one partition of that many properties, all checks and
the journal on, with the example model. The images are the same few for every property, so that rendering
costs nothing. Memory is the peak resident set of the run's own process, imports and model included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = "--run"


def main() -> None:
    """Measure every size and print one line for each, then the growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 500, 5000])
    parser.add_argument("--images", type=int, default=2, help="images a property")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = [_measure(Path(folder), size, arguments.images) for size in arguments.sizes]
    first, last = results[0], results[-1]
    thousands = (last["properties"] - first["properties"]) / 1000
    print(
        f"{last['properties'] / first['properties']:.0f} times the properties:"
        f" {last['peak_mib'] / first['peak_mib']:.3f} times the memory;"
        f" a thousand more: {(last['peak_mib'] - first['peak_mib']) / thousands:.1f} MiB,"
        f" {(last['cpu_seconds'] - first['cpu_seconds']) / thousands:.1f} s of CPU"
    )


def _measure(folder: Path, size: int, images: int) -> dict[str, float]:
    from examples.rendered_properties import write_example
    from vlm_catalog.ingest import ingest

    listing = write_example(folder, properties=8, seed=1)
    shown = json.loads(listing.read_text().splitlines()[0])["images"][:images]
    many = folder / "example" / f"{size}.jsonl"
    many.write_text(
        "".join(json.dumps({"property_id": f"p{n}", "images": shown}) + "\n" for n in range(size))
    )
    home = folder / f"home-{size}"
    ingest(many, home, range_size=size)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth", RUN, str(home)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{size:6d} properties: {measured['seconds']:.1f} s, {measured['cpu_seconds']:.1f} s of CPU,"
        f" peak {measured['peak_mib']:.0f} MiB",
        flush=True,
    )
    return {"properties": size, **measured}


def _run(home: Path) -> None:
    import dagster as dg

    from vlm_assets.config.settings import EXAMPLE_MODEL, load_settings
    from vlm_assets.home_definitions import build_defs
    from vlm_catalog.catalog import Catalog

    settings = load_settings(home=home, model=str(EXAMPLE_MODEL), devices="cpu:1", commit_seconds=5)
    defs = build_defs(settings)
    started = time.monotonic()
    for name in ("property_descriptions", "property_embeddings"):
        dg.materialize(
            [definition for definition in defs.assets or () if isinstance(definition, dg.AssetsDefinition)],
            selection=[name],
            partition_key=Catalog.open(home).ranges[0].key,
            resources=defs.resources,
        )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - started,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "peak_mib": usage.ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    if RUN in sys.argv:
        _run(Path(sys.argv[-1]))
    else:
        main()
