"""The triage of variants comes from the disk alone: after a reboot nothing else is there."""

import os
from pathlib import Path

import pytest
import torch

from resources.storage.sealed_json import write_sealed
from resources.training.checkpoints import Checkpoints
from resources.training.rank import PLAN
from resources.training.state import TrainingState
from vlm_assets.assets.description_model import ASSET
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.operate.variant_status import variant_status

NAMES = ("published", "early", "late", "new")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    values = "{base: example, epochs: 150, batch: 10}"
    lines = "".join(f"  {name}: {values}\n" for name in NAMES)
    (tmp_path / "variants.yaml").write_text(f"variants:\n{lines}")
    return load_settings(home=tmp_path / "home", variants=tmp_path / "variants.yaml")


def begin(settings: Settings, name: str, *, step: int, generation: str = "a") -> None:
    """A training of 40 samples an epoch, killed after a step."""
    paths = settings.layout.asset(ASSET).partition(name)
    folder = paths.journal(generation)
    checkpoints = Checkpoints(folder / "checkpoints", paths.quarantine)
    checkpoints.sweep()
    (folder / PLAN).write_text("{}")
    state = TrainingState(step, 10 * step, best=0.25, seconds=2.0 * step, count=40)
    checkpoints.write(state, {"a": torch.zeros(1)})


def test_each_variant_is_told_as_it_stands(settings: Settings) -> None:
    """Interrupted at an epoch, done with its metric, or never started; what is nearest to done runs first."""
    begin(settings, "early", step=60)
    begin(settings, "late", step=389)
    record = settings.layout.asset(ASSET).partition("published").record
    write_sealed(record, {"fingerprint": "a", "step": 600, "metric": 0.125})
    begin(settings, "published", step=600)
    found = variant_status(settings)
    assert [(one.name, one.turn, one.sentence()) for one in found] == [
        ("late", 1, "interrupted at epoch 98 of 150 (64.8%), metric 0.2500 so far"),
        ("early", 2, "interrupted at epoch 16 of 150 (10.0%), metric 0.2500 so far"),
        ("new", 3, "never started"),
        ("published", None, "done (metric 0.1250)"),
    ]
    assert found[0].seconds_left == 2.0 * (600 - 389)
    heaviest = variant_status(settings.model_copy(update={"variants_order": "heaviest"}))
    # Nobody knows how much there is of one that never began: it may be the longest.
    assert [one.name for one in heaviest] == ["new", "early", "late", "published"]


def test_one_that_was_killed_before_its_second_checkpoint_was_started(settings: Settings) -> None:
    """What a person sees after the kill is that it was interrupted, not that nobody ever began."""
    begin(settings, "new", step=0)
    (found,) = [one for one in variant_status(settings) if one.name == "new"]
    assert found.sentence() == "interrupted at epoch 1 of 150 (0.0%), metric 0.2500 so far"


def test_a_training_begun_anew_is_no_finished_one(settings: Settings) -> None:
    """A published model under another plan stays; the new training is what is told."""
    paths = settings.layout.asset(ASSET).partition("published")
    write_sealed(paths.record, {"fingerprint": "a", "step": 600, "metric": 0.125})
    begin(settings, "published", step=30, generation="b")
    os.utime(paths.journal("b") / PLAN)
    assert next(one for one in variant_status(settings) if one.name == "published").state == "interrupted"


def test_a_record_of_a_newer_version_is_refused_and_told(settings: Settings) -> None:
    """It is no model that was never trained: nothing is trained over it, and `status` says what to do."""
    paths = settings.layout.asset(ASSET).partition("published")
    write_sealed(paths.record, {"fingerprint": "a"}, format_=2)
    (found,) = [one for one in variant_status(settings) if one.name == "published"]
    assert found.state == "refused" and "has format 2 and this version reads 1" in found.sentence()
