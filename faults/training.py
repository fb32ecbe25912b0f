"""``make test-training``: a training that is killed again and again, against one that never was.

What lives here: starts with ranks and loader's processes drawn anew, SIGKILLs at random moments, the
comparison of losses, weights and samples, and damage to the newest checkpoint. Its model drops activations
and its images are jittered, so that random numbers would show. What does not: single faults (``tests``).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
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
from vlm_assets.config.settings import EXAMPLE_MODEL
from vlm_durable.files.lock_files import acquire_lock
from vlm_training.checkpoints import Checkpoints
from vlm_training.objective import DescribeObjective
from vlm_training.order import SampleOrder, seed_of
from vlm_training.rank import PLAN
from vlm_training.rank_processes import RankProcesses
from vlm_training.training_plan import Sample, SampleFile, TrainingPlan, write_samples

WORKERS, RANKS = (0, 2, 4), (1, 2)
FALLEN = "fallen"
"""In a training's folder: the signal of ``FallenObjective`` was sent."""
LEARNED = "learned"
"""In a training's folder: an empty file for each sample that a step computed. Its name has both."""


class ShakenObjective(DescribeObjective):
    """The default objective with dropout in the text layers and images in another light each time.

    It notes which samples a step really computed, however they came to it.
    """

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
        tensors = {**made.tensors, "pixel_values": made.tensors["pixel_values"] * light}
        return f"{seed} {sample.property_id}", replace(made, tensors=tensors)

    def collate(self, features: Sequence[Any]) -> Any:
        """See Objective."""
        return [name for name, _ in features], super().collate([made for _, made in features])

    def loss(self, model: Any, heads: Any, batch: Any, *, step: int) -> tuple[Any, float]:
        """See Objective."""
        names, made = batch
        for name in names if model.training else ():
            (Path(self._plan.samples).with_name(LEARNED) / f"{step} {name}").touch()
        return super().loss(model, heads, made, step=step)


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


class FallenObjective(ShakenObjective):
    """The same. The variant is named after a signal and a sample number: who loads it gets that, once."""

    def features(self, sample: Sample, seed: int) -> Any:
        """See Objective."""
        name, number = self._plan.variant.split()
        if seed == seed_of("sample", self._plan.seed, int(number)):
            with contextlib.suppress(FileExistsError):
                Path(self._plan.samples).with_name(FALLEN).touch(exist_ok=False)
                os.kill(os.getpid(), signal.Signals[name])
        return super().features(sample, seed)


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


def make_plan(folder: Path, samples: Sequence[Sample], *, steps: int | None, **changes: Any) -> TrainingPlan:
    """A training's folder with all that its ranks read."""
    (folder / "work" / LEARNED).mkdir(parents=True)
    write_samples(folder / "work" / "samples.jsonl", samples)
    plan = TrainingPlan(
        variant="shaken",
        base=str(EXAMPLE_MODEL),
        samples=str(folder / "work" / "samples.jsonl"),
        schema="vlm_assets.config.property_description:PropertyDescription",
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


def processes(folder: Path, *, ranks: int, workers: int = 0, **changes: Any) -> RankProcesses:
    """The ranks of a training in ``folder``, which are not started yet."""
    path = folder / "work" / PLAN
    replace(TrainingPlan.read(path), workers=workers).write(path)
    (folder / "export").mkdir(exist_ok=True)
    lock = acquire_lock(folder / "lock", seconds=30.0)
    assert lock is not None, "the ranks of a killed start are still there"
    return RankProcesses(
        folder=folder / "work",
        export=folder / "export",
        history=folder / "training.jsonl",
        quarantine=folder / "quarantine",
        devices=[""] * ranks,
        lock=lock,
        **changes,
    )


def start(folder: Path, *, ranks: int, workers: int) -> None:
    """Train in ``folder`` until it is done, and print what happens, one event a line."""
    for event in processes(folder, ranks=ranks, workers=workers).events():
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


class Kills:
    """The kills of one training, spread over all of its steps. The moments follow from its progress.

    So a slow machine moves no kill, and the last one comes near the end.
    """

    def __init__(self, count: int, steps: int, rng: random.Random) -> None:
        self.count, self.done = count, 0
        self._steps, self._rng = steps, rng
        self._start_seconds = 6.0

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        """Kill one rank of a start now and then, and at last all of it. The start may end before."""
        alone = 0
        while self.done < self.count and not self._ends_before(child):
            self.done += 1
            # Three ranks that die without a new step between them are a defect, and end the training.
            if self._rng.random() < 0.3 and alone < 2 and (ranks := children(child.pid)):
                os.kill(self._rng.choice(ranks), signal.SIGKILL)
                alone += 1
            else:
                child.kill()
                child.wait()
                return

    def _ends_before(self, child: subprocess.Popen[bytes]) -> bool:
        """Wait for a random moment of this start; whether it came to its end before."""
        began = time.monotonic()
        if self._rng.random() < 0.2:  # while it starts
            event = _until(child, ("restored",), began + self._rng.uniform(0.0, self._start_seconds))
            return bool(event["event"] == "ended")
        event = _until(child, ("restored",))
        if event["event"] == "ended":
            return True
        last, seconds = time.monotonic(), 0.2
        self._start_seconds = last - began
        # The last tenth is not for kills: a start may get further than it says.
        steps_left = max(0.0, 0.9 * self._steps - event["step"])
        steps_more = self._rng.uniform(0.0, 2.0 * steps_left / (self.count - self.done + 1))
        while steps_more >= 1.0:
            if _until(child, ("step",))["event"] == "ended":
                return True
            steps_more -= 1.0
            seconds, last = time.monotonic() - last, time.monotonic()
        return bool(_until(child, (), last + steps_more * seconds)["event"] == "ended")


def _until(
    child: subprocess.Popen[bytes], events: Sequence[str], deadline: float = math.inf
) -> dict[str, Any]:
    """Listen to a start until one of these events, its end ("ended"), or the deadline ("late")."""
    assert child.stdout is not None
    while (remaining := deadline - time.monotonic()) > 0:
        if select.select([child.stdout], [], [], None if math.isinf(remaining) else remaining)[0]:
            event = json.loads(child.stdout.readline() or b'{"event": "ended"}')
            if event["event"] in (*events, "ended"):
                return dict(event)
    return {"event": "late"}


def run_killed(folder: Path, *, kills: int, rng: random.Random) -> Outcome:
    """Train in ``folder`` to the end, killed so often at random moments; sometimes one rank alone."""
    steps = TrainingPlan.read(folder / "work" / PLAN).steps
    assert steps is not None
    planned = Kills(kills, steps, rng)
    while True:
        with _started(folder, ranks=rng.choice(RANKS), workers=rng.choice(WORKERS)) as child:
            assert child.stdout is not None
            try:
                planned.kill(child)
                if child.poll() == -signal.SIGKILL:
                    continue
                output = child.stdout.read()
                if child.wait() != 0:
                    raise RuntimeError(f"a start ended with {child.returncode}: {output[-2000:].decode()}")
                return outcome(folder, kills=planned.done)
            finally:
                child.kill()


def _started(folder: Path, *, ranks: int, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "faults.training", "--start", str(folder), str(ranks), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0, bufsize=0)


def children(pid: int) -> list[int]:
    """The processes that a process has started, the oldest first."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def repeated_or_left_out(folder: Path) -> bool:
    """Whether the steps, over all starts, computed other samples than those due, or not all of them."""
    plan = TrainingPlan.read(folder / "work" / PLAN)
    assert plan.steps is not None
    ids = [name for name in SampleFile(Path(plan.samples)).ids if not plan.is_held_out(name)]
    order = SampleOrder(len(ids), plan.seed)
    due = {
        f"{number // plan.batch} {seed_of('sample', plan.seed, number)} {ids[order.index(number)]}"
        for number in range(plan.steps * plan.batch)
    }
    return {path.name for path in (folder / "work" / LEARNED).iterdir()} != due


def damaged_and_used(folder: Path, *, cases: int, rng: random.Random) -> int:
    """Flip a bit of the newest checkpoint, or cut it, so often: how many of them were not noticed."""
    checkpoints = Checkpoints(folder / "work" / "checkpoints", folder / "quarantine")
    newest = checkpoints.newest(damaged=None)
    assert newest is not None
    whole, used = newest.read_bytes(), 0
    for case in range(cases):
        with newest.open("r+b") as file:
            at = rng.randrange(len(whole))
            if case % 4:
                file.seek(at)
                file.write(bytes([whole[at] ^ 1 << rng.randrange(8)]))
            else:
                file.truncate(at)
        read = checkpoints.newest(damaged=None)
        used += read is None or read == newest
        with newest.open("r+b") as file:
            file.seek(at)
            file.write(whole[at:] if case % 4 == 0 else whole[at : at + 1])
    assert checkpoints.newest(damaged=None) == newest, "put back as it was"
    return used


def main() -> int:
    """0: losses, weights and samples are equal, bit for bit, and no damage was used. 1: they are not."""
    parser = argparse.ArgumentParser(description="Kill a training at random moments.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20240229)
    parser.add_argument("--start", nargs=3, metavar=("FOLDER", "RANKS", "WORKERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start(Path(options.start[0]), ranks=int(options.start[1]), workers=int(options.start[2]))
        return 0
    began = time.monotonic()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="training-") as name:
        folder = Path(name)
        samples = prepare(folder)
        for run_name in ("whole", "killed"):
            make_plan(folder / run_name, samples, steps=options.steps)
        with _started(folder / "whole", ranks=1, workers=0) as child:
            assert child.stdout is not None
            for _ in child.stdout:
                pass
        whole = outcome(folder / "whole")
        killed = run_killed(folder / "killed", kills=options.kills, rng=rng)
        leaks = repeated_or_left_out(folder / "killed")
        seconds = time.monotonic() - began
        used = damaged_and_used(folder / "killed", cases=options.damages, rng=rng)
    equal = (whole.model, whole.history) == (killed.model, killed.history)
    print(
        f"{killed.kills} kills over {killed.steps} steps in {seconds / 60:.0f} min: losses and weights"
        f" {'equal, bit for bit' if equal else 'DIFFER'}; samples"
        f" {'REPEATED OR LEFT OUT' if leaks else 'none repeated or left out'}; {options.damages} flips and"
        f" truncations of the newest checkpoint, {used} not noticed (seed {options.seed})"
    )
    return int(not equal or leaks or used > 0 or killed.kills < options.kills)


if __name__ == "__main__":
    sys.exit(main())
