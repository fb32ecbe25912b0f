"""The default size of batches against sizes set by hand: ``python -m benchmarks.batch_sizes``.

Real partitions through the product, in one process: first ``VLM_ASSETS_BATCH_IMAGES=auto`` describes the same
properties again and again, as later partitions would, and learns; then each size and ``auto`` take turns, so
that the ratio holds on a busy machine. There are as many rounds as there is time for. Models: the example
model on rendered properties, or a shape of gpu_models.py with random weights. The target: auto reaches 95% of
the best size whose batches take 20 s at most.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import dagster as dg

from benchmarks.gpu_loops import PROMPT, render_jpegs
from benchmarks.partitions import SCHEMA, make_home, materialize, save_model, seconds_of_work
from examples.rendered_properties import write_example
from vlm_assets.config.settings import EXAMPLE_MODEL, load_settings
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_engine.batches import BATCH_SECONDS

TARGET: Final = 0.95
RENDERED: Final = 120
SIDE: Final = 112
"""Of an image for a model with random weights: a few tokens, so that a CPU sees many images."""

Size = int | str


def prepared(options: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """The key of the one partition, and the settings under which it is described."""
    home = folder / "home"
    if options.model == "example":
        listing = write_example(folder / "rendered", properties=RENDERED, seed=7)
        images = sorted(str(path) for path in (listing.parent / "images").rglob("*.jpg"))
        chosen: dict[str, Any] = {"model": str(EXAMPLE_MODEL)}
    else:
        images = render_jpegs(folder, 24, (640, 480), 2)
        save_model(options.model, folder / "model", device="cpu", side=SIDE)
        chosen = {
            "model": str(folder / "model"),
            "description_schema": SCHEMA,
            "prompt": PROMPT.text,
            "max_pixels": SIDE * SIDE,
        }
    (key,) = make_home(home, images, partitions=1, properties=options.properties, images_each=options.images)
    return key, {"home": home, "devices": "cpu:1", "engine": "transformers", **chosen}


def main() -> None:
    """Print a line for each size, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="example", help="example, or a shape such as tiny-qwen2.5-vl")
    parser.add_argument("--properties", type=int, default=1000, help="of the partition")
    parser.add_argument("--images", type=int, default=3, help="of a property; every other has one less")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 128, 256, 512])
    parser.add_argument("--learn", type=int, default=4, help="partitions by auto before it is compared")
    parser.add_argument("--minutes", type=float, default=11.0, help="one round is finished in any case")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, dg.DagsterInstance.ephemeral() as instance:
        key, chosen = prepared(options, Path(name))

        def describe(size: Size) -> tuple[float, float, str]:
            """Properties a second, seconds of the longest batch, and the size as the page says it."""
            settings = load_settings(**chosen, batch_images=size)
            measured = materialize(settings, key, [DESCRIPTIONS], instance, recompute=True)
            rate = options.properties / seconds_of_work(measured)
            print(f"  {size!s:>6} {rate:8.2f} properties/s   {measured['batches']}", flush=True)
            return rate, measured["seconds of the longest batch"], measured["batches"]

        print(f"{options.model}, {options.properties} properties: auto learns")
        for _ in range(options.learn):
            describe("auto")
        sizes: list[Size] = [*options.sizes, "auto"]
        measured: dict[Size, list[tuple[float, float, str]]] = {size: [] for size in sizes}
        for number in itertools.count():
            print(f"round {number + 1}")
            round_began = time.monotonic()
            for at in range(len(sizes)):
                size = sizes[(at + number) % len(sizes)]
                measured[size].append(describe(size))
            ended = time.monotonic()
            if ended - began + (ended - round_began) > 60 * options.minutes:
                break
    rates = {size: statistics.median(turn[0] for turn in taken) for size, taken in measured.items()}
    longest = {size: statistics.median(turn[1] for turn in taken) for size, taken in measured.items()}
    print("images a batch   properties/s   longest batch")
    for size in sizes:
        print(f"{size!s:>14} {rates[size]:14.2f} {longest[size]:13.1f} s")
    allowed = [size for size in options.sizes if longest[size] <= BATCH_SECONDS] or [min(options.sizes)]
    best = max(allowed, key=rates.__getitem__)
    ratio = rates["auto"] / rates[best]
    each = [auto[0] / hand[0] for auto, hand in zip(measured["auto"], measured[best], strict=True)]
    print(
        f"auto reaches {ratio:.3f} of {best} images, the best (rounds: {min(each):.3f} to {max(each):.3f});"
    )
    print(f"target {TARGET}: {'reached' if ratio >= TARGET else 'not reached'}")


if __name__ == "__main__":
    main()
