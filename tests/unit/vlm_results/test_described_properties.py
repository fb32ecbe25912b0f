"""described_properties: what its page says, and when it follows what is published by itself."""

import dagster as dg

from vlm_results.described_properties import ASSET, build_described_properties, build_table_sensor


def test_the_page_counts_rows_and_the_sensor_follows_what_is_published(dataset):
    """Nobody gets a second copy of all rows unasked; once it is begun, each publication is followed."""
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
        assert dg.materialize([table], instance=instance).success
        assert "has what is published" in tick().skip_message
