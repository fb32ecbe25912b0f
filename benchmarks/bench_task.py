"""The work of ``make bench``: rendered properties, in the order and the batches of this project's own plan.

What lives here: making the images once, the catalogue and Dagster's state that a run of ours starts from, and
the task of one run. What does not: running anything (bench_runs.py).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders.task import Task
from examples.rendered_properties import list_properties, write_example
from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_assets.config.settings import EXAMPLE_MODEL, PREFIX, Settings, load_settings
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_engine.prompt import build_prompt
from vlm_engine.schema import load_schema

RENDERED = 240
"""Properties whose photos are rendered; more of them show the photos of these again."""

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DAFT_ANALYTICS_ENABLED": "0",
    "DAFT_PROGRESS_BAR": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Workload:
    """What all runs of a bench are made from. template: a home with its catalogue and Dagster's state."""

    settings: Settings
    template: Path
    properties: Path
    threads: int

    @classmethod
    def prepare(cls, work: Path, folder: Path, *, properties: int, threads: int, seed: int) -> Workload:
        """Render what is not there yet (below ``work``, which is kept), and catalogue it below ``folder``."""
        rendered = min(properties, RENDERED)
        listing = write_example(work / f"example-{rendered}-{seed}", properties=rendered, seed=seed)
        shown = [
            list(listed.images)
            for listed in list_properties(properties=rendered, seed=seed)
            if listed.hard is None
        ]
        many = listing.with_name(f"{properties}.jsonl")
        lines = (
            json.dumps({"property_id": f"p{number:06d}", "images": images}) + "\n"
            for number, images in zip(range(properties), itertools.cycle(shown), strict=False)
        )
        many.write_text("".join(lines))
        template = folder / "template"
        ingest(many, template, range_size=properties)
        # All else as it is by default: batches, workers, durability and checks.
        settings = load_settings(home=template, model=str(EXAMPLE_MODEL), devices="cpu:1")
        prepare_dagster_home(template / "dagster", catalog_id=Catalog.open(template).catalog_id, slots=1)
        ordered = folder / "properties.jsonl"
        ordered.write_text("".join(json.dumps(row) + "\n" for row in _in_order_of_the_plan(settings)))
        return cls(settings, template, ordered, threads)

    def run(self, folder: Path, *, batch: int, guided: bool) -> tuple[Task, dict[str, str]]:
        """A new task and its environment, below an empty folder."""
        home = folder / "home"
        shutil.copytree(self.template, home)
        settings = self.settings
        schema = load_schema(settings.description_schema)
        task = Task(
            properties=str(self.properties),
            output=str(home / DESCRIPTIONS),
            marks=str(folder / "marks.jsonl"),
            model=str(settings.model),
            prompt=build_prompt(schema, settings.prompt).text,
            description_schema=settings.description_schema,
            batch=batch,
            guided=guided,
            max_new_tokens=settings.max_new_tokens,
            max_images=settings.max_images,
            max_pixels=settings.max_pixels,
            threads=self.threads,
            cores=len(os.sched_getaffinity(0)),
        )
        Path(task.output).mkdir(exist_ok=True)
        return task, self._environment(home)

    def _environment(self, home: Path) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith((PREFIX, "RAY_", "DAFT_", "DAGSTER_", "OMP_", "MKL_"))
            and name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
        }
        chosen: Mapping[str, Any] = {
            "home": home,
            "model": self.settings.model,
            "devices": self.settings.devices,
        }
        return {
            **inherited,
            **_OFFLINE,
            **{PREFIX + name.upper(): str(value) for name, value in chosen.items()},
            "DAGSTER_HOME": str(home / "dagster"),
            "OMP_NUM_THREADS": str(self.threads),
            "CUDA_VISIBLE_DEVICES": "",
        }


def _in_order_of_the_plan(settings: Settings) -> list[dict[str, Any]]:
    catalog = Catalog.open(settings.home)
    (only,) = catalog.ranges
    work = DescriptionWork.for_range(settings, catalog, only, build_vision_language_model(settings))
    return [
        {
            "property_id": job.property_id,
            "ordinal": job.ordinal,
            "images": [str(catalog.image_path(uri)) for uri in job.image_uris],
        }
        for batch in work.batch_sizes().plan(work.jobs, max_images=settings.max_images)
        for job in batch
    ]
