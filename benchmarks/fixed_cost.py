"""What a partition costs however small it is: python -m benchmarks.fixed_cost [--repeat 5]

A partition of one property is materialized in a fresh process, as a run does it, on Dagster's state in
SQLite. CPU seconds of the process and its children, in three parts: imports (outermost ones, wherever they
happen), loading the model without them, and all else, which is the fixed cost. Below it, where that goes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUN = "--run"


class CpuClock:
    """CPU seconds of imports, of loading the model, and of what else was asked to be timed, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._here = threading.local()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its CPU time in this thread added to ``name``, without what is timed inside of it."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            above = getattr(self._here, "inside", None)
            if above is not None and above[0] == name:
                return function(*args, **kwargs)
            frame: list[Any] = [name, 0.0]
            self._here.inside = frame
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + took - frame[1]
                self._here.inside = above
                if above is not None:
                    above[1] += took

        return timed

    def time_imports(self) -> None:
        """Time every import from now on, at whatever level of the program it stands."""
        import importlib

        machinery: Any = importlib._bootstrap
        machinery._find_and_load = self.around("imports", machinery._find_and_load)


def main() -> None:
    """Measure and print one line for each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template = _template(Path(folder))
        measured = [_measure(template, Path(folder)) for _ in range(arguments.repeat + 1)][1:]
        for part in measured[0]:
            values = [run[part] for run in measured]
            print(
                f"{part}: median {statistics.median(values):.2f} s of CPU"
                f" ({min(values):.2f} to {max(values):.2f})"
            )


def _template(folder: Path) -> Path:
    from examples.rendered_properties import write_example
    from vlm_assets.webserver.home import prepare_dagster_home
    from vlm_catalog.catalog import Catalog
    from vlm_catalog.ingest import ingest

    home = folder / "template"
    ingest(write_example(folder, properties=1, seed=1), home, close=True)
    prepare_dagster_home(home / "dagster", catalog_id=Catalog.open(home).catalog_id, slots=1)
    return home


def _measure(template: Path, folder: Path) -> dict[str, float]:
    from vlm_assets.config.settings import EXAMPLE_MODEL

    home = folder / "home"
    shutil.copytree(template, home)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "VLM_ASSETS_HOME": str(home),
        "VLM_ASSETS_MODEL": str(EXAMPLE_MODEL),
        "VLM_ASSETS_DEVICES": "cpu:1",
        "DAGSTER_HOME": str(home / "dagster"),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fixed_cost", RUN],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(home)
    timed: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    so_far, children = timed.pop("so far"), timed.pop("children")
    imports, load = timed.pop("imports"), timed.pop("model load")
    parts = {**timed, "worker processes": children, "ending of the process": total - so_far - children}
    fixed = total - imports - load
    parts["all else"] = fixed - sum(parts.values())
    return {
        "all": total,
        "imports": imports,
        "model load": load,
        "fixed cost": fixed,
        **{f"  {name}": seconds for name, seconds in parts.items()},
    }


def _run() -> None:
    clock = CpuClock()
    clock.time_imports()

    import dagster as dg

    from resources.vision_language_model import VisionLanguageModel
    from vlm_assets.assets.description_work import DescriptionWork
    from vlm_assets.assets.joined_sets import JoinedSets
    from vlm_assets.config.settings import current_settings
    from vlm_assets.definitions import defs
    from vlm_catalog.catalog import Catalog
    from vlm_catalog.ranges import DESCRIPTIONS
    from vlm_durable.versions.published import PublishedPartitions

    for name, owner, method in (
        ("model load", VisionLanguageModel, "load"),
        ("describing", JoinedSets, "describe"),
        ("checks", DescriptionWork, "check"),
        ("metadata", DescriptionWork, "metadata"),
        ("staging", PublishedPartitions, "stage"),
        ("publishing", PublishedPartitions, "publish"),
        ("Dagster's events", dg.DagsterInstance, "handle_new_event"),
    ):
        setattr(owner, method, _method(clock.around(name, getattr(owner, method))))
    (only,) = Catalog.open(current_settings().home).ranges
    with clock.around("Dagster's instance", dg.DagsterInstance.get)() as instance:
        dg.materialize(
            [definition for definition in defs.assets or () if isinstance(definition, dg.AssetsDefinition)],
            selection=[DESCRIPTIONS],
            partition_key=only.key,
            resources=defs.resources,
            instance=instance,
        )
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    children = ended.ru_utime + ended.ru_stime
    print(json.dumps({**clock.seconds, "so far": time.process_time(), "children": children}))


def _method(timed: Callable[..., Any]) -> Callable[..., Any]:
    """As a function, which a class binds."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return timed(*args, **kwargs)

    return method


if __name__ == "__main__":
    if RUN in sys.argv:
        _run()
    else:
        main()
