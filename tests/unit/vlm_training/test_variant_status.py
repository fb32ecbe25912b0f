"""The triage of variants comes from the disk alone: after a reboot nothing else is there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from vlm_assets.config.settings import Settings, load_settings
from vlm_durable.files.sealed_json import write_sealed
from vlm_training.checkpoints import Checkpoints
from vlm_training.description_model import ASSET, TrainingWork
from vlm_training.rank import PLAN
from vlm_training.state import TrainingState
from vlm_training.variant_status import VariantStatus, variant_status
from vlm_training.variants import read_variants

NAMES = ("published", "early", "late", "new")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    values = f"{{base: example, data: '{__name__}:samples', epochs: 150, batch: 10}}"
    lines = "".join(f"  {name}: {values}\n" for name in NAMES)
    (tmp_path / "variants.yaml").write_text(f"variants:\n{lines}")
    return load_settings(home=tmp_path / "home", variants=tmp_path / "variants.yaml")


def status_of(settings: Settings, name: str) -> VariantStatus:
    return next(one for one in variant_status(settings) if one.name == name)


def begin(
    settings: Settings, name: str, *, step: int, generation: str = "a", parts: Mapping[str, str] | None = None
) -> None:
    """A training of 40 samples an epoch, killed after a step."""
    paths = settings.layout.asset(ASSET).partition(name)
    folder = paths.journal(generation)
    checkpoints = Checkpoints(folder / "checkpoints", paths.quarantine)
    checkpoints.sweep()
    (folder / PLAN).write_text(json.dumps({"parts": parts or {}}))
    state = TrainingState(step, 10 * step, best=0.25, seconds=2.0 * step, count=40)
    checkpoints.write(state, {"a": torch.zeros(1)})


def test_each_variant_is_told_as_it_stands(settings: Settings) -> None:
    """Interrupted at an epoch, done with its metric, or never started; what is nearest to done runs first."""
    begin(settings, "early", step=60)
    begin(settings, "late", step=389)
    record = settings.layout.asset(ASSET).partition("published").record
    write_sealed(record, {"sequence": 1, "fingerprint": "a", "step": 600, "metric": 0.125})
    begin(settings, "published", step=600)
    found = variant_status(settings)
    assert [(one.name, one.turn, one.sentence()) for one in found] == [
        ("late", 1, "interrupted at epoch 98 of 150 (64.8%), metric 0.2500 so far"),
        ("early", 2, "interrupted at epoch 16 of 150 (10.0%), metric 0.2500 so far"),
        ("new", 3, "never started"),
        ("published", None, "done (metric 0.1250)"),
    ]
    assert found[0].seconds_left == 2.0 * (600 - 389)


def test_one_that_was_killed_before_its_second_checkpoint_was_started(settings: Settings) -> None:
    """What a person sees after the kill is that it was interrupted, not that nobody ever began."""
    begin(settings, "new", step=0)
    assert (
        status_of(settings, "new").sentence() == "interrupted at epoch 1 of 150 (0.0%), metric 0.2500 so far"
    )


def test_a_training_begun_anew_is_no_finished_one(settings: Settings) -> None:
    """A published model under another plan stays; the new training is what is told."""
    paths = settings.layout.asset(ASSET).partition("published")
    write_sealed(paths.record, {"sequence": 1, "fingerprint": "a", "step": 600, "metric": 0.125})
    begin(settings, "published", step=30, generation="b")
    os.utime(paths.journal("b") / PLAN)
    assert status_of(settings, "published").state == "interrupted"


def test_a_variant_whose_plan_changed_is_told_before_it_begins_anew(settings: Settings) -> None:
    """Which values changed, what is left behind, what stays; back at the plan of before, all is as it was."""
    variants = read_variants(settings)
    parts = {
        name: dict(TrainingWork.for_variant(settings, name, one).fingerprint.parts)
        for name, one in variants.items()
    }
    folder = settings.layout.asset(ASSET).partition("published")
    figures = {"parts": parts["published"], "step": 600, "metric": 0.125}
    write_sealed(folder.record, {"sequence": 1, "fingerprint": "a", **figures})
    begin(settings, "late", step=389, parts=parts["late"])

    def sentences(**change: object) -> dict[str, str]:
        assert settings.variants is not None
        values = {"base": "example", "data": f"{__name__}:samples"}
        lines = {name: json.dumps({**values, "epochs": 150, "batch": 10, **change}) for name in NAMES}
        settings.variants.write_text("variants:\n" + "".join(f"  {n}: {line}\n" for n, line in lines.items()))
        return {one.name: one.sentence() for one in variant_status(settings)}

    changed = sentences(batch=8, seed=3)
    left = settings.layout.asset(ASSET).partition("late").journal("a")
    assert changed["late"] == (
        f"plan changed: batch, seed. The next run begins anew at step 0; 389 steps are left behind in {left}"
    )
    assert changed["published"] == (
        "plan changed: batch, seed. The next run begins anew at step 0; the published model stays until the"
        " new one is complete"
    )
    assert "plan changed: base." in sentences(base="tests.unit:another")["published"]
    back = sentences()
    assert back["late"].startswith("interrupted at epoch 98")
    assert back["published"] == "done (metric 0.1250)"
    begin(settings, "published", step=30, generation="b", parts=parts["published"] | {"base": "another"})
    assert sentences()["published"] == "done (metric 0.1250)"


def test_a_record_of_a_newer_version_is_refused_and_told(settings: Settings) -> None:
    """It is no model that was never trained: nothing is trained over it, and `status` says what to do."""
    paths = settings.layout.asset(ASSET).partition("published")
    write_sealed(paths.record, {"fingerprint": "a"}, format_=2)
    found = status_of(settings, "published")
    assert found.state == "refused" and "has format 2 and this version reads 1" in found.sentence()


def test_a_mark_that_the_disk_refuses_is_told_beside_the_other_variants(settings: Settings) -> None:
    """Nobody knows whether that model was published: `status` still says how the others stand."""
    mark = settings.layout.asset(ASSET).partition("published").version_mark
    mark.mkdir(parents=True)  # reading it raises OSError
    found = status_of(settings, "published")
    assert found.state == "refused" and str(mark) in found.sentence()
    assert status_of(settings, "new").state == "never started"
