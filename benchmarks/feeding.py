"""What feeding and leaving bring: python -m benchmarks.feeding [--properties 160] [--rounds 10] [--skewed]

The same properties, images in memory, are described by turns in three ways: batch after batch with
transformers' own decoding, which pads answers to the longest; the same with finished answers leaving; and
that fed, so that the processor runs beside the model. One process, one loaded model, the order changing
from round to round, so that what else the machine does meets all alike. Settings come from the environment as
always: the example model on one CPU slot unless they say otherwise. ``--skewed``: answers end after lengths
that are drawn evenly from 16 to 240 tokens, in place of the schema's grammar; the example model's own answers
are all about as long.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.durability_cost import catalogued
from benchmarks.gpu_models import LengthsOfBatch
from resources.devices.pinning import pin
from resources.engine.feeding import Feeding
from resources.engine.ladder import describe_batch
from resources.images.images import LoadedProperty
from vlm_assets.assets.property_descriptions import DescriptionWork
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.models import build_vision_language_model
from vlm_assets.resource_settings import build_gpu
from vlm_assets.settings import Settings, load_settings

SKEWED = (16, 240)


class Bench:
    """The work, loaded: what a run has in its hands when the first batch comes."""

    def __init__(self, settings: Settings, *, skewed: bool) -> None:
        catalog = Catalog.open(settings.home)
        device = build_gpu(settings).find()[0]
        pin(device)
        model = build_vision_language_model(settings)
        (wanted,) = catalog.ranges
        self._work = DescriptionWork.of(settings, catalog, wanted, model)
        batches = self._work.plan(frozenset())
        with self._work.workers(device, batches) as workers:
            self._batches: Sequence[Sequence[LoadedProperty]] = list(self._work.load(workers, batches))
        self._engine: Any = model.load(device, schema=self._work.schema, prompt=self._work.prompt)
        self.spent: dict[str, float] = {}
        self._schema: Any = self._work.schema
        if skewed:
            self._engine._grammar = Skewed(self._engine._tokenizer)
            self._schema = Anything()

    def padded(self) -> list[str | None]:
        """Batch after batch, each until its longest answer ends."""
        return self._loop(leaving=False)

    def leaving(self) -> list[str | None]:
        """Batch after batch, from which finished answers leave."""
        return self._loop(leaving=True)

    def fed(self) -> list[str | None]:
        """The same, with the processor beside the model."""
        self._engine._decodes_itself = True
        engine = Unclosed(self._engine)
        with Feeding(engine, self._schema, self._work.ladder, end_batches=lambda: None) as feeding:
            batches = list(feeding.described(iter(self._batches)))
        self.spent = vars(feeding.spent)
        return self._texts(one for batch in batches for one in batch.described)

    def _loop(self, *, leaving: bool) -> list[str | None]:
        self._engine._decodes_itself = leaving
        ladder = self._work.ladder
        answered = [describe_batch(self._engine, self._schema, batch, ladder) for batch in self._batches]
        return self._texts(itertools.chain.from_iterable(answered))

    @staticmethod
    def _texts(described: Any) -> list[str | None]:
        return [repr(one.description) for one in described]


class Unclosed:
    """An engine that outlives a feeding."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Stay open for the next round."""


class Skewed:
    """Ends answers at lengths drawn for them, the same for a batch of the same size."""

    def __init__(self, tokenizer: Any) -> None:
        self._stop = tokenizer.eos_token_id

    def for_batch(self, size: int) -> LengthsOfBatch:
        """The logits processor of a batch."""
        lengths = [random.Random(at).randint(*SKEWED) for at in range(size)]
        return LengthsOfBatch(lengths, stop=self._stop, never=[], words=0)


class Anything:
    """A schema that any answer fits."""

    def parse(self, text: str) -> dict[str, str]:
        """The text."""
        return {"text": text}


def main() -> None:
    """Measure by turns and print the paired ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--properties", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--skewed", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = catalogued(Path(folder), arguments.properties)
        bench = Bench(load_settings(home=home), skewed=arguments.skewed)
        ways: dict[str, Callable[[], list[str | None]]] = {
            "padded": bench.padded,
            "leaving": bench.leaving,
            "fed": bench.fed,
        }
        texts = {name: way() for name, way in ways.items()}  # and what is compiled and allocated once
        assert texts["padded"] == texts["leaving"] == texts["fed"], "the three ways must answer alike"
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.rounds):
            names = list(ways)
            for name in names[number % 3 :] + names[: number % 3]:
                began, cpu_began = time.perf_counter(), time.process_time()
                ways[name]()
                seconds[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - cpu_began)
        for name in ways:
            rate = arguments.properties / statistics.median(seconds[name])
            print(f"{name}: {rate:.1f} properties/s, {statistics.median(cpu[name]):.2f} s of CPU")
        for name in ("leaving", "fed"):
            ratios = [slow / fast for slow, fast in zip(seconds["padded"], seconds[name], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{name} against padded: {middle:.3f}, half of the rounds {low:.3f} to {high:.3f}")
        print("of the last fed round:", {name: round(value, 2) for name, value in bench.spent.items()})
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
