"""dataset_quality: its page, its checks that only warn, and when it looks by itself."""

import dagster as dg

from vlm_results.dataset_quality import (
    ASSET,
    build_dataset_quality,
    check_results,
    judged_state,
    quality_picture,
    why_due,
)
from vlm_results.published_table import last_publication
from vlm_results.quality import FieldAnswers, Quality, Suspicion

DAY = 86_400.0


def test_a_look_shows_every_field_and_stops_nothing(dataset):
    """The run succeeds whatever is odd; each of the checks says passed or warns."""
    quality = build_dataset_quality(dataset.settings)
    done = dg.materialize([quality])
    assert done.success
    (shown,) = done.asset_materializations_for_node(ASSET)
    assert shown.metadata["picture"].value.startswith("![")
    assert shown.metadata["described"].value + shown.metadata["failed"].value == dataset.catalog.rows
    checks = done.get_asset_check_evaluations()
    assert {one.check_name for one in checks} == {"alike", "answers", "consistent", "sure"}
    assert {one.severity for one in checks} == {dg.AssetCheckSeverity.WARN}


def test_a_price_of_two_dollars_is_no_formula():
    """A look ended with an error where a field's name or a value was what matplotlib cannot draw as one."""
    answers = FieldAnswers("values")
    answers.add(0, {"$$": 3, r"$\bad{$": 2})
    assert quality_picture(Quality({"k": "2026-01-01"}, {r"$\bad{$": answers}, 5, {}, (), ()))


def test_a_check_names_what_a_stranger_wrote_as_text():
    """Dagster's pages take its description for markdown: an id fetched an image from anywhere."""
    odd = Suspicion("alike", "floors", "It is odd.", examples=("![x](http://a.b/c)",))
    found, *_ = check_results(Quality({}, {}, 0, {}, (odd,), ()))
    assert found.description.startswith(r"It is odd. Such as \!\[x\](")
    assert found.metadata["found"].value == "It is odd. Such as ![x](http://a.b/c)."


def test_a_partition_that_was_published_anew_is_looked_at(dataset):
    """A new model's answers are judged too, though there are as many partitions as before."""
    before = last_publication([dataset.settings.descriptions])
    assert last_publication([dataset.settings.descriptions]) == before > 0
    dataset.describe(dataset.keys[1], settings="another model")
    assert last_publication([dataset.settings.descriptions]) != before


def test_labels_that_change_are_looked_at(dataset):
    """A corrected verdict ends a promise, so the quality is due after it, though nothing is published."""
    before = judged_state(dataset.settings)
    assert judged_state(dataset.settings) == before
    (dataset.settings.home / "review.jsonl").write_text("")
    assert judged_state(dataset.settings) != before


def test_it_looks_at_rest_and_seldom_while_something_works():
    """What is published is looked at once nothing works, or after six hours; the same never again."""
    assert why_due(None, 0.0, works=False, now=DAY) is None
    assert why_due(None, DAY, works=True, now=DAY) is not None
    assert why_due((DAY, 3.0), 3.0, works=False, now=9 * DAY) is None
    assert why_due((DAY, 3.0), 4.0, works=True, now=DAY + 3600) is None
    assert why_due((DAY, 3.0), 4.0, works=True, now=DAY + 7 * 3600) is not None
    assert why_due((DAY, 3.0), 4.0, works=False, now=DAY + 60) is not None
