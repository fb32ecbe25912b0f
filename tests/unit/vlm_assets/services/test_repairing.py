"""Carrying out repairs beside runs."""

from vlm_assets.config.resource_settings import control_state
from vlm_assets.services.home_audit import audit
from vlm_assets.services.repairs import Remedy, Repair, carry_out, find_repairs
from vlm_durable.state.workers import Phase, Workers


def test_a_partition_is_left_to_the_run_that_waits_with_it_for_a_device(dataset):
    """The run holds its journal and knows its record for hours: no file is moved away from under it."""
    key, said = dataset.keys[0], []
    file = dataset.descriptions.path(key)
    repair = Repair("property_descriptions", key, Remedy.COMPUTE, ("damaged.",), forgets=True)
    workers = Workers(control_state(dataset.settings))
    with workers.begin(run_id="r", asset="property_descriptions", partition=key, expected=2) as beat:
        beat.enter(Phase.WAITING)
        assert not carry_out(dataset.settings, [repair], said.append, newest_here=False)
    assert said == [f"{key} is left to the run that works on it now; look again when it has ended."]
    assert file.exists()


def test_vectors_that_no_model_computes_are_left_to_a_person(dataset):
    """Nothing is launched without an embedding model: a repair names the setting, and is not done."""
    settings = dataset.settings.model_copy(update={"embedding_model": None})
    paths = settings.embeddings.partition(dataset.keys[0])
    for path in (paths.published, paths.version(0)):
        path.unlink()
    repairs = find_repairs(settings, audit(settings, dataset.catalog))
    assert [(repair.asset, repair.remedy) for repair in repairs] == [("property_embeddings", Remedy.BY_HAND)]
    assert "set VLM_ASSETS_EMBEDDING_MODEL first" in repairs[0].sentence()
    assert not carry_out(settings, repairs, print, newest_here=False)
