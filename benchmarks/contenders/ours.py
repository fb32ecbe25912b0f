"""This project: the partition is materialized as a run does it, durability and checks on.

The product's own definitions, settings and order of work; nothing is replaced. Three of its methods are
wrapped to mark moments, which costs a call a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from benchmarks.contenders.task import Task


def main() -> None:
    """Materialize the only partition of the home of the settings."""
    _mark_moments(Task.read(sys.argv[1]))

    import dagster as dg

    from vlm_assets.config.settings import current_settings
    from vlm_assets.definitions import defs
    from vlm_catalog.catalog import Catalog
    from vlm_catalog.ranges import DESCRIPTIONS

    (only,) = Catalog.open(current_settings().home).ranges
    with dg.DagsterInstance.get() as instance:
        dg.materialize(
            [definition for definition in defs.assets or () if isinstance(definition, dg.AssetsDefinition)],
            selection=[DESCRIPTIONS],
            partition_key=only.key,
            resources=defs.resources,
            instance=instance,
        )


def _mark_moments(task: Task) -> None:
    from resources.vision_language_model import VisionLanguageModel
    from vlm_durable.journal.journal import Journal

    submitted: list[int] = []

    def submit(original: Callable[..., None], journal: Journal, rows: Any) -> None:
        original(journal, rows)
        submitted.append(rows.num_rows)
        if len(submitted) == 1:
            task.mark("first_batch", rows.num_rows)

    def flush(original: Callable[..., None], journal: Journal) -> None:
        original(journal)
        if submitted:
            task.mark("durable", sum(submitted))

    def load(original: Callable[..., Any], model: VisionLanguageModel, *args: Any, **kwargs: Any) -> Any:
        engine = original(model, *args, **kwargs)
        describe = engine.describe

        def first(*args: Any, **kwargs: Any) -> Any:
            task.mark("asked")
            engine.describe = describe
            return describe(*args, **kwargs)

        engine.describe = first
        return engine

    _wrap(Journal, "submit", submit)
    _wrap(Journal, "flush", flush)
    _wrap(VisionLanguageModel, "load", load)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(owner, name, method)


if __name__ == "__main__":
    main()
