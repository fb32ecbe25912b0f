"""Carrying out repairs beside runs."""

from vlm_assets.config.resource_settings import control_state
from vlm_assets.services.repairs import Remedy, Repair, carry_out
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
