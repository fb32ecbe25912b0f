"""Materializes one partition again and again, each time in a forked process that may be killed on the way.

Run as a script: one order a line (JSON) on stdin, one answer a line on stdout. torch, the model and Dagster
are loaded once, here, where nothing is ever computed; everything else is what a run does: lease, journal,
decode workers, engine, checks, publication.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

# One thread, set before torch is imported: a forked child has none of its parent's.
os.environ["OMP_NUM_THREADS"] = "1"

import dagster as dg
import duckdb  # noqa: F401  # the checks import it late
import pyarrow as pa
from PIL import Image

from faults.file_operations import FileOperations, die, strike_at
from resources.text_embedding import TextEmbedder, TextEmbeddingModel
from resources.vision_language_model import VisionLanguageModel
from tests.support.scripted_models import ScriptedEngine
from vlm_assets.assets import description_work, partition
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.home_definitions import build_defs
from vlm_durable.journal.journal import Journal
from vlm_engine.devices.find import Device
from vlm_engine.model_source import ModelSource
from vlm_engine.prompt import FurtherQuestion, Prompt, build_prompt
from vlm_engine.protocol import Engine
from vlm_engine.schema import DescriptionSchema, load_schema
from vlm_engine.transformers.transformers_engine import TransformersEngine

# Its first array has pyarrow import pandas where that is installed: 0.2 s here, or else in each child.
pa.array([0])

ASSET = "property_descriptions"
_loaded: list[Engine] = []
_embedders: list[TextEmbedder] = []
_on_load: list[Callable[[], None]] = []


class LoadedModel(VisionLanguageModel):
    """The same engine, loaded before the fork and not after it."""

    def load(
        self,
        device: Device,
        *,
        schema: DescriptionSchema,
        prompt: Prompt,
        further: Sequence[FurtherQuestion] = (),
    ) -> Engine:
        """The engine of this script's process; its work begins now."""
        _on_load[0]()
        return _loaded[0]


class ScriptedModel(VisionLanguageModel):
    """A model that answers at once."""

    def load(self, device: Device, **asked: object) -> Engine:
        """A scripted engine; its work begins now."""
        _on_load[0]()
        return ScriptedEngine(self.source, _loaded[0].image_tokens)


class LoadedEmbedder(TextEmbeddingModel):
    """The same embedder, loaded before the fork and not after it."""

    def load(self, device: Device) -> TextEmbedder:
        """The embedder of this script's process."""
        return _embedders[0]


def live(order: dict[str, Any], say: Callable[..., Any]) -> None:
    """One run of a partition's descriptions, or of the ``assets`` of the order, killed if so ordered.

    It dies before the ``operation``-th file operation (``torn``: half of a write let through), after the
    ``batch``-th submitted batch, or ``seconds`` after its work began. scripted: nothing is computed.
    """
    chosen = dict(order["settings"])
    partition.COMMIT_ROWS = chosen.pop("commit_rows", partition.COMMIT_ROWS)
    description_work.PREFETCH_BATCHES = chosen.pop("prefetch_batches", description_work.PREFETCH_BATCHES)
    settings = load_settings(home=order["home"], devices="cpu:1", **chosen)
    model_class = ScriptedModel if order.get("scripted") else LoadedModel
    model = model_class(model=settings.model)
    embedder = LoadedEmbedder(model=settings.embedding_model)
    loaded = {"vision_language_model": model, "text_embedding_model": embedder}
    defs = build_defs(settings, resource_overrides=loaded)
    submit, batches = Journal.submit, 0

    def submit_and_perhaps_die(journal: Journal, table: Any) -> None:
        nonlocal batches
        if order.get("scripted"):
            journal.flush()  # As where a model computes for longer than a commit takes.
        submit(journal, table)
        say(submitted=[[time.monotonic(), table.num_rows]])
        batches += 1
        if batches == order.get("batch", 0):
            die()

    def begin() -> None:
        say(began=time.monotonic())
        if "seconds" in order:
            threading.Timer(order["seconds"], lambda: (say(died=time.monotonic()), die())).start()

    Journal.submit = submit_and_perhaps_die
    _on_load.append(begin)
    instance = dg.DagsterInstance.ephemeral()
    before = strike_at(order.get("operation", 0), torn=order.get("torn", False))
    operations = FileOperations(settings.home, before)
    operations.install()
    result = dg.materialize(
        defs.assets,
        selection=order.get("assets", [ASSET]),
        partition_key=order["key"],
        resources=defs.resources,
        instance=instance,
        raise_on_error=False,
    )
    failed = [event for event in result.all_events if event.is_step_failure]
    (event,) = result.asset_materializations_for_node(ASSET) if result.success else (None,)
    restored = event.metadata.get("restored rows") if event else None
    say(
        success=result.success,
        failures=[event.step_failure_data.error.to_string() for event in failed],
        restored=restored.value if restored else None,
        operations=operations.count,
    )


def fork(order: dict[str, Any]) -> dict[str, Any]:
    """A life in a child; what it said, and whether it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        write = os.write
        code = 1
        try:
            live(order, lambda **said: write(writing, (json.dumps(said) + "\n").encode()))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    life: dict[str, Any] = {"submitted": []}
    with os.fdopen(reading) as stream:
        for line in stream:
            said = json.loads(line)
            life["submitted"] += said.pop("submitted", [])
            life |= said
    _, status = os.waitpid(child, 0)
    return {"killed": os.waitstatus_to_exitcode(status) == -signal.SIGKILL, **life}


def load_all(settings: Settings) -> None:
    """What every run needs, here and not in each child: Dagster's stores, the model, the image formats."""

    @dg.asset
    def nothing() -> None:
        """So that Dagster imports what a run needs."""

    dg.materialize([nothing])
    Image.init()
    schema = load_schema(settings.description_schema)
    prompt = build_prompt(schema, settings.prompt)
    _loaded.append(
        TransformersEngine(ModelSource(settings.model), schema=schema, prompt=prompt, device="cpu")
    )
    _embedders.append(TextEmbedder(ModelSource(settings.embedding_model), device="cpu"))


def main() -> None:
    """Load once, then answer orders."""
    load_all(load_settings())
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(30)  # those that loaded weights are about to end
    threads = threading.active_count()
    assert threads == 1, f"{threads} threads here: a fork would lose all but one"
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
