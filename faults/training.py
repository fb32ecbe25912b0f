"""``make test-training``: a training that is killed again and again, against one that never was.

What lives here: starts with ranks and loader's processes drawn anew, SIGKILLs at random moments, and the
comparison of losses, weights and samples. Its model drops activations and its images are jittered, so that
random numbers would show. What does not: single faults (``tests``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from examples.rendered_properties import write_example
from resources.storage.lock_files import taken
from resources.training.objective import DescribeObjective
from resources.training.plan import Sample, TrainingPlan, write_samples
from resources.training.rank import PLAN
from resources.training.rank_processes import RankProcesses
from vlm_assets.settings import EXAMPLE_MODEL

WORKERS, RANKS = (0, 2, 4), (1, 2)


class ShakenObjective(DescribeObjective):
    """The default objective with dropout in the text layers and images in another light each time."""

    def build(self) -> tuple[Any, Any]:
        """See Objective."""
        model, processor = super().build()
        for layer in model.model.text_model.layers:
            layer.self_attn.attention_dropout = 0.1
        return model, processor

    def features(self, sample: Sample, seed: int) -> Any:
        """See Objective."""
        made = super().features(sample, seed)
        if made is None:
            return None
        light = 0.9 + 0.2 * random.Random(seed).random()
        return replace(made, tensors={**made.tensors, "pixel_values": made.tensors["pixel_values"] * light})


class PoisonedObjective(DescribeObjective):
    """The default objective, where the property that the variant is named after has images of NaN."""

    def features(self, sample: Sample, seed: int) -> Any:
        """See Objective."""
        made = super().features(sample, seed)
        if made is None or sample.property_id not in self._plan.variant.split():
            return made
        return replace(
            made, tensors={**made.tensors, "pixel_values": made.tensors["pixel_values"] * float("nan")}
        )


@dataclass(frozen=True)
class Outcome:
    """What a training came to. model, history: digests of the weights and of the losses."""

    model: str
    history: str
    kills: int
    steps: int


def prepare(folder: Path, *, properties: int = 32) -> list[Sample]:
    """Render an example; returns its samples."""
    write_example(folder, properties=properties, seed=7)
    truths = {
        row["property_id"]: row for row in pq.read_table(folder / "example" / "truth.parquet").to_pylist()
    }
    listing = (folder / "example" / "listing.jsonl").read_text().splitlines()
    rows = (json.loads(line) for line in listing)
    return [
        Sample(
            row["property_id"],
            tuple(str(folder / "example" / image) for image in row["images"]),
            truths[row["property_id"]]["truth"],
        )
        for row in rows
        if truths[row["property_id"]]["hard"] is None
    ]


def make_plan(folder: Path, samples: Sequence[Sample], *, steps: int, **changes: Any) -> TrainingPlan:
    """A training's folder with all that its ranks read."""
    (folder / "work").mkdir(parents=True)
    write_samples(folder / "work" / "samples.jsonl", samples)
    plan = TrainingPlan(
        variant="shaken",
        base=str(EXAMPLE_MODEL),
        samples=str(folder / "work" / "samples.jsonl"),
        schema="vlm_assets.property_description:PropertyDescription",
        prompt="Describe the property.",
        objective="faults.training:ShakenObjective",
        learning_rate=1e-3,
        seed=1,
        batch=4,
        microbatches=4,
        steps=steps,
        evaluate=0,
        checkpoint_seconds=0.2,
        limits={"pixels": 65_536, "images": 3, "answer_tokens": 256},
    )
    plan = replace(plan, **changes)
    plan.write(folder / "work" / PLAN)
    return plan


def start(folder: Path, *, ranks: int, workers: int) -> None:
    """Train in ``folder`` until it is done, and print what happens, one event a line."""
    path = folder / "work" / PLAN
    replace(TrainingPlan.read(path), workers=workers).write(path)
    (folder / "export").mkdir(exist_ok=True)
    lock = taken(folder / "lock", seconds=30.0)
    assert lock is not None, "the ranks of a killed start are still there"
    processes = RankProcesses(
        folder=folder / "work",
        export=folder / "export",
        history=folder / "training.jsonl",
        quarantine=folder / "quarantine",
        devices=[""] * ranks,
        lock=lock,
    )
    for event in processes.events():
        print(json.dumps(event), flush=True)


def outcome(folder: Path, *, kills: int = 0) -> Outcome:
    """What a finished training left."""
    history = (folder / "training.jsonl").read_bytes()
    return Outcome(
        hashlib.sha256((folder / "export" / "model.safetensors").read_bytes()).hexdigest(),
        hashlib.sha256(history).hexdigest(),
        kills,
        len(history.splitlines()),
    )


def run_killed(folder: Path, *, kills: int, rng: random.Random) -> Outcome:
    """Train in ``folder`` to the end, killed so often at random moments; sometimes one rank alone."""
    done = 0
    while True:
        ranks, workers = rng.choice(RANKS), rng.choice(WORKERS)
        command = [sys.executable, "-m", "faults.training", "--start", str(folder), str(ranks), str(workers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0, bufsize=0) as child:
            assert child.stdout is not None
            try:
                done += _kill(child, kills - done, rng)
                if child.poll() == -signal.SIGKILL:
                    continue
                said = child.stdout.read()
                if child.wait() != 0:
                    raise RuntimeError(f"a start ended with {child.returncode}: {said[-2000:].decode()}")
                return outcome(folder, kills=done)
            finally:
                child.kill()


def _kill(child: subprocess.Popen[bytes], most: int, rng: random.Random) -> int:
    """Kill one rank of a start now and then, and at last all of it. Returns how often; it may end before."""
    for count in range(most):
        if _ends_before(child, rng):
            return count
        # Three ranks that die without a new step between them are a defect, and end the training.
        if rng.random() < 0.3 and count < 2 and (ranks := children(child.pid)):
            os.kill(rng.choice(ranks), signal.SIGKILL)
        else:
            child.kill()
            child.wait()
            return count + 1
    return most


def _ends_before(child: subprocess.Popen[bytes], rng: random.Random) -> bool:
    """Wait for a random moment of this start; whether it came to its end before."""
    assert child.stdout is not None
    if rng.random() < 0.2:  # while it starts
        try:
            child.wait(rng.uniform(0.0, 6.0))
        except subprocess.TimeoutExpired:
            return False
        return True
    for line in child.stdout:
        if json.loads(line)["event"] == "restored":
            break
    deadline = time.monotonic() + rng.uniform(0.0, 2.0)
    while (left := deadline - time.monotonic()) > 0:
        if select.select([child.stdout], [], [], left)[0] and not os.read(child.stdout.fileno(), 1 << 16):
            return True
    return child.poll() is not None


def children(pid: int) -> list[int]:
    """The processes that a process has started, the oldest first."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def campaign(folder: Path, *, kills: int, steps: int, seed: int) -> tuple[Outcome, Outcome]:
    """An uninterrupted training and a killed one of the same plan: what each came to."""
    samples = prepare(folder)
    make_plan(folder / "whole", samples, steps=steps)
    start(folder / "whole", ranks=1, workers=0)
    make_plan(folder / "killed", samples, steps=steps)
    found = run_killed(folder / "killed", kills=kills, rng=random.Random(seed))
    return outcome(folder / "whole"), found


def main() -> int:
    """0: losses, weights and samples are equal, bit for bit. 1: they are not."""
    parser = argparse.ArgumentParser(description="Kill a training at random moments.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=20240229)
    parser.add_argument("--start", nargs=3, metavar=("FOLDER", "RANKS", "WORKERS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        start(Path(given.start[0]), ranks=int(given.start[1]), workers=int(given.start[2]))
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="training-") as folder:
        whole, killed = campaign(Path(folder), kills=given.kills, steps=given.steps, seed=given.seed)
    equal = (whole.model, whole.history) == (killed.model, killed.history)
    print(
        f"{killed.kills} kills over {killed.steps} steps in {(time.monotonic() - began) / 60:.0f} min:"
        f" losses and weights {'equal, bit for bit' if equal else 'DIFFER'} (seed {given.seed})"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
