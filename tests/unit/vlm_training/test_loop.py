"""A step is taken only of the samples that are due, each once, whichever rank computed them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sensors.progress_judge import ProgressLimits
from vlm_durable.files.lock_files import acquire_lock
from vlm_training import rank_processes
from vlm_training.loop import Training
from vlm_training.order import LeakError
from vlm_training.rank import PLAN
from vlm_training.rank_processes import RankProcesses, RanksDiedError
from vlm_training.ranks import Ranks
from vlm_training.training_plan import TrainingPlan

PARTS = ([0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11])


class Numbers:
    """Samples that are numbers."""

    ids = tuple(f"p{number}" for number in range(20))

    def __init__(self, _: TrainingPlan) -> None: ...

    def __getitem__(self, index: int) -> float:
        return float(index)


class Line:
    """The objective to learn twice a number."""

    def __init__(self, _: TrainingPlan) -> None: ...

    def build(self) -> tuple[Any, Any]:
        return torch.nn.Linear(1, 1), None

    def heads(self, _: Any) -> None: ...

    def features(self, sample: float, _: int) -> float:
        return sample

    def collate(self, features: Sequence[float]) -> Any:
        return torch.tensor(features)[:, None]

    def loss(self, model: Any, _: Any, batch: Any, *, step: int) -> tuple[Any, float]:
        return ((model(batch) - 2 * batch) ** 2).sum(), float(len(batch))


class Broken(Line):
    """An objective with a defect, which is none where nobody makes errors of warnings."""

    def loss(self, model: Any, heads: Any, batch: Any, *, step: int) -> tuple[Any, float]:
        for message in ("resource_tracker: leaked semaphores", "a defect"):
            warnings.warn(message, stacklevel=1)
        return super().loss(model, heads, batch, step=step)


PLAN_OF_LINE = TrainingPlan(
    variant="line",
    base="none",
    samples=f"{__name__}:Numbers",
    objective=f"{__name__}:Line",
    schema="none",
    prompt="none",
    learning_rate=0.1,
    seed=1,
    batch=12,
    microbatches=4,
    steps=2,
    held_out=0.0,
)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A training with batches of twelve samples in four microbatches, on one rank."""
    threads = torch.get_num_threads()
    yield Training(
        PLAN_OF_LINE,
        tmp_path,
        tmp_path / "q",
        Ranks(),
        device="cpu",
        history=tmp_path / "h",
        say=lambda *_: None,
    )
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def refused(training: Training, match: str) -> None:
    """The first step raises LeakError, and nothing of it is taken."""
    before = [parameter.clone() for parameter in training._model.parameters()]
    with pytest.raises(LeakError, match=match):
        training._step(*training._next_batch(), training._load_from(0))
    assert (training.state.step, training.state.consumed) == (0, 0)
    assert all(map(torch.equal, before, training._model.parameters()))


def test_the_samples_that_are_due_are_taken(training: Training) -> None:
    """Also over the end of an epoch: nothing that is right is refused."""
    loader = training._load_from(0)
    for step in (1, 2):
        training._step(*training._next_batch(), loader)
        assert (training.state.step, training.state.consumed) == (step, 12 * step)


@pytest.mark.parametrize(
    ("loaded", "named"),
    [
        ([0, 0, 2], "gave sample number 0 .* where sample number 1 "),
        ([0, 2], "gave sample number 2 .* where sample number 1 "),
        ([2, 1, 0], "gave sample number 2 .* where sample number 0 "),
        ([0, 2, 1], "gave sample number 2 .* where sample number 1 "),
    ],
    ids=["twice", "skipped", "first and last swapped", "swapped"],
)
def test_a_loader_that_gives_other_samples_is_stopped(
    training: Training, monkeypatch: pytest.MonkeyPatch, loaded: list[int], named: str
) -> None:
    """A sample twice, left out, or in another's place: the first that differs is named."""
    monkeypatch.setattr(training, "_numbers", lambda *_: iter([loaded, *PARTS[1:]]))
    refused(training, named)


@pytest.mark.parametrize(
    "numbers",
    [(0, 1, 1, 3), (1, 0, 2, 3), (0, 1, 2, None), (None, 1, 2, 3), (None,) * 4],
    ids=["that of another rank", "in another order", "the last is missing", "the first is missing", "none"],
)
def test_a_rank_that_computes_another_microbatch_is_noticed(
    training: Training, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int | None, ...]
) -> None:
    """Its loader gives what it plans, so only the reports of all ranks together show it."""
    monkeypatch.setattr(Ranks, "own_microbatches", lambda *_: iter(numbers))
    refused(training, "where 0 to 11 were due, each once")


def test_a_rank_with_a_defect_ends_beside_its_loader_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ignore signals: a rank that waits for them as Python does would hang, and the others with it.

    The error is its last line: the user's own PYTHONWARNINGS reach the rank, and Python's tracker is silent.
    """
    monkeypatch.setenv("PYTHONWARNINGS", "error:a defect,error:resource_tracker")
    monkeypatch.setattr(rank_processes, "_TRIES", 1)
    replace(PLAN_OF_LINE, objective=f"{__name__}:Broken", workers=1).write(tmp_path / PLAN)
    lock = acquire_lock(tmp_path / "lock")
    assert lock is not None
    ranks = RankProcesses(
        tmp_path, tmp_path, tmp_path / "h", tmp_path / "q", [""], lock, limits=ProgressLimits(loading=120.0)
    )
    with closing(lock), pytest.raises(RanksDiedError, match=r"exit code 1\. UserWarning: a defect"):
        list(ranks.events())
