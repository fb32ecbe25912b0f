"""A checkpoint is there whole or not at all, and nothing damaged is ever used."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch

from tests.support.damage import flipped
from vlm_durable.files import files
from vlm_durable.files.files import DurableWriteError
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_training import checkpoints as checkpoints_module
from vlm_training.checkpoints import (
    KEPT,
    Checkpoints,
    CheckpointThread,
    interval_seconds,
    mean_time_between_failures,
    read,
    read_state,
)
from vlm_training.state import TrainingState

CASES = 1000


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path / "checkpoints", tmp_path / "quarantine")
    made.sweep()
    return made


def state(step: int) -> TrainingState:
    return TrainingState(step, 8 * step, losses=[0.5] * step, samples=[8 * n for n in range(step)])


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), float(step)), "b": torch.tensor(step), "c": torch.ones(2).bfloat16()}


def test_what_was_written_is_read(checkpoints: Checkpoints) -> None:
    """State, history and every tensor, bit for bit; people read its numbers without torch."""
    path = checkpoints.write(state(7), tensors(7))
    found, there = read(path)
    assert found == state(7)
    assert there.keys() == tensors(7).keys()
    assert all(torch.equal(there[name], one) for name, one in tensors(7).items())
    assert read_state(path)["step"] == 7


def test_a_checkpoint_of_the_format_before_is_read() -> None:
    """Format 1, as the version before wrote it, with a sum of its samples that is no longer kept."""
    folder = Path(__file__).with_name("formats") / "1"
    (path,) = folder.iterdir()
    assert Checkpoints(folder, folder).newest(damaged=pytest.fail) == path
    found, there = read(path)
    assert found == TrainingState(
        step=3,
        consumed=40,
        skips={8: ["p1", "p2"]},
        losses=[0.75, 0.5, 0.25],
        samples=[24, 32, 40],
        epochs=[{"epoch": 1, "step": 2, "samples": 24, "metric": 0.5, "delivered": 2**63 + 7}],
        best=0.5,
        best_epoch=1,
        seconds=1.5,
        starts=2,
        order="0123456789abcdef",
        count=20,
    )
    assert there.keys() == tensors(7).keys()
    assert all(torch.equal(there[name], one) for name, one in tensors(7).items())
    assert read_state(path)["step"] == 3


def test_a_checkpoint_of_a_later_format_is_refused(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its number, before anything in it is taken for what it is not."""
    path = checkpoints.write(state(8), tensors(8))
    monkeypatch.setattr(checkpoints_module, "FORMAT", checkpoints_module.FORMAT - 1)
    with pytest.raises(FormatVersionError, match="a newer version wrote it"):
        read(path)


def test_every_flip_and_cut_of_the_newest_is_noticed(checkpoints: Checkpoints) -> None:
    """1,000 flips and truncations anywhere: the one before is used each time, and it is said."""
    before = checkpoints.write(state(1), tensors(1))
    newest = checkpoints.write(state(2), tensors(2))
    whole, rng = newest.read_bytes(), random.Random(1)
    for case in range(CASES):
        at = rng.randrange(len(whole))
        newest.write_bytes(flipped(whole, at, rng.randrange(8)) if case % 4 else whole[:at])
        assert checkpoints.newest(damaged=None) == before
    told: list[str] = []
    assert checkpoints.newest(damaged=told.append) == before
    assert len(told) == 1 and "step 2 is damaged" in told[0]
    assert not newest.exists() and list((checkpoints.folder.parent / "quarantine").iterdir())


def test_three_verified_ones_are_kept(checkpoints: Checkpoints) -> None:
    """A damaged one pushes no sound one out."""
    for step in range(1, 6):
        checkpoints.write(state(step), tensors(step))
    assert checkpoints.steps() == [5, 4, 3]
    anew = Checkpoints(checkpoints.folder, checkpoints.folder.parent / "quarantine")
    anew.write(state(6), tensors(6))
    assert len(anew.steps()) > KEPT, "those before are not verified yet"
    assert anew.newest(damaged=None) is not None


def test_what_a_killed_writer_left_is_swept(checkpoints: Checkpoints) -> None:
    """Half a checkpoint has a temporary name, is never found, and goes at the next start."""
    left = files.temporary_name(checkpoints.folder / "checkpoint-000000009")
    left.write_bytes(b"half")
    assert checkpoints.newest(damaged=pytest.fail) is None
    checkpoints.sweep()
    assert not left.exists()


def test_a_full_disk_stops_no_training(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be written is told; the one before stands, and the next may succeed."""
    told: list[str] = []
    writer = CheckpointThread(checkpoints, seconds=None, failed=told.append)
    writer.save(state(1), tensors(1))
    with monkeypatch.context() as patched:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(files.os, "write", full)
        writer.begin(state(2), tensors(2))
        writer.wait()
        assert len(told) == 1 and "step 2 could not be written" in told[0]
        with pytest.raises(DurableWriteError):
            writer.save(state(2), tensors(2))
    assert checkpoints.steps() == [1]
    writer.save(state(3), tensors(3))
    assert checkpoints.steps() == [3, 1]


def test_whatever_goes_wrong_with_one_is_told(checkpoints: Checkpoints) -> None:
    """Also what is no fault of the disk: a training without checkpoints does not go on in silence."""
    told: list[str] = []
    with pytest.raises(KeyError):
        CheckpointThread(checkpoints, seconds=None, failed=told.append).save(
            state(1), {"a": torch.ones(2, dtype=torch.int16)}
        )
    assert len(told) == 1 and "step 1 could not be written" in told[0]


def test_a_snapshot_is_of_its_moment(checkpoints: Checkpoints) -> None:
    """Training goes on beside the write, and changes nothing of it."""
    writer = CheckpointThread(checkpoints, seconds=None, failed=pytest.fail)
    now, here = state(1), tensors(1)
    writer.begin(now, here)
    here["a"].fill_(99.0)
    now.count_step(9.0, consumed=16)
    writer.wait()
    path = checkpoints.newest(damaged=pytest.fail)
    assert path is not None
    found, there = read(path)
    assert found == state(1) and torch.equal(there["a"], tensors(1)["a"])


def test_the_interval_follows_cost_and_failures() -> None:
    """Daly's formula, a minute at most, and never more than a hundredth of the time for standing still."""
    assert interval_seconds(0.001, 0.1, 3600.0) == pytest.approx(2.68, abs=0.01)
    assert interval_seconds(0.1, 1.0, 86_400.0) == 60.0
    assert interval_seconds(2.0, 1.0, 86_400.0) == 200.0
    assert interval_seconds(0.001, 40.0, 3600.0) == 80.0
    often = TrainingState(seconds=3600.0, starts=10)
    assert mean_time_between_failures(often) < mean_time_between_failures(TrainingState()) == 86_400.0
