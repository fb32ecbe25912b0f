"""A variant is trained, resumed, verified and left alone; what comes out is a model like any other."""

import json
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
import torch

from resources.dagster_names import NO_ATTEMPT
from resources.gpu import GpuResource
from tests.support.damage import flip_bit
from vlm_assets.assets.learned_labels import learned_labels
from vlm_assets.config.resource_settings import control_state
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.files.sealed_json import read_sealed, write_sealed
from vlm_durable.state.withdrawing import begin_withdrawal
from vlm_durable.versions.version_mark import mark_copies
from vlm_engine.devices.leases import NoDeviceFreeError
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_training.checkpoints import Checkpoints
from vlm_training.description_model import TrainingWork
from vlm_training.published_model import ASSET, PublishedModel
from vlm_training.state import TrainingState
from vlm_training.training_plan import SampleFile, TrainingPlan
from vlm_training.variants import read_variants

VARIANTS = """
variants:
  tiny: {base: example, data: truth, steps: 3, batch: 4, learning_rate: 0.001, seed: 1, evaluate: 2}
  half: {base: example, data: descriptions, epochs: 1, batch: 4, seed: 1, partitions: [nothing]}
"""


class NoDevice(GpuResource):
    """A GPU resource that must not be asked for a device."""

    def lease(self, **_):
        raise AssertionError("a device was asked for")


class NoDeviceFree(GpuResource):
    """A GPU resource all of whose devices are taken."""

    def lease(self, **_):
        raise NoDeviceFreeError("No device came free")


@pytest.fixture
def training_desk(desk, listing, tmp_path):
    """The desk with variants; the truth of the example lies in its home."""
    (tmp_path / "variants.yaml").write_text(VARIANTS)
    (desk.settings.home / "example").symlink_to(listing.parent)
    return desk.changed(variants=tmp_path / "variants.yaml")


def observed(done, name):
    return [
        event.asset_observation_data.asset_observation.metadata
        for event in done.result.all_events
        if event.event_type_value == "ASSET_OBSERVATION"
        and name in event.asset_observation_data.asset_observation.metadata
    ]


def test_a_variant_is_trained_published_and_left_alone(training_desk, bucket, listing, tmp_path):
    """A folder that loads as a model, its history and card; a second run verifies it without a device.

    So does another machine, whose home is new: it takes the model from the store.
    """
    done = training_desk.materialize(ASSET, key="tiny")
    assert done.success, done.failure
    folder = training_desk.settings.home / ASSET / "tiny"
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert [(one["step"], one["samples"]) for one in lines] == [(1, 4), (2, 8), (3, 12)]
    assert exact_revision(ModelSource(str(folder))).startswith("sha256:")
    assert "## Right, of 2 held-out properties\n\n- " in (folder / "README.md").read_text()
    assert observed(done, "metric")[-1]["step"].value == 3
    assert observed(done, "interval")[0]["interval"].value > 0
    # Whose labels it learned: they certify no promise of its answers.
    learned = learned_labels(training_desk.settings, exact_revision(ModelSource(str(folder))))
    plan = TrainingPlan.read(
        next((training_desk.settings.home / ".journal" / ASSET).glob("tiny/*/plan.json"))
    )
    samples = SampleFile(Path(plan.samples))
    trained = [name for name in samples.ids if not plan.is_held_out(name)]
    assert [name for name in samples.ids if name in learned] == trained
    assert 0 < len(trained) < len(samples.ids)

    weights = folder / "model.safetensors"
    nothing = NoDevice(leases_directory=str(training_desk.settings.state_directory / "leases"))
    again = training_desk.materialize(ASSET, key="tiny", gpu=nothing)
    assert again.success, again.failure
    before = weights.read_bytes()

    # Damaged, it is made again from its last checkpoint: the same bytes, and not a step is trained.
    flip_bit(weights, -1)
    restored = training_desk.materialize(ASSET, key="tiny")
    assert restored.success, restored.failure
    assert weights.read_bytes() == before
    assert observed(restored, "starts")[0]["step"].value == 3
    paths = training_desk.settings.layout.asset(ASSET).partition("tiny")
    assert read_sealed(paths.record)["step"] == 3

    # What a death between the exchange of the folders and the mark leaves: published again, to the byte.
    for path in (paths.record, paths.record_copy, *mark_copies(paths.version_mark)):
        path.unlink()
    assert training_desk.materialize(ASSET, key="tiny").success
    assert weights.read_bytes() == before
    assert (folder / "training.jsonl").read_text().count("\n") == 3

    first = training_desk.changed(store=bucket)
    ingest(listing, first.settings.home, store=bucket)
    second = replace(first.changed(home=tmp_path / "second"), instance=dg.DagsterInstance.ephemeral())
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "example").symlink_to(listing.parent)
    for machine in (first, second):
        done = machine.materialize(ASSET, key="tiny", gpu=nothing)
        assert done.success, done.failure
    assert (second.settings.home / ASSET / "tiny" / weights.name).read_bytes() == before


def test_data_that_is_not_there_is_named(training_desk):
    """A partition that is not published: which, where, and what to do."""
    done = training_desk.materialize(ASSET, key="half")
    assert not done.success
    assert "nothing is not published" in done.failure and "materialize" in done.failure


@pytest.mark.parametrize("is_done", [True, False])
def test_a_training_learns_from_nothing_withdrawn_while_it_is_read(training_desk, monkeypatch, is_done):
    """Neither beside a withdrawal nor after it does a training write down what it read before."""
    settings = training_desk.settings
    gone = Catalog.open(settings.home).slice(Catalog.open(settings.home).ranges[0])["property_id"].to_pylist()

    lock = PublishedModel.lock

    def locked_late(model, seconds):
        if is_done:
            list(withdraw(settings, prepare_withdrawal(settings, gone)))
        else:
            begin_withdrawal(control_state(settings), [])
        return lock(model, seconds)

    monkeypatch.setattr(PublishedModel, "lock", locked_late)
    done = training_desk.materialize(ASSET, key="tiny")
    assert not done.success
    assert "withdrawn" in done.failure
    assert not list(settings.home.rglob("samples.jsonl"))


def test_without_a_free_device_it_is_no_attempt(training_desk):
    """That no device came free says nothing of the training."""
    no_device = NoDeviceFree(leases_directory=str(training_desk.settings.state_directory / "leases"))
    done = training_desk.materialize(ASSET, key="tiny", gpu=no_device)
    assert not done.success
    run_id = done.result.run_id
    assert training_desk.instance.get_run_by_id(run_id).tags[NO_ATTEMPT] == run_id


def test_what_another_plan_leaves_behind_is_said_before_a_device_is_asked_for(training_desk):
    """The published model and the steps under way, which values changed, and where the training begins."""
    settings = training_desk.settings
    work = TrainingWork.for_variant(settings, "tiny", read_variants(settings)["tiny"])
    work.prepare()
    checkpoints = Checkpoints(work.folder / "checkpoints", work.paths.quarantine)
    checkpoints.sweep()
    checkpoints.write(TrainingState(2, 8), {"a": torch.zeros(1)})
    published = {"fingerprint": "a", "parts": {**work.fingerprint.parts, "schema": "b"}, "step": 3}
    write_sealed(work.paths.record, {"sequence": 1, **published, "files": {"model.safetensors": "c"}})
    settings.variants.write_text(VARIANTS.replace("steps: 3", "steps: 4").replace("seed: 1, e", "seed: 2, e"))
    nothing = NoDeviceFree(leases_directory=str(settings.state_directory / "leases"))

    def another_plan_of(done):
        """What the log of a run that failed has of it as an event."""
        assert "No device came free" in done.failure
        events = [one.dagster_event for one in training_desk.instance.all_logs(done.result.run_id)]
        (event,) = [one for one in events if one and one.event_type_value == "ASSET_OBSERVATION"]
        return event.asset_observation_data.asset_observation.metadata["another plan"].value

    done = training_desk.materialize(ASSET, key="tiny", gpu=nothing)
    said = another_plan_of(done)
    assert "model of tiny (3 steps) is of another plan (schema, seed, steps changed)" in said
    assert f"2 steps under another plan (seed, steps changed) are left behind in {work.folder}." in said
    assert said.endswith("This training begins anew at step 0.")
    settings.variants.write_text(VARIANTS)
    again = training_desk.materialize(ASSET, key="tiny", gpu=nothing)
    assert another_plan_of(again).endswith("This training goes on at step 2.")
