"""What the canary costs a partition: python -m benchmarks.canary [--properties 1000] [--rounds 5]

First the model's work alone: a partition's properties are described by one loaded model, images in memory,
with the canary before and after as in a run, its answers kept in a control state on disk. The time of each is
taken by itself: in the noise of the whole it would not show. By CPU seconds other programs on the machine
count less; on a GPU only wall time says something. Then whole runs of both assets, one after the other in
this process. The example's models work; other settings come from the environment.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.durability_cost import catalogued
from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model, control_state
from vlm_assets.config.settings import Settings, load_settings
from vlm_catalog.catalog import Catalog
from vlm_engine.canary import Canary, weights_checksum
from vlm_engine.devices.find import Device
from vlm_engine.devices.leases import pin
from vlm_engine.images.images import LoadedProperty
from vlm_engine.ladder import describe_batch
from vlm_engine.protocol import Engine
from vlm_engine.transformers.transformers_engine import TransformersEngine

_TARGET: Final = 0.01


@dataclass(frozen=True)
class Took:
    """Seconds of something."""

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> Took:
    """What one call of the work takes."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - began, time.process_time() - cpu)


def describing(
    settings: Settings, device: Device
) -> tuple[Engine, list[list[LoadedProperty]], Callable[[], object]]:
    """An engine, the partition's properties in batches, and the work on all of them with it."""
    catalog, model = Catalog.open(settings.home), build_vision_language_model(settings)
    (partition,) = catalog.ranges
    work = DescriptionWork.for_range(settings, catalog, partition, model)
    with work.workers(device) as workers:
        loaded = list(workers.feed(work.batch_sizes().plan(work.jobs, max_images=settings.max_images)))
    engine = model.load(device, schema=work.schema, prompt=work.prompt)

    def describe() -> None:
        for batch in loaded:
            describe_batch(engine, work.schema, batch, settings.max_new_tokens)

    return engine, loaded, describe


def _measure_runs(settings: Settings) -> None:
    """Materialize both assets, and print the canary's share of each whole run."""
    import dagster as dg

    from vlm_assets.home_definitions import build_defs

    taken: list[float] = []

    def clocked(method: Callable[[Canary, object], None]) -> Callable[[Canary, object], None]:
        def measured_method(canary: Canary, engine: object) -> None:
            taken.append(timed(lambda: method(canary, engine)).wall)

        return measured_method

    setattr(Canary, "begin", clocked(Canary.begin))  # noqa: B010
    setattr(Canary, "end", clocked(Canary.end))  # noqa: B010
    defs, instance = build_defs(settings), dg.DagsterInstance.ephemeral()
    (partition,) = Catalog.open(settings.home).ranges
    for asset in ("property_descriptions", "property_embeddings"):
        taken.clear()
        began = time.perf_counter()
        dg.materialize(
            [definition for definition in defs.assets or () if isinstance(definition, dg.AssetsDefinition)],
            selection=[asset],
            partition_key=partition.key,
            instance=instance,
            resources=defs.resources,
            run_config={"loggers": {"console": {"config": {"log_level": "WARNING"}}}},
        )
        seconds = time.perf_counter() - began
        canary_seconds = sum(taken)
        print(
            f"a run of {asset}: {seconds:.1f} s, canary {1000 * canary_seconds:.0f} ms:"
            f" {_share(canary_seconds, seconds)}"
        )


def _share(seconds: float, whole: float) -> str:
    share = seconds / whole
    return f"{100 * share:.2f}%, {'within' if share < _TARGET else 'over'} the target of {100 * _TARGET:.0f}%"


def _measure(
    name: str, engine: object, work: Callable[[], object], canary: Callable[[int], Canary], rounds: int
) -> None:
    taken: list[tuple[Took, ...]] = []
    for number in range(rounds + 1):
        measured_canary = canary(number)
        steps: list[Callable[[], object]] = [
            partial(measured_canary.begin, engine),
            work,
            partial(measured_canary.end, engine),
        ]
        taken.append(tuple(timed(step) for step in steps))
    # The first round pays for what is compiled and allocated once, and finds no known answer.
    begins, works, ends = zip(*taken[1:], strict=True)
    for clock in ("wall", "cpu"):
        begin, whole, end = (
            statistics.median(getattr(cost, clock) for cost in costs) for costs in (begins, works, ends)
        )
        print(
            f"{name}, {clock}: begin {1000 * begin:.0f} ms, work {whole:.1f} s, end {1000 * end:.0f} ms:"
            f" {_share(begin + end, begin + whole + end)}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def main() -> None:
    """Measure and print a line for each asset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--properties", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    named = {
        name: "example"
        for name in ("model", "embedding_model")
        if not os.environ.get(f"VLM_ASSETS_{name.upper()}")
    }
    with tempfile.TemporaryDirectory() as folder:
        home = catalogued(Path(folder), arguments.properties)
        settings = load_settings(home=home, **named)
        device = build_gpu(settings).find()[0]
        pin(device)

        def canary(number: int) -> Canary:
            return Canary(control_state(settings), device, f"benchmark/{number}", "benchmark")

        engine, _, describe = describing(settings, device)
        _measure(f"{arguments.properties} descriptions", engine, describe, canary, arguments.rounds)
        if isinstance(engine, TransformersEngine):
            model = engine._model
            size = sum(tensor.nbytes for tensor in model.state_dict().values())
            seconds = min(timed(lambda: weights_checksum(model)).wall for _ in range(3))
            print(f"checksum of {size / 1e6:.1f} MB of weights: {1000 * seconds:.1f} ms")
        _measure_runs(settings)


if __name__ == "__main__":
    main()
