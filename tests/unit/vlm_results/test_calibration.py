"""Curves learn from labels, are kept with them, and get a new version when the labels change."""

import json
import shutil
from dataclasses import replace

import dagster as dg
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from tests.support.sure_answers import sure_dataset
from vlm_assets.assets.fingerprint import digest_of, settings_digest
from vlm_assets.assets.learned_labels import keep_learned, write_learned
from vlm_assets.assets.truth import REVIEWS, verdicts
from vlm_assets.commands.main import app
from vlm_assets.config.settings import SettingsError
from vlm_assets.services.command_error import CommandError
from vlm_durable.files.sealed_json import sealed
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_engine.schema import same
from vlm_results import calibration, review_page
from vlm_results.calibration import LEAST_LABELS, learn_curves, read_curves
from vlm_results.certification import certify_published
from vlm_results.confidence_statistics import calibration_error
from vlm_results.dataset_quality import ASSET, build_dataset_quality
from vlm_results.guarantee import LookResult, write_looks
from vlm_results.labels import Judged, certifying_labels, read_judged, teaching_labels
from vlm_results.quality import assess_quality
from vlm_results.review import (
    TakenVerdicts,
    accuracy,
    append_verdict,
    draw_sample,
    draw_unsure,
    published_answers,
    take_verdicts,
    verdict_of,
)
from vlm_results.review_page import review_app
from vlm_training.description_model import TrainingWork
from vlm_training.variants import Variant

TRUE = {"floors": 2, "has_pool": False}


def judge_sample(dataset, count, *, seed=1, **changed):
    """Verdicts of a person who knows the truth, on a random sample. changed: of each drawn property."""
    drawn = draw_sample(dataset.settings, dataset.catalog, count=count, seed=seed, suspicious=False)
    judge(dataset, drawn, **changed)
    return drawn


def judge(dataset, drawn, **changed):
    for reviewed in drawn:
        right = [name for name, value in reviewed.description.items() if same(value, TRUE[name])]
        wrong = [name for name in TRUE if name not in right]
        verdict = verdict_of(replace(reviewed, **changed), right=right, wrong=wrong, corrections={})
        append_verdict(dataset.settings.home, verdict)


def judged_of(dataset):
    """The labels of the one kind of answers that there is."""
    (judged,) = read_judged(dataset.settings, dataset.catalog).values()
    return judged


def described(dataset):
    """All published answers."""
    paths = [dataset.settings.descriptions.partition(key).published for key in dataset.keys]
    return [answer for path in paths for answer in pq.read_table(path)["description"].to_pylist()]


def learn(dataset, **report):
    settings, catalog = dataset.settings, dataset.catalog
    quality = assess_quality(settings, catalog)
    return learn_curves(settings, quality, read_judged(settings, catalog), **report)


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
    written = path.stat().st_ino, path.stat().st_mtime_ns
    kept = learn(dataset)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == written
    assert [one.curve for one in kept] == [one.curve for one in first]
    assert kept[0].labels.confidences.tolist() == first[0].labels.confidences.tolist()
    judge_sample(dataset, 20, seed=2)
    assert {one.version for one in learn(dataset)} == {2}
    # A damaged file is made anew from the verdicts, which are the truth.
    damaged = path.read_bytes()[:-9]
    path.write_bytes(damaged)
    told = []
    assert {one.version for one in learn(dataset, report=told.append)} == {1}
    (aside,) = dataset.settings.descriptions.quarantine.glob("calibration.json.*")
    assert aside.read_bytes() == damaged, "a damaged file is moved, not overwritten"
    assert [str(path) in sentence and str(aside) in sentence for sentence in told] == [True]
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
        judged = judged_of(dataset)
        assert len(certifying_labels(judged, "floors")) == certifying


def test_a_label_is_of_what_made_the_answer_that_was_read(tmp_path, monkeypatch):
    """A run that publishes while labels are read has none of its answers certify the model before it."""
    dataset = sure_dataset(tmp_path, truth=tmp_path / "truth.jsonl")
    dataset.write_truth(tmp_path / "truth.jsonl", ["p0"])
    read, models = PartitionRows.to_table, ["other"]

    def read_beside_a_run(rows, columns):
        if models:
            dataset.answer(dataset.keys[0], model=models.pop())
        return read(rows, columns)

    monkeypatch.setattr(PartitionRows, "to_table", read_beside_a_run)
    (made_with,) = read_judged(dataset.settings, dataset.catalog)
    published = dataset.descriptions.record(dataset.keys[0])
    assert made_with == settings_digest(published.metadata["parts"])


def test_labels_that_the_describing_model_learned_neither_teach_nor_certify(tmp_path):
    """A model says again what it learned. Other labels count, and these for other models' answers."""
    dataset = sure_dataset(tmp_path, truth=tmp_path / "truth.jsonl", guarantee="floors>=0.95")
    ids = [f"p{number}" for number in range(400)]
    dataset.write_truth(dataset.settings.truth, ids)
    folder, base = dataset.settings.layout.asset("description_model").published / "tiny", tmp_path / "base"
    for model, learned in ((base, ids[:50]), (folder, ids[50:300])):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        revision = exact_revision(ModelSource(str(model)))
        write_learned(model, learned, base, made_of=model.name)
        assert exact_revision(ModelSource(str(model))) == revision, "no row becomes stale by the file"
    for certifying, answering in ((400, "sha256:another"), (100, revision)):
        for key in dataset.keys:
            dataset.answer(key, model=answering, revision=answering)
        judged = judged_of(dataset)
        assert len(certifying_labels(judged, "floors")) == certifying
        assert len(teaching_labels(judged, "floors")) == certifying
    assert {label.name for label in judged if not label.is_learned} == set(map(digest_of, ids[300:]))
    (promise,) = certify_published(dataset.settings, dataset.catalog)
    assert "300 labels do not count: the model was trained on them." in promise.sentence()


def test_what_a_model_learned_is_known_after_its_folder_is_gone_and_of_its_students(tmp_path):
    """Rows outlive their model: its labels would certify them two trainings later. Students learn them."""
    dataset = sure_dataset(tmp_path, truth=tmp_path / "truth.jsonl", guarantee="floors>=0.95")
    ids, folder = [f"p{number}" for number in range(400)], tmp_path / "model"
    dataset.write_truth(dataset.settings.truth, ids)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_learned(folder, ids[:300], tmp_path, made_of="training")
    revision = exact_revision(ModelSource(str(folder)))
    describing = dataset.settings.model_copy(update={"model": str(folder)})
    for key in dataset.keys:
        dataset.answer(key, model=revision, revision=revision)
    keep_learned(describing, "sha256:another")
    keep_learned(describing, revision)
    shutil.rmtree(folder)
    (kept,) = (dataset.settings.state_directory / "learned").iterdir()
    assert len(certifying(dataset)) == 100
    student = TrainingWork.for_variant(dataset.settings, "student", Variant(base="a:b", epochs=1))
    assert [name for name in ids if name in student.labels] == ids[:300]
    earlier = sealed({"learned": [digest_of(name) for name in ids[:300]]})
    for unreadable in (kept.read_bytes()[:-5], earlier):
        kept.write_bytes(unreadable)
        with pytest.raises(SettingsError, match="without it these labels would count"):
            read_judged(dataset.settings, dataset.catalog)


def test_only_what_chance_drew_certifies_and_stays_in_the_sample_as_it_was_judged(tmp_path):
    """Properties chosen for being unsure are wrong more often. Chosen later, one drawn before stays drawn.

    Its verdict stays too: who chooses what to judge again could leave the right ones alone.
    """
    dataset = sure_dataset(tmp_path)
    drawn = judge_sample(dataset, 60)
    certified = certifying(dataset)
    for one in drawn:
        again = verdict_of(
            replace(one, why="floors: 0.61", weight=0.3, by_chance=False),
            right=["floors"],
            wrong=[],
            corrections={},
        )
        append_verdict(dataset.settings.home, again)
    judge_sample(dataset, 40, why="floors: 0.61", weight=0.0, by_chance=False)
    judged = judged_of(dataset)
    assert len(certified) == len(teaching_labels(judged, "floors")) == len(drawn)
    assert certifying(dataset).digest == certified.digest
    assert not certified.right.all()
    assert len(judged) > len(drawn)


def certifying(dataset):
    return certifying_labels(judged_of(dataset), "floors")


def test_verdicts_from_a_file_neither_certify_nor_teach_nor_change_what_chance_drew(tmp_path):
    """Nobody knows how it was chosen what to judge elsewhere: it says nothing of all answers."""
    dataset = sure_dataset(tmp_path)
    settings, catalog = dataset.settings, dataset.catalog
    drawn = judge_sample(dataset, 60)
    certified, right = certifying(dataset), accuracy(settings.home, published_answers(settings, catalog))
    others = draw_sample(settings, catalog, count=40, seed=2, suspicious=False)
    lines = [
        {"property_id": one.property_id, "answer": one.answer, "description": one.description}
        for one in (*drawn, *others)
    ]
    path = tmp_path / "verdicts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert take_verdicts(settings, catalog, path) == TakenVerdicts(len(others), len(drawn), 0)
    assert certifying(dataset).digest == certified.digest
    assert accuracy(settings.home, published_answers(settings, catalog)) == right
    judged = judged_of(dataset)
    assert len(judged) == len(drawn) + len(others)
    assert len(teaching_labels(judged, "floors")) == len(drawn)


def test_another_confidence_makes_other_labels(tmp_path):
    """What a look showed of some confidences is not taken for what others show."""
    one = Judged("p", "a", {"floors": True}, {"floors": 0.9}, 1.0, is_random=True)
    digests = {
        certifying_labels([replace(one, confidences={"floors": sure})], "floors").digest
        for sure in (0.9, 0.9, 0.91)
    }
    assert len(digests) == 2


def test_a_property_that_is_drawn_after_it_was_chosen_is_the_last_label(tmp_path):
    """The first 300 labels stay the first 300: a look is not done again with others."""
    dataset = sure_dataset(tmp_path)
    chosen = judge_sample(dataset, 1, seed=5, weight=0.0, by_chance=False)
    judge_sample(dataset, 10)
    before = certifying(dataset)
    judge(dataset, chosen)
    judged = judged_of(dataset)
    assert certifying_labels(judged, "floors", len(before)).digest == before.digest
    assert len(certifying(dataset)) == len(before) + 1


@pytest.mark.parametrize("kept", ["verdicts", "verdicts as truth"])
def test_verdicts_as_truth_file_do_not_let_suspicious_ones_certify(tmp_path, kept):
    """``VLM_ASSETS_TRUTH`` may name review.jsonl: the verdicts count as what they are."""
    truth = tmp_path / "home" / REVIEWS if kept == "verdicts as truth" else None
    dataset = sure_dataset(tmp_path, truth=truth)
    judge_sample(dataset, 60, weight=0.0, by_chance=False)
    assert len(certifying(dataset)) == 0


def test_rows_without_confidence_teach_nothing_and_are_drawn_by_chance_alone(tmp_path):
    """Files of earlier versions have no such column: their labels count for the accuracy alone."""
    dataset = sure_dataset(tmp_path)
    for key in dataset.keys:
        dataset.answer(key, without_confidence=True)
    with pytest.raises(CommandError, match="No published answer has a confidence"):
        draw_unsure(dataset.settings, dataset.catalog, count=10, seed=1)
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


def test_unsure_properties_are_drawn_with_a_random_share_and_the_accuracy_stays_that_of_all(tmp_path):
    """Half is chosen for teaching most, and is wrong more often. Weights keep the accuracy unbiased."""
    dataset = sure_dataset(tmp_path)
    settings, catalog = dataset.settings, dataset.catalog
    drawn = draw_unsure(settings, catalog, count=400, seed=1)
    chosen = [one for one in drawn if not one.by_chance]
    assert 150 < len(chosen) <= 200
    assert all(one.why.startswith(("floors has the", "has_pool has the")) for one in chosen)
    assert {one.why for one in drawn if one.by_chance} == {""}
    assert drawn != sorted(drawn, key=lambda one: one.ordinal)
    judge(dataset, drawn)
    judged = judged_of(dataset)
    assert len(certifying_labels(judged, "floors")) == 200
    assert len(teaching_labels(judged, "floors")) == len(drawn)
    answers = [one.description for one in chosen], described(dataset)
    wrong = [sum(answer != TRUE for answer in part) / len(part) for part in answers]
    right = accuracy(settings.home, published_answers(settings, catalog)).fields["floors"]
    of_all = [row["floors"] == 2 for row in described(dataset)]
    truth = sum(of_all) / len(of_all)
    assert right.low <= truth <= right.high
    assert wrong[0] > 1.5 * wrong[1]
    assert abs(right.share - truth) < 0.03


def test_unsure_means_near_the_threshold_where_something_is_promised(tmp_path):
    """Labels there say whether the threshold could be lower; sure and hopeless answers teach nothing."""
    dataset = sure_dataset(tmp_path, guarantee="floors>=0.95")
    look = LookResult(
        settings_digest({"maker": "s"}), "floors", 0.95, 0.05, 300, {}, 0.9, 299, 300, "2026-11-01"
    )
    write_looks(dataset.settings, [look])
    drawn = draw_unsure(dataset.settings, dataset.catalog, count=200, seed=1)
    sure = [float(one.why.split()[-1][:-1]) for one in drawn if not one.by_chance]
    assert all(one.why.startswith("floors") for one in drawn if not one.by_chance)
    assert sum(0.7 < confidence < 0.97 for confidence in sure) > 0.8 * len(sure)


def test_the_page_shows_how_sure_each_answer_is(tmp_path, monkeypatch):
    """As a number beside a colour, with a legend; rows of earlier versions have neither."""
    monkeypatch.setattr(review_page, "thumbnails", lambda _, uris, **__: [[None] * len(uris[0])])
    dataset = sure_dataset(tmp_path)

    def shown():
        drawn = draw_sample(dataset.settings, dataset.catalog, count=20, seed=1, suspicious=False)
        page = TestClient(review_app(dataset.settings, dataset.catalog, drawn))
        return drawn, [page.get(f"/property/{number}").json() for number in range(20)]

    drawn, pages = shown()
    for reviewed, content in zip(drawn, pages, strict=True):
        assert [field["value"] for field in content["fields"]] == [
            json.dumps(value) for value in reviewed.description.values()
        ]
        assert {field["name"]: field["sure"]["text"] for field in content["fields"]} == {
            name: f"{sure:.2f}" for name, sure in reviewed.confidence.items()
        }
        colours = {band["text"]: band["colour"] for band in content["legend"]["bands"]}
        for field in content["fields"]:
            sure = float(field["sure"]["text"])
            band = "0.95 and more" if sure >= 0.95 else "0.80 to 0.94" if sure >= 0.8 else "below 0.80"
            assert field["sure"]["colour"] == colours[band]
    for key in dataset.keys:
        dataset.answer(key, without_confidence=True)
    _, pages = shown()
    assert {field["sure"] for content in pages for field in content["fields"]} == {None}


def test_the_command_draws_unsure_properties_and_refuses_two_ways_of_drawing(tmp_path, monkeypatch):
    """``review --unsure`` opens the page on a mixed sample; at its end it says what is promised."""
    dataset = sure_dataset(tmp_path)
    home = str(dataset.settings.home)
    samples = []
    monkeypatch.setattr(review_page, "review_app", lambda settings, catalog, drawn: samples.append(drawn))
    monkeypatch.setattr(review_page, "serve_page", lambda *_, **__: None)
    monkeypatch.setenv("VLM_ASSETS_GUARANTEE", "floors>=0.95")
    monkeypatch.setenv("VLM_ASSETS_DESCRIPTION_SCHEMA", "tests.support.sure_answers:House")
    asked = ["review", "--home", home, "--sample", "40", "--unsure"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert len({one.by_chance for one in samples[0]}) == 2
    assert "300 labels of a random sample are missing" in " ".join(done.output.split())
    assert CliRunner().invoke(app, [*asked, "--suspicious"]).exit_code == 2
