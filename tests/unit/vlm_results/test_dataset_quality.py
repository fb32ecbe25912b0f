"""dataset_quality: its page, its checks that only warn, and when it looks by itself."""

import dagster as dg

from vlm_results.dataset_quality import ASSET, build_dataset_quality, last_publication, why_due

DAY = 86_400.0


def test_a_look_shows_every_field_and_stops_nothing(dataset):
    """The run succeeds whatever is odd; each of the three checks says passed or warns."""
    quality = build_dataset_quality(dataset.settings)
    done = dg.materialize([quality])
    assert done.success
    (shown,) = done.asset_materializations_for_node(ASSET)
    assert shown.metadata["picture"].value.startswith("![")
    assert shown.metadata["described"].value + shown.metadata["failed"].value == dataset.catalog.rows
    checks = done.get_asset_check_evaluations()
    assert {one.check_name for one in checks} == {"alike", "answers", "consistent"}
    assert {one.severity for one in checks} == {dg.AssetCheckSeverity.WARN}


def test_a_partition_that_was_published_anew_is_looked_at(dataset):
    """A new model's answers are judged too, though there are as many partitions as before."""
    before = last_publication(dataset.settings)
    assert last_publication(dataset.settings) == before > 0
    dataset.describe(dataset.keys[1], settings="another model")
    assert last_publication(dataset.settings) != before


def test_it_looks_at_rest_and_seldom_while_something_works():
    """What is published is looked at once nothing works, or after six hours; the same never again."""
    assert why_due(None, 0.0, works=False, now=DAY) is None
    assert why_due(None, DAY, works=True, now=DAY) is not None
    assert why_due((DAY, 3.0), 3.0, works=False, now=9 * DAY) is None
    assert why_due((DAY, 3.0), 4.0, works=True, now=DAY + 3600) is None
    assert why_due((DAY, 3.0), 4.0, works=True, now=DAY + 7 * 3600) is not None
    assert why_due((DAY, 3.0), 4.0, works=False, now=DAY + 60) is not None
