"""Which modules a property passes from the catalogue to its published row: python -m benchmarks.data_path

Two partitions are materialized with the example model, one of 4 and one of 16 properties. ``sys.setprofile``
counts the calls of functions of ours in every thread, from the start of the asset's function to the end of
the run. A module whose calls grow with the properties works for each property or batch; all others work
once a partition. What a worker process calls to read and decode an image is not seen.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import dagster as dg

from examples.rendered_properties import write_example
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.home_definitions import build_defs
from vlm_catalog.ingest import ingest

ASSET = "property_descriptions"
_FUNCTION = "described_assets"
"""The asset's function."""
SIZES = (4, 16)
_CHECKOUT = Path(__file__).resolve().parents[1]
_OURS = tuple(
    f"{_CHECKOUT / package}/"
    for package in (
        "vlm_durable",
        "vlm_engine",
        "vlm_catalog",
        "resources",
        "sensors",
        "vlm_assets",
        "vlm_results",
        "vlm_training",
        "vlm_cluster",
    )
)


class Calls(Counter[str]):
    """Calls of each of our modules, counted while the asset's function runs."""

    def __init__(self) -> None:
        super().__init__()
        self._on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """A profile function. ``<module>`` is an import."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_OURS) or code.co_name == "<module>":
            return
        self._on = self._on or code.co_name == _FUNCTION
        if self._on:
            self[str(Path(code.co_filename).relative_to(_CHECKOUT))] += 1


def main() -> None:
    """Print the modules that work for each property, then those that work once a partition."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = (calls_of_modules(Path(folder) / str(size), size) for size in SIZES)
    grown = {name for name in large if large[name] - small[name] >= SIZES[1] // SIZES[0]}
    for title, names in (("each property or batch", grown), ("once a partition", {*small, *large} - grown)):
        print(f"{title}: {len(names)} modules")
        print("".join(f"  {name}\n" for name in sorted(names)))


def calls_of_modules(folder: Path, size: int) -> Calls:
    """The calls in a run that describes one partition of so many properties, in a home below the folder."""
    folder.mkdir()
    source = write_example(folder, properties=size, seed=7)
    images = json.loads(source.read_text().splitlines()[0])["images"][:2]
    lines = [json.dumps({"property_id": f"p{number}", "images": images}) + "\n" for number in range(size)]
    source.write_text("".join(lines))
    home = folder / "home"
    (property_range,) = ingest(source, home, range_size=size).new_ranges
    settings = load_settings(home=home, model="example", devices="cpu:1", batch_size=4, decode_workers=1)
    return _materialized(settings, property_range.key)


def _materialized(settings: Settings, key: str) -> Calls:
    calls, defs = Calls(), build_defs(settings)
    assets: Any = defs.assets
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        dg.materialize(assets, selection=[ASSET], partition_key=key, resources=dict(defs.resources or {}))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


if __name__ == "__main__":
    main()
