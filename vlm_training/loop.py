"""The loop of a training on one rank: from a checkpoint, or the beginning, to the finished model.

A step is a pure function of the state before it: no random state is kept, and a gradient is the sum of a
fixed number of microbatches in a fixed tree.
"""

from __future__ import annotations

import math
import os
import select
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Literal

from vlm_durable.files.files import make_directory, write_replacing
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.mirror.bucket import S3Folder, StoreAwayError
from vlm_durable.wording import counted
from vlm_training.checkpoints import (
    Checkpoints,
    CheckpointThread,
    mean_time_between_failures,
    read,
)
from vlm_training.objective import Objective, load_objective
from vlm_training.order import LeakError, OrderChangedError, SampleOrder, seed_of
from vlm_training.rank_watch import Activity, PositionFile, SlowRanks
from vlm_training.ranks import Ranks, RanksLostError, TreeSum, bounds
from vlm_training.state import SKIPS_ALLOWED, TrainingState, learning_rate
from vlm_training.training_plan import Samples, TrainingError, TrainingPlan, load_samples
from vlm_training.training_store import StoreCopies, StoredCheckpoints

Say = Callable[[str, Mapping[str, Any]], None]
"""Sends an event to the run: a name, and values that JSON can hold."""

_PRELOADED: Final = [
    "torch",
    "vlm_training.objective",
    "vlm_engine.transformers.image_tokens",
    "transformers.models.auto.processing_auto",
]
"""Modules that loader's processes need, imported once for all of them."""

_CLIP: Final = 1.0
_BEST: Final = "best."

_LOSS, _WEIGHT, _FIRST, _END, _STOPPING, _SECONDS = range(6)
"""Positions in the tensor that a rank reports for a microbatch: the samples from ``_FIRST`` to ``_END``."""


class BadBatchesError(TrainingError):
    """More batches than may be skipped could not be learned from."""


class TrainingStoppedError(Exception):
    """The training was asked to stop, and its checkpoint is written."""


@dataclass(frozen=True)
class _Microbatch:
    """What a loader's process made of some sample numbers. samples: each number with its index."""

    samples: Sequence[tuple[int, int]]
    batch: Any | None


class _NumberedSamples:
    """Samples by their number in the run, as torch's DataLoader reads them."""

    def __init__(
        self, samples: Samples, chosen: Sequence[int], order: SampleOrder, objective: Objective
    ) -> None:
        self.samples, self.chosen, self.order, self.objective = samples, chosen, order, objective

    def __getitem__(self, number: int) -> tuple[int, int, Any]:
        index = self.order.index(number)
        sample = self.samples[self.chosen[index]]
        seed = seed_of("sample", self.order.seed, number)
        return number, index, self.objective.features(sample, seed)

    def collate(self, samples: Sequence[tuple[int, int, Any]]) -> _Microbatch:
        readable = [features for _, _, features in samples if features is not None]
        batch = self.objective.collate(readable) if readable else None
        return _Microbatch([(number, index) for number, index, _ in samples], batch)


class Training:
    """A training on one rank. Make it, then ``run`` it.

    folder: the folder of this training alone, with its checkpoints. stopping: whether it was asked to stop.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        folder: Path,
        quarantine: Path,
        ranks: Ranks,
        *,
        device: str,
        history: Path,
        say: Say,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        import torch

        torch.set_num_threads(plan.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        self._plan, self._ranks, self._device = plan, ranks, device
        self._folder, self._history_path = folder, history
        self._say: Say = say if ranks.is_first else lambda *_: None
        self._stopping = stopping
        self._position = PositionFile(folder / f"rank-{ranks.rank}.at")
        self._slow = SlowRanks()
        self._samples = load_samples(plan)
        ids = self._samples.ids
        held_out = [plan.is_held_out(property_id) for property_id in ids]
        self._chosen = [index for index, is_held_out in enumerate(held_out) if not is_held_out]
        self._held_out = [index for index, is_held_out in enumerate(held_out) if is_held_out]
        if not self._chosen:
            raise TrainingError(
                f"None of {counted(len(ids), 'samples')} is left to train on: hold out fewer."
            )
        self._order = SampleOrder(len(self._chosen), plan.seed)
        self._objective = load_objective(plan)
        self._checkpoints = Checkpoints(folder / "checkpoints", quarantine)
        self._writer = CheckpointThread(
            self._checkpoints,
            seconds=plan.checkpoint_seconds,
            failed=self._warn,
            written=self._copy,
        )
        self._copies: StoreCopies | None = None
        if plan.copies is not None:
            self._copies = StoreCopies(StoredCheckpoints(S3Folder.parse(plan.copies)), failed=self._warn)
        self.state = TrainingState()
        self._saved = 0
        self._best: dict[str, Any] = {}
        self._build()

    def _warn(self, message: str) -> None:
        self._say("warning", {"message": message})

    def _copy(self, path: Path) -> None:
        if self._copies is not None:
            self._copies.offer(path)

    # ---- the parts

    def _build(self) -> None:
        import torch

        self._model, self._processor = self._objective.build()
        if self._plan.method == "lora":
            self._model = _with_adapters(self._model, self._plan.seed)
        torch.manual_seed(seed_of("heads", self._plan.seed))
        self._heads = self._objective.heads(self._model)
        self._model.to(self._device).train()
        modules = {"model": self._model}
        if self._heads is not None:
            modules["heads"] = self._heads.to(self._device).train()
        self._parameters = {
            f"{part}.{name}": parameter
            for part, module in modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        trained = list(self._parameters.values())
        self._optimizer = torch.optim.AdamW(
            trained, lr=self._plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.02
        )

    def _tensors(self) -> dict[str, Any]:
        """All tensors that a checkpoint holds, by name."""
        tensors = {f"weights.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for number, values in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
        tensors |= {f"{_BEST}{name}": weight for name, weight in self._best.items()}
        return tensors

    def _load(self, path: Path) -> None:
        """Restore weights, optimizer and state from a checkpoint."""
        import torch

        state, tensors = read(path)
        if state.order != self._order.digest():
            raise OrderChangedError(
                f"{path.name} was written with another order of the samples for the same seed, as another"
                " version of numpy may make it. Go on with the versions of constraints.txt."
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"weights.{name}"])
        optimizer_state: dict[int, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                number, _, key = rest.partition(".")
                optimizer_state.setdefault(int(number), {})[key] = tensor
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})
        self._best = {
            name.removeprefix(_BEST): tensor for name, tensor in tensors.items() if name.startswith(_BEST)
        }
        self.state = state

    # ---- from start to end

    def run(self, export: Path) -> TrainingState:
        """Train to the end and save the model in ``export``. Raises TrainingStoppedError, TrainingError."""
        if self._ranks.is_first:
            self._checkpoints.sweep()
        self._ranks.gather(_number(0))  # The other ranks wait until the folder is swept.
        self._resume()
        started = time.monotonic()
        before = self.state.seconds
        try:
            self._train(lambda: before + time.monotonic() - started)
        except (RanksLostError, StoreAwayError):
            self._save_last_step()
            raise
        except TrainingStoppedError:
            if self._copies is not None:
                self._copies.wait()  # This machine may go away after the grace.
            raise
        finally:
            self._say("saving", {})  # No step comes meanwhile, and a large checkpoint takes long.
            self._writer.wait()
        if self._ranks.is_first:
            self._writer.save(self.state, self._tensors())
            self._finish(export)
        return self.state

    def _resume(self) -> None:
        path = self._newest()
        if path is None:
            self.state.order, self.state.count = self._order.digest(), self._order.count
        else:
            self._load(path)
        self.state.starts += 1
        state = self.state
        if self._ranks.is_first:
            self._write_history()
            if path is None:
                # This measures what a checkpoint costs, and a disk that takes none ends the training at once.
                self._writer.save(state, self._tensors())
            else:
                self._copy(path)  # The store may have been away when it was written.
        self._say(
            "restored",
            {
                "step": state.step,
                "steps": self.total_steps,
                "samples": state.consumed,
                "skipped": len(state.skips),
                "starts": state.starts,
                "train": len(self._chosen),
                "held_out": len(self._held_out),
                "ranks": self._ranks.world,
                "interval": round(self._writer.interval(state), 1),
                "mtbf": round(mean_time_between_failures(state)),
            },
        )

    def _newest(self) -> Path | None:
        # The first rank sets a damaged file aside; the others pass it over.
        return self._checkpoints.newest(damaged=self._warn if self._ranks.is_first else None)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training, if none is skipped."""
        if self._plan.steps is not None:
            return self._plan.steps
        return math.ceil(self._total_samples / self._plan.batch)

    @property
    def _total_samples(self) -> float:
        if self._plan.epochs is None:
            return math.inf
        return round(self._plan.epochs * self._order.count)

    def _is_done(self) -> bool:
        state = self.state
        if state.consumed >= self._total_samples:
            return True
        if self._plan.steps is not None and state.step >= self._plan.steps:
            return True
        epochs = len(state.epochs)
        return self._plan.patience is not None and epochs - state.best_epoch >= self._plan.patience

    def _train(self, seconds: Callable[[], float]) -> None:
        loader = self._load_from(self.state.consumed)
        with self._open_history() as history:
            while not self._is_done():
                start, stop = self._next_batch()
                if start in self.state.skips:
                    self.state.consumed = stop
                    continue
                step = self._step(start, stop, loader)
                if step.refusal is not None:
                    self._roll_back(start, step)
                    history.close()
                    self._write_history()
                    history = self._open_history()
                    loader = self._load_from(self.state.consumed)
                    continue
                self.state.seconds = seconds()
                history.write(_line(self.state.step, stop, step.loss))
                history.flush()
                self._after_step(step)
                if step.stop:
                    self._say("saving", {})
                    if self._ranks.is_first:
                        self._writer.save(self.state, self._tensors())
                    raise TrainingStoppedError
        if not self.state.epochs or self.state.epochs[-1]["step"] != self.state.step:
            self._measure()

    # ---- one step

    def _next_batch(self) -> tuple[int, int]:
        start = self.state.consumed
        return start, int(min(start + self._plan.batch, self._total_samples))

    def _step(self, start: int, stop: int, loader: Iterator[_Microbatch]) -> _Step:
        """Compute a global batch, add the gradients up and take the step, unless it must not be taken."""
        import torch

        plan, gradients = self._plan, TreeSum()
        reports: list[Any] = []
        parts = bounds(start, stop, plan.microbatches)
        for number in self._ranks.own_microbatches(plan.microbatches):
            report = [0.0] * 6
            report[_STOPPING] = float(self._stopping())
            if number is not None and len(parts[number]):
                self._position.begin(self._ids(parts[number].start, parts[number].stop))
                began = time.monotonic()
                microbatch = next(loader)
                self._position.enter(Activity.COMPUTING)
                self._order.check(parts[number], microbatch.samples)
                report[_FIRST], report[_END] = microbatch.samples[0][0], microbatch.samples[-1][0] + 1
                if microbatch.batch is not None:
                    torch.manual_seed(seed_of("dropout", plan.seed, start, number))
                    with self._precision():
                        loss, weight = self._objective.loss(
                            self._model, self._heads, microbatch.batch, step=self.state.step
                        )
                    loss.backward()
                    report[_LOSS], report[_WEIGHT] = float(loss.detach()), weight
                report[_SECONDS] = time.monotonic() - began
            self._position.enter(Activity.WAITING)
            # In the last round some ranks may have no microbatch: what they send is no part of the tree.
            rank_gradients = self._ranks.gather_all(self._take_gradient())
            for rank_gradient in rank_gradients[: plan.microbatches - len(reports)]:
                gradients.push(rank_gradient)
            reports += self._ranks.gather(torch.tensor(report, dtype=torch.float64))
        self._position.enter(Activity.FINISHING)
        self._report_slow_ranks(reports, start, stop)
        losses = TreeSum()
        for gathered in reports[: plan.microbatches]:
            losses.push([gathered[[_LOSS, _WEIGHT]]])
        loss_sum, weight = losses.total()[0].tolist()
        asked_to_stop = any(bool(gathered[_STOPPING]) for gathered in reports)
        computed = [gathered[[_FIRST, _END]].tolist() for gathered in reports if gathered[_END]]
        if [*(first for first, _ in computed), stop] != [start, *(end for _, end in computed)]:
            raise LeakError(
                f"The ranks computed the samples {computed} where {start} to {stop - 1} were due, each once."
                " Nothing of the step was taken. This is a defect of this program: please open an issue."
            )
        if weight == 0.0:
            raise TrainingError(
                "No image of a whole batch can be read, such as those of"
                f" {', '.join(self._ids(start, stop)[:3])}. Is the disk of the images mounted? The"
                " training so far is kept; materialize the variant again once the images are back."
            )
        gradient = [tensor.to(self._device) for tensor in gradients.total()]
        torch._foreach_div_(gradient, weight)
        norm = float(torch.nn.utils.get_total_norm(gradient))
        loss = loss_sum / weight
        refusal = self.state.refusal(loss, norm)
        if refusal is None:
            if norm > _CLIP:
                torch._foreach_mul_(gradient, _CLIP / norm)
            for parameter, tensor in zip(self._parameters.values(), gradient, strict=True):
                parameter.grad = tensor
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(plan.learning_rate, self.state.step, self.total_steps)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            epoch = self.state.consumed // self._order.count
            self.state.count_step(loss, consumed=stop)
            ends_epoch = self.state.consumed // self._order.count > epoch
        else:
            ends_epoch = False
        return _Step(loss, refusal, asked_to_stop, ends_epoch, self._ids(start, stop) if refusal else ())

    def _report_slow_ranks(self, reports: Sequence[Any], start: int, stop: int) -> None:
        """Name a rank that has been slow for long. reports: those of all ranks, round after round."""
        world = self._ranks.world
        if world == 1 or not self._ranks.is_first:
            return
        medians = []
        for rank in range(world):
            seconds = [float(report[_SECONDS]) for report in reports[rank::world]]
            medians.append(statistics.median([value for value in seconds if value] or [0.0]))
        for event, rank, message in self._slow.note(medians, self._ids(start, stop), time.monotonic()):
            self._say(event, {"message": message, "rank": rank})

    def _take_gradient(self) -> list[Any]:
        """Remove and return the gradient of a backward pass, without a copy; zeros for unused parameters."""
        import torch

        gradient = []
        for parameter in self._parameters.values():
            gradient.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        return gradient

    def _after_step(self, step: _Step) -> None:
        state = self.state
        self._say(
            "step",
            {
                "step": state.step,
                "steps": self.total_steps,
                "samples": state.consumed,
                "loss": step.loss,
                "saved": self._saved,
                "seconds": state.seconds,
            },
        )
        if step.ends_epoch:
            self._measure()
        if self._ranks.is_first and not self._is_done() and self._writer.is_due(state):
            self._writer.begin(state, self._tensors())
            self._saved = state.step

    def _precision(self) -> AbstractContextManager[Any]:
        import torch

        return nullcontext() if self._device == "cpu" else torch.autocast("cuda", torch.bfloat16)

    def _ids(self, start: int, stop: int) -> list[str]:
        indexes = (self._chosen[self._order.index(number)] for number in range(start, stop))
        return [self._samples.ids[index] for index in indexes]

    def _roll_back(self, start: int, step: _Step) -> None:
        """Go back to the last good checkpoint, and skip the batch from there on. Raises BadBatchesError."""
        skips = {**self.state.skips, start: list(step.ids)}
        message = f"The batch of {', '.join(step.ids)} cannot be learned from: {step.refusal}."
        if len(skips) > SKIPS_ALLOWED:
            raise BadBatchesError(
                f"{message} {SKIPS_ALLOWED} batches before it were skipped already, so the training stops;"
                " its checkpoints are kept. Look at these properties and at the learning rate, then"
                " materialize the variant again."
            )
        self._say("restoring", {})
        self._writer.wait()
        self._ranks.gather(_number(0))  # All ranks find the file that the first rank was writing.
        path = self._newest()
        if path is None:
            raise TrainingError("There is no checkpoint to go back to: look at the disk.")
        starts = self.state.starts
        self._load(path)
        self.state.skips, self.state.starts = skips, starts
        self._say(
            "skipped",
            {"message": f"{message} Back to step {self.state.step}; it is skipped.", "ids": list(step.ids)},
        )

    # ---- loading samples

    def _load_from(self, consumed: int) -> Iterator[_Microbatch]:
        """The microbatches of this rank from a sample number on. Nothing before it is loaded."""
        import torch
        from torch.utils.data import DataLoader

        samples = _NumberedSamples(self._samples, self._chosen, self._order, self._objective)
        workers = self._plan.workers
        # Loader's processes are forked from a clean template: this process has threads, sockets and a lock.
        template = get_context("forkserver") if workers else None
        if template is not None:
            template.set_forkserver_preload(_PRELOADED)
        return iter(
            DataLoader(
                samples,
                batch_sampler=_Sampler(self, consumed, frozenset(self.state.skips)),
                collate_fn=samples.collate,
                num_workers=workers,
                worker_init_fn=partial(_begin_worker, os.getpid()) if workers else None,
                multiprocessing_context=template,
                # Without a generator it draws from torch's own random numbers.
                generator=torch.Generator().manual_seed(0),
            )
        )

    def _numbers(self, consumed: int, skips: frozenset[int]) -> Iterator[list[int]]:
        while consumed < self._total_samples:
            stop = int(min(consumed + self._plan.batch, self._total_samples))
            if consumed not in skips:
                parts = bounds(consumed, stop, self._plan.microbatches)
                for number in self._ranks.own_microbatches(self._plan.microbatches):
                    if number is not None and len(parts[number]):
                        yield list(parts[number])
            consumed = stop

    # ---- metrics, history, end

    def _measure(self) -> None:
        """Measure the loss on the held-out samples, at the end of an epoch and of the training."""
        import torch

        plan, state = self._plan, self.state
        self._position.enter(Activity.MEASURING)
        last_event = -math.inf
        size = max(1, plan.batch // plan.microbatches)
        chunks = [self._held_out[start : start + size] for start in range(0, len(self._held_out), size)]
        own_sums = torch.zeros(len(chunks), 2, dtype=torch.float64)
        self._model.eval()
        with torch.no_grad():
            for number in range(self._ranks.rank, len(chunks), self._ranks.world):
                if time.monotonic() - last_event >= 1.0:
                    last_event = time.monotonic()
                    self._say("measuring", {})  # A sign of life.
                features = [
                    self._objective.features(self._samples[index], seed_of("held out", plan.seed, index))
                    for index in chunks[number]
                ]
                if readable := [sample for sample in features if sample is not None]:
                    torch.manual_seed(seed_of("held out", plan.seed, number))
                    with self._precision():
                        loss, weight = self._objective.loss(
                            self._model, self._heads, self._objective.collate(readable), step=0
                        )
                    own_sums[number] = torch.tensor([float(loss), weight], dtype=torch.float64)
        self._model.train()
        loss_sum, weight_sum = 0.0, 0.0
        if chunks:
            loss_sum, weight_sum = sum(self._ranks.gather(own_sums)).sum(0).tolist()
        recent = state.losses[-max(1, self._order.count // plan.batch) :]
        metric = loss_sum / weight_sum if weight_sum else sum(recent) / len(recent)
        epoch = len(state.epochs) + 1
        if state.note_metric(epoch, metric) and plan.patience is not None:
            self._best = {
                name: parameter.detach().cpu().clone() for name, parameter in self._parameters.items()
            }
        measured = {
            "epoch": epoch,
            "step": state.step,
            "samples": state.consumed,
            "metric": metric,
            "of": "held-out loss" if weight_sum else "training loss: no property is held out",
            "loss": sum(recent) / len(recent),
            "stall": round(max(self._writer.stalls, default=0.0), 4),
            "write": round(self._writer.write_seconds, 3),
            "interval": round(self._writer.interval(state), 1),
        }
        state.epochs.append(measured)
        self._say("epoch", {**measured, "best": state.best, "steps": self.total_steps})

    def _write_history(self) -> None:
        """Write the history of the state. Only lines beyond the checkpoint are lost, which a kill left."""
        if self._ranks.is_first:
            make_directory(self._history_path.parent)
            lines = (
                _line(step, samples, loss)
                for step, (samples, loss) in enumerate(
                    zip(self.state.samples, self.state.losses, strict=True), start=1
                )
            )
            write_replacing(self._history_path, "".join(lines).encode())

    def _open_history(self) -> Any:
        path = self._history_path if self._ranks.is_first else Path("/dev/null")
        return path.open("a", encoding="utf-8")

    def _save_last_step(self) -> None:
        """Save the last finished step on one rank, when another rank or the store is gone."""
        self._say("saving", {})
        self._writer.wait()
        lock = acquire_lock(self._folder / "last-words.lock")
        if lock is None or self.state.step in self._checkpoints.steps():
            return
        try:
            self._writer.save(self.state, self._tensors())
        finally:
            lock.close()

    def _finish(self, export: Path) -> None:
        """Save the model, and measure it on properties that it was not trained on."""
        import torch

        self._say("evaluating", {})
        if self._best:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(self._best[name])
        model = self._model.to("cpu").eval()
        if self._plan.method == "lora":
            model = model.merge_and_unload()
        model.save_pretrained(export, max_shard_size="4GB")  # A store takes 5 GB at once.
        self._processor.save_pretrained(export)
        samples = [self._samples[index] for index in self._held_out[: self._plan.evaluate]]
        del self._optimizer  # The evaluation needs its memory.
        device: Literal["cpu", "cuda"] = "cpu" if self._device == "cpu" else "cuda"
        figures = self._objective.figures(export, samples, device) if self._plan.evaluate else None
        state = self.state
        self._say(
            "finished",
            {
                "step": state.step,
                "samples": state.consumed,
                "metric": state.epochs[-1]["metric"],
                "best": state.best,
                "epochs": state.epochs,
                # Without their ids: the record stays when a property is withdrawn.
                "skipped": len(state.skips),
                "seconds": state.seconds,
                "starts": state.starts,
                "order": state.order,
                "train": len(self._chosen),
                "held_out": len(self._held_out),
                "figures": dict(figures.right) if figures else {},
                "asked": f"{figures.count} {figures.population}" if figures else "none",
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
            },
        )


@dataclass(frozen=True)
class _Step:
    """A computed step. refusal: why it was not taken, or None. stop: whether a rank was asked to stop."""

    loss: float
    refusal: str | None
    stop: bool
    ends_epoch: bool
    ids: Sequence[str]


class _Sampler:
    """The sample numbers of each microbatch of this rank. Each ``iter`` starts from the beginning."""

    def __init__(self, training: Training, consumed: int, skips: frozenset[int]) -> None:
        self._training, self._consumed, self._skips = training, consumed, skips

    def __iter__(self) -> Iterator[list[int]]:
        return self._training._numbers(self._consumed, self._skips)


def _line(step: int, samples: int, loss: float) -> str:
    return f'{{"step": {step}, "samples": {samples}, "loss": {loss!r}}}\n'


def _number(value: float) -> Any:
    import torch

    return torch.tensor([value])


def _begin_worker(rank: int, _: int) -> None:
    """Set up a loader's process: it has one thread, ignores signals, and ends when its rank (a pid) ends.

    Its parent is the template process, which does not end while a loader's process lives.
    """
    import torch

    try:
        rank_descriptor = os.pidfd_open(rank)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        select.select([rank_descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _with_adapters(model: Any, seed: int) -> Any:
    """Add low-rank adapters to all linear layers of a model. Only they are trained."""
    import torch

    try:
        peft = import_module("peft")  # an extra: not every installation has it
    except ImportError as error:
        raise TrainingError(
            "`method: lora` needs peft: install it with `.venv/bin/pip install -c constraints.txt -e"
            " 'distributions/training[lora]'`, or set `method: full`."
        ) from error
    torch.manual_seed(seed_of("adapters", seed))
    return peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
