"""A training that is killed, poisoned or damaged comes to what it comes to without that, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.training import (
    FALLEN,
    LEARNED,
    Outcome,
    make_plan,
    outcome,
    prepare,
    processes,
    repeated_or_left_out,
    run_killed,
)
from sensors.progress_judge import ProgressLimits, Standstill
from tests.support.damage import flip_bit
from tests.support.shares import SHARE, share_of
from vlm_durable.files.processes import is_stopped
from vlm_training.checkpoints import Checkpoints
from vlm_training.loop import BadBatchesError, Training
from vlm_training.order import SampleOrder
from vlm_training.rank import PLAN
from vlm_training.rank_watch import Activity, Position, StepWatch
from vlm_training.ranks import Ranks
from vlm_training.training_plan import Sample, TrainingPlan

STEPS = 6
KILLS = len(share_of(range(3), 3))
POISONED = "faults.training:PoisonedObjective"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Ten rendered properties, without hard ones."""
    return prepare(tmp_path_factory.mktemp("rendered"), properties=12)


@pytest.fixture(scope="module")
def in_process() -> Iterator[Any]:
    """Runs a training in this process, and puts back what they set in torch."""
    threads = torch.get_num_threads()

    def run(
        folder: Path, plan: TrainingPlan, told: list[dict[str, Any]] | None = None, **changes: Any
    ) -> tuple[Training, list[dict[str, Any]]]:
        told = [] if told is None else told
        training = Training(
            replace(plan, checkpoint_seconds=0.0, **changes),
            folder / "work",
            folder / "quarantine",
            Ranks(),
            device="cpu",
            history=folder / "training.jsonl",
            say=lambda event, values: told.append({"event": event, **values}),
        )
        (folder / "export").mkdir(exist_ok=True)
        training.run(folder / "export")
        return training, told

    yield run
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def whole(samples: list[Sample], tmp_path_factory: pytest.TempPathFactory, in_process: Any) -> Outcome:
    """What the training comes to that nobody touches: one rank, no process beside it."""
    folder = tmp_path_factory.mktemp("whole") / "training"
    in_process(folder, make_plan(folder, samples, steps=STEPS))
    return outcome(folder)


def test_killed_again_and_again_it_comes_out_the_same(
    samples: list[Sample], whole: Outcome, tmp_path: Path
) -> None:
    """SIGKILL at a random moment, others each day, ranks and workers drawn anew: equal to the bit.

    Each step computed the samples that were due, and no others.
    """
    folder = tmp_path / "training"
    make_plan(folder, samples, steps=STEPS)
    found = run_killed(folder, kills=KILLS, rng=random.Random(SHARE))
    assert (found.model, found.history) == (whole.model, whole.history)
    steps = [json.loads(line)["step"] for line in (folder / "training.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1)), "the whole history, no step twice"
    assert not repeated_or_left_out(folder)
    next((folder / "work" / LEARNED).iterdir()).unlink()
    assert repeated_or_left_out(folder), "it reads what the steps noted"


def falling(folder: Path, samples: list[Sample], name: str) -> str:
    """Plan that rank 1 gets a signal in the second step. Returns the property that it then loads."""
    plan = make_plan(folder, samples, steps=STEPS, checkpoint_seconds=3600.0)
    ids = [one.property_id for one in samples if not plan.is_held_out(one.property_id)]
    fatal = plan.batch + 1
    changes = {"variant": f"{name} {fatal}", "objective": "faults.training:FallenObjective"}
    replace(plan, **changes).write(folder / "work" / PLAN)
    return ids[SampleOrder(len(ids), plan.seed).index(fatal)]


def test_one_of_two_ranks_dies_and_the_other_goes_on(
    samples: list[Sample], whole: Outcome, tmp_path: Path
) -> None:
    """The one that is left writes down the last finished step and goes on alone, to the same bits."""
    folder = tmp_path / "training"
    falling(folder, samples, "SIGKILL")
    ranks = processes(folder, ranks=2, grace=120.0)
    said = list(ranks.events())
    ranks.lock.close()
    (warning,) = [one["message"] for one in said if one["event"] == "warning"]
    assert "rank 1 was killed by SIGKILL" in warning and "Going on with 1 of 2 ranks" in warning
    starts = [(one["ranks"], one["step"]) for one in said if one["event"] == "restored"]
    assert starts == [(2, 0), (1, 1)]
    assert outcome(folder).model == whole.model and outcome(folder).history == whole.history


@pytest.mark.long
def test_a_rank_that_stands_still_is_named_and_the_other_goes_on(
    samples: list[Sample], whole: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle: which rank, at which properties; the others go on to the same bits."""
    folder = tmp_path / "training"
    fatal = falling(folder, samples, "SIGSTOP")
    ranks = processes(folder, ranks=4, grace=120.0)

    def overdue(_: StepWatch, now: float) -> Standstill | None:
        """Its time is over as soon as the others wait for it: a slow machine makes nobody stuck."""
        others = [Position.read(folder / "work" / f"rank-{number}.at") for number in (0, 2, 3)]
        waited_for = all(position.activity is Activity.WAITING for position in others)
        fallen = waited_for and (folder / "work" / FALLEN).exists() and is_stopped(ranks._running[1].pid)
        return Standstill(now, 0.0) if fallen else None

    monkeypatch.setattr(StepWatch, "overdue", overdue)
    told = list(ranks.events())
    ranks.lock.close()
    (stuck,) = [one for one in told if one["event"] == "stuck"]
    assert (stuck["rank"], stuck["device"]) == (1, "cpu")
    assert f"rank 1 was loading the images of {fatal}. It is killed" in stuck["message"]
    assert [(one["ranks"], one["step"]) for one in told if one["event"] == "restored"] == [(4, 0), (3, 1)]
    assert outcome(folder).model == whole.model and outcome(folder).history == whole.history


@pytest.mark.parametrize("silent", ["write", "newest"])
def test_the_watch_knows_what_the_steps_wait_for(
    samples: list[Sample], tmp_path: Path, in_process: Any, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """Writing the last checkpoint and reading one to go back to may take as long as loading."""
    folder, bad, limits = tmp_path / "training", samples[4].property_id, ProgressLimits()
    plan = make_plan(folder, samples, steps=2, variant=bad, objective=POISONED, held_out=0.0)
    told: list[dict[str, Any]] = []
    allowed, do = list[float](), getattr(Checkpoints, silent)

    def watched(*given: Any, **named: Any) -> Any:
        watch = StepWatch(limits)
        for at, one in enumerate(told):
            watch.note(one["event"], at)
        allowed.append(limits.allowed_seconds(watch.reading))
        return do(*given, **named)

    monkeypatch.setattr(Checkpoints, silent, watched)
    in_process(folder, plan, told)
    assert [one for one in told if one["event"] == "skipped"]
    waited_for = allowed[-1:] if silent == "write" else allowed  # Those before are written beside the steps.
    assert len(allowed) > 1 and set(waited_for) == {limits.loading}


def test_a_damaged_newest_checkpoint_is_passed_over(
    samples: list[Sample], whole: Outcome, tmp_path: Path, in_process: Any
) -> None:
    """One flipped bit in the last checkpoint: it is said, the one before is taken, the result is the same."""
    folder = tmp_path / "training"
    plan = make_plan(folder, samples, steps=STEPS)
    in_process(folder, plan, steps=STEPS)
    newest = max((folder / "work" / "checkpoints").iterdir())
    flip_bit(newest)
    training, told = in_process(folder, plan)
    assert [one for one in told if one["event"] == "warning" and "damaged" in one["message"]]
    assert 0 < next(one["step"] for one in told if one["event"] == "restored") < STEPS
    assert training.state.step == STEPS
    assert outcome(folder).model == whole.model and outcome(folder).history == whole.history


def test_it_stops_early_at_the_same_epoch_after_a_kill(
    samples: list[Sample], tmp_path: Path, in_process: Any
) -> None:
    """The best metric, its epoch and its weights are of the state: a killed training ends as a whole one."""
    changes = {"epochs": 8.0, "patience": 3}
    folders = [tmp_path / "whole", tmp_path / "killed"]
    plans = [make_plan(one, samples, steps=None, **changes) for one in folders]
    whole = in_process(folders[0], plans[0])[0].state
    assert whole.best_epoch + changes["patience"] == len(whole.epochs) < 8, "it stopped early"
    command = [sys.executable, "-m", "faults.training", "--start", str(folders[1]), "1", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = (json.loads(line) for line in child.stdout)
        next(one for one in said if one["event"] == "epoch" and one["epoch"] > whole.best_epoch)
        next(one for one in said if one["event"] == "step")
        child.kill()
    training, _ = in_process(folders[1], plans[1])
    assert training.state.starts == 2
    found = [(one["epoch"], one["metric"]) for one in training.state.epochs]
    assert found == [(one["epoch"], one["metric"]) for one in whole.epochs]
    assert outcome(folders[1]).model == outcome(folders[0]).model


def test_a_poisoned_batch_is_skipped_and_named(
    samples: list[Sample], tmp_path: Path, in_process: Any
) -> None:
    """NaN: back to the last good checkpoint; the batch is passed over and recorded by its ids.

    Two ranks come to the same, and the first of them has time at its end.
    """
    folder, bad = tmp_path / "training", samples[4].property_id
    plan = make_plan(folder, samples, steps=2, variant=bad, objective=POISONED, held_out=0.0)
    training, told = in_process(folder, plan)
    skipped = [one for one in told if one["event"] == "skipped"]
    assert skipped and all(bad in one["ids"] and "loss is nan" in one["message"] for one in skipped)
    state = training.state
    assert list(state.skips.values()) == [one["ids"] for one in skipped]
    assert state.step == 2 and state.consumed == (2 + len(skipped)) * plan.batch
    assert all(torch.isfinite(one).all() for one in training._parameters.values())
    # Two ranks go back together, to the same bits.
    other = tmp_path / "other"
    make_plan(other, samples, steps=2, variant=bad, objective=POISONED, held_out=0.0)
    events = events_of_two_ranks(other)
    assert [one["ranks"] for one in events if one["event"] == "restored"] == [2]
    told = [one["event"] for one in events if one["event"] in ("skipped", "warning", "finished")]
    assert told == ["skipped"] * len(skipped) + ["finished"]
    assert outcome(other) == outcome(folder)


def events_of_two_ranks(folder: Path) -> list[Any]:
    """What two ranks say. The first stands still at its end, when the other is done.

    It saves and evaluates then: it is not lost, and nobody kills it after the grace of two seconds.
    """
    ranks = processes(folder, ranks=2, grace=2.0)
    told, since = list[Any](), 0
    for event in ranks.events():
        told.append(event)
        first, other = ranks._running
        if event["event"] == "evaluating":
            first.send_signal(signal.SIGSTOP)
            assert other.wait(60) == 0
            since = len(told)
        if told[since:] == [{"event": "nothing"}] * 8:  # of half a second each
            first.send_signal(signal.SIGCONT)
    ranks.lock.close()
    assert not list((folder / "work").glob("rank-*.at")), "they name properties"
    return told


def test_too_many_poisoned_batches_stop_it(samples: list[Sample], tmp_path: Path, in_process: Any) -> None:
    """After three the training stops, and the error names the batch and says what to look at."""
    folder = tmp_path / "training"
    plan = make_plan(
        folder,
        samples,
        steps=6,
        variant=" ".join(one.property_id for one in samples),
        objective=POISONED,
        held_out=0.0,
    )
    with pytest.raises(BadBatchesError, match=r"cannot be learned from: its loss is nan.*3 batches before"):
        in_process(folder, plan)


def test_sigterm_writes_a_checkpoint(samples: list[Sample], tmp_path: Path) -> None:
    """A preempted machine: the last finished step is on disk when the ranks are gone."""
    folder = tmp_path / "training"
    make_plan(folder, samples, steps=100_000, checkpoint_seconds=3600.0)
    ranks = processes(folder, ranks=1)
    events = ranks.events()
    next(event for event in events if event.get("step", 0) >= 2)
    events.close()  # What holds the ranks is left: they are asked to stop.
    ranks.lock.close()
    steps = len((folder / "training.jsonl").read_text().splitlines())
    names = sorted(path.name for path in (folder / "work" / "checkpoints").iterdir())
    assert int(names[-1].split("-")[1]) == steps > 0


def test_low_rank_adapters_are_merged(samples: list[Sample], tmp_path: Path, in_process: Any) -> None:
    """`method: lora`: a fraction is trained, and what comes out is a whole model like any other."""
    folder = tmp_path / "training"
    plan = make_plan(folder, samples, steps=2, method="lora")
    training, _ = in_process(folder, plan)
    assert all("lora_" in name for name in training._parameters)
    assert not (folder / "export" / "adapter_config.json").exists()
    assert (folder / "export" / "model.safetensors").stat().st_size > 7_000_000
