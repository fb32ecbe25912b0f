"""described_properties: what its page says, and when it follows what is published by itself."""

import dagster as dg

from sensors import sensor_definition
from vlm_results.described_properties import ASSET, build_described_properties, build_table_sensor
from vlm_results.guarantee import write_looks


@dg.op
def end_badly():
    """As a run that dies after the last publication."""
    raise RuntimeError


@dg.job
def dies():
    """A run that fails."""
    end_badly()


def test_the_page_counts_rows_and_the_sensor_follows_what_is_published(dataset, monkeypatch):
    """Nobody gets a second copy unasked; once begun, publications and promises are followed, by a second run
    if the first dies."""
    table = build_described_properties(dataset.settings)
    sensor = build_table_sensor(dataset.settings, table)
    with dg.DagsterInstance.ephemeral() as instance:

        def tick():
            return sensor(dg.build_sensor_context(instance=instance))

        assert "Nobody has begun the table" in tick().skip_message
        done = dg.materialize([table], instance=instance)
        (shown,) = done.asset_materializations_for_node(ASSET)
        assert shown.metadata["dagster/row_count"].value == 9
        assert (shown.metadata["written"].value, shown.metadata["snapshots"].value) == (3, 3)
        assert "has what is published" in tick().skip_message
        dataset.describe(dataset.keys[1], settings="other")
        (request,) = tick()
        assert "published" in request.tags["vlm-assets/why"]
        dataset.embed(dataset.keys[1])
        (again,) = tick()
        ended = dies.execute_in_process(
            instance=instance, raise_on_error=False, tags={"dagster/run_key": again.run_key}
        )
        assert not ended.success
        assert "asked for again later" in tick().skip_message
        monkeypatch.setattr(sensor_definition, "_AGAIN_SECONDS", 0.0)
        (later,) = tick()
        assert later.run_key not in (None, again.run_key)
        assert dg.materialize([table], instance=instance).success
        assert "has what is published" in tick().skip_message
        write_looks(dataset.settings, [])
        assert len(tick()) == 1
        assert dg.materialize([table], instance=instance).success
        assert "has what is published" in tick().skip_message
