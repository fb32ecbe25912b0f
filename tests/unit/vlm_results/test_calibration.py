"""Curves learn from labels, are kept with them, and get a new version when the labels change."""

from dataclasses import replace

import dagster as dg
import pytest

from tests.support.sure_answers import sure_dataset
from vlm_assets.assets.truth import REVIEWS, verdicts
from vlm_engine.schema import same
from vlm_results import calibration
from vlm_results.calibration import LEAST_LABELS, learn_curves, read_curves
from vlm_results.confidence_statistics import calibration_error
from vlm_results.dataset_quality import ASSET, build_dataset_quality
from vlm_results.labels import certifying_labels, read_judged, teaching_labels
from vlm_results.quality import assess_quality
from vlm_results.review import append_verdict, draw_sample, verdict_of

TRUE = {"floors": 2, "has_pool": False}


def judge_sample(dataset, count, *, seed=1, **changed):
    """Verdicts of a person who knows the truth, on a random sample. changed: of each drawn property."""
    drawn = draw_sample(dataset.settings, dataset.catalog, count=count, seed=seed, suspicious=False)
    for reviewed in drawn:
        right = [name for name, value in reviewed.description.items() if same(value, TRUE[name])]
        wrong = [name for name in TRUE if name not in right]
        verdict = verdict_of(replace(reviewed, **changed), right=right, wrong=wrong, corrections={})
        append_verdict(dataset.settings.home, verdict)
    return drawn


def learn(dataset):
    settings, catalog = dataset.settings, dataset.catalog
    quality = assess_quality(settings, catalog)
    return learn_curves(settings, quality, read_judged(settings, catalog))


def test_a_curve_is_kept_with_its_labels_and_gets_a_new_version_when_they_change(tmp_path):
    """Nothing new: the same version, and the file is not written. One verdict more: the next version."""
    dataset = sure_dataset(tmp_path)
    assert learn(dataset) == []
    judge_sample(dataset, 120)
    first = learn(dataset)
    assert [(one.field, one.version, len(one.labels)) for one in first] == [
        ("floors", 1, len(verdicts(dataset.settings.home))),
        ("has_pool", 1, len(verdicts(dataset.settings.home))),
    ]
    path = dataset.settings.state_directory / "calibration.json"
    written = path.stat()
    kept = learn(dataset)
    assert path.stat() == written
    assert [one.curve for one in kept] == [one.curve for one in first]
    assert kept[0].labels.confidences.tolist() == first[0].labels.confidences.tolist()
    judge_sample(dataset, 20, seed=2)
    assert {one.version for one in learn(dataset)} == {2}
    # A damaged file is made anew from the verdicts, which are the truth.
    path.write_bytes(path.read_bytes()[:-9])
    assert {one.version for one in learn(dataset)} == {1}
    assert {one.version for one in read_curves(dataset.settings)} == {1}


def test_few_labels_teach_no_curve_and_those_of_another_model_none_of_this_one(tmp_path):
    """A verdict is on the answer that it was given for; a curve belongs to the model that was judged."""
    dataset = sure_dataset(tmp_path)
    judge_sample(dataset, LEAST_LABELS // 2)
    assert learn(dataset) == []
    judge_sample(dataset, 200, seed=3)
    (made_with,) = {one.made_with for one in learn(dataset)}
    for key in dataset.keys:
        dataset.answer(key, model="other", seed=2)
    assert learn(dataset) == []
    judge_sample(dataset, 200, seed=4)
    (other,) = {one.made_with for one in learn(dataset)}
    assert other != made_with


def test_a_truth_file_and_a_larger_model_teach_but_a_model_does_not_certify(tmp_path):
    """Rows that name a model are a model's answers. Both teach a curve; only a person's may certify."""
    ids = [f"p{number}" for number in range(0, 2000, 5)]
    for columns, certifying in (({}, len(ids)), ({"model": "larger"}, 0)):
        folder = tmp_path / str(certifying)
        folder.mkdir()
        dataset = sure_dataset(folder, truth=folder / "truth.jsonl")
        dataset.write_truth(dataset.settings.truth, ids, **columns)
        curves = learn(dataset)
        assert {len(one.labels) for one in curves} == {len(ids)}
        (judged,) = read_judged(dataset.settings, dataset.catalog).values()
        assert len(certifying_labels(judged, "floors")) == certifying


def test_only_what_chance_drew_certifies_and_a_verdict_that_is_given_again_stays_in_the_sample(tmp_path):
    """Properties chosen for being unsure are wrong more often. Chosen later, one drawn before stays drawn."""
    dataset = sure_dataset(tmp_path)
    drawn = judge_sample(dataset, 60)
    judge_sample(dataset, 60, why="floors: 0.61", weight=0.3, by_chance=False)
    judge_sample(dataset, 40, seed=2, why="floors: 0.61", weight=0.0, by_chance=False)
    (judged,) = read_judged(dataset.settings, dataset.catalog).values()
    ids = {one.property_id for one in drawn}
    assert len(certifying_labels(judged, "floors")) == len(ids)
    assert len(teaching_labels(judged, "floors")) == len(ids)
    assert len(judged) > len(ids)


@pytest.mark.parametrize("kept", ["verdicts", "verdicts as truth"])
def test_verdicts_as_truth_file_do_not_let_suspicious_ones_certify(tmp_path, kept):
    """``VLM_ASSETS_TRUTH`` may name review.jsonl: the verdicts count as what they are."""
    truth = tmp_path / "home" / REVIEWS if kept == "verdicts as truth" else None
    dataset = sure_dataset(tmp_path, truth=truth)
    judge_sample(dataset, 60, weight=0.0, by_chance=False)
    (judged,) = read_judged(dataset.settings, dataset.catalog).values()
    assert len(certifying_labels(judged, "floors")) == 0


def test_rows_without_confidence_teach_nothing_and_stop_nothing(tmp_path):
    """Files of earlier versions have no such column: their labels count for the accuracy alone."""
    dataset = sure_dataset(tmp_path)
    for key in dataset.keys:
        dataset.answer(key, without_confidence=True)
    judge_sample(dataset, 100)
    assert learn(dataset) == []


def test_the_page_of_the_quality_shows_the_error_before_and_after(tmp_path, monkeypatch):
    """A person sees for each field how far confidence and right answers are apart, as table and picture."""
    monkeypatch.setattr(calibration, "LEAST_LABELS", 20)
    dataset = sure_dataset(tmp_path)
    judge_sample(dataset, 100)
    done = dg.materialize([build_dataset_quality(dataset.settings)])
    (shown,) = done.asset_materializations_for_node(ASSET)
    assert shown.metadata["reliability"].value.startswith("![")
    assert "floors" in shown.metadata["calibration"].value
    assert all(calibration_error(one.before) > 0 for one in read_curves(dataset.settings))


def test_a_partition_that_is_less_sure_than_all_others_is_named(tmp_path):
    """Photographs of another kind: its labels may say something else. Others are no false alarm."""
    dataset = sure_dataset(tmp_path)
    assert assess_quality(dataset.settings, dataset.catalog).findings_of("sure") == []
    dataset.answer(dataset.keys[2], shift=0.3)
    found = assess_quality(dataset.settings, dataset.catalog).findings_of("sure")
    assert {finding.key for finding in found} == {dataset.keys[2]}
    assert {finding.field for finding in found} == {"floors", "has_pool"}
