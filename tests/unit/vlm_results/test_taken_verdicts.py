"""Verdicts from elsewhere, such as Label Studio: all of a file or none, and only on what is published."""

import json

import pytest

from tests.support.exports import exported_rows
from vlm_assets.assets.truth import verdicts
from vlm_results.export import Format, export
from vlm_results.labels import certifying_labels, read_judged
from vlm_results.review import append_verdict, draw_sample, take_verdicts, verdict_of


@pytest.fixture
def answers(dataset, tmp_path):
    """The answers of an export, by property."""
    export(dataset.settings, dataset.catalog, tmp_path / "out", Format.jsonl)
    return {name: row["answer"] for name, row in exported_rows(tmp_path / "out").items()}


@pytest.fixture
def judged(call, tmp_path):
    """Hands a file with these lines to the command, and gives what it said."""

    def judge(*lines):
        path = tmp_path / "verdicts.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return json.loads(call("review", "--verdicts", str(path), "--json").stdout)

    return judge


def line(answers, name, **description):
    return {"property_id": name, "answer": answers[name], "description": description}


def test_verdicts_on_other_answers_than_the_published_are_not_kept(dataset, answers, judged):
    """A property that was described anew meanwhile is to be judged anew; a failed one has no answer."""
    assert answers["p4"] is None
    dataset.describe(dataset.keys[1], settings="other")
    lines = [line(answers, name, floors="2", has_pool=True) for name in ("p0", "p3")]
    assert judged(*lines) == {"kept": 1, "known": 0, "replaced": 1}
    (verdict,) = verdicts(dataset.settings.home).values()
    assert (verdict.property_id, verdict.right, verdict.wrong) == ("p0", ("floors",), ("has_pool",))
    assert judged(*lines) == {"kept": 0, "known": 1, "replaced": 1}
    assert judged(line(answers, "p0", floors="2")) == {"kept": 1, "known": 0, "replaced": 0}


def draw(dataset, name):
    """A property of a random sample of all."""
    sample = draw_sample(dataset.settings, dataset.catalog, count=9, seed=1, suspicious=False)
    return next(reviewed for reviewed in sample if reviewed.property_id == name)


def test_a_set_that_answers_anew_takes_no_label_of_another_set_out_of_the_random_sample(two_sets, tmp_path):
    """Who chooses what to judge again does not choose which labels of the other set certify."""
    settings, catalog, path = two_sets.settings, two_sets.catalog, tmp_path / "verdicts.jsonl"
    drawn = verdict_of(draw(two_sets, "p0"), right=["floors", "wear"], wrong=[], corrections={})
    append_verdict(settings.home, drawn)

    def judge_described():
        """A line on the descriptions' answer alone; whether it was kept, and how many labels certify."""
        answer = draw(two_sets, "p1").answer  # All answers of these rows are alike.
        line = {"property_id": "p0", "answer": answer, "description": {"floors": 2}}
        path.write_text(json.dumps(line))
        kept = take_verdicts(settings, catalog, path).kept
        labels = read_judged(settings, catalog).values()
        return kept, sum(len(certifying_labels(of_settings, "wear")) for of_settings in labels)

    two_sets.describe(two_sets.keys[0], settings="other")
    assert judge_described() == (0, 1)
    two_sets.answer_further(two_sets.keys[0], settings="other")
    assert judge_described() == (1, 0), "nothing that chance drew is published any more"


def test_what_chance_drew_is_not_drawn_again_though_a_file_judged_its_new_answer(dataset, judged):
    """A model may have learned from the first verdict: a second one that certifies would flatter it."""
    drawn = draw(dataset, "p0")
    append_verdict(dataset.settings.home, verdict_of(drawn, right=["floors"], wrong=[], corrections={}))
    dataset.describe(dataset.keys[0], settings="other")
    answer = draw(dataset, "p1").answer  # All answers of these rows are alike.
    line = {"property_id": "p0", "answer": answer, "description": {"floors": 2}}
    assert judged(line) == {"kept": 1, "known": 0, "replaced": 0}
    sample = draw_sample(dataset.settings, dataset.catalog, count=9, seed=2, suspicious=False)
    assert "p0" not in {reviewed.property_id for reviewed in sample}


@pytest.mark.parametrize("wrong", [{"description": {"garden": "x"}}, {"description": None}, {"answer": 1}])
def test_a_file_with_a_wrong_line_is_refused_as_a_whole(dataset, answers, tmp_path, wrong):
    """The line is named, and nothing of the file is kept: it can be put right and handed over once more."""
    path = tmp_path / "verdicts.jsonl"
    lines = [line(answers, "p0", floors="2"), {**line(answers, "p1"), **wrong}]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    with pytest.raises(Exception, match=r"line 2.*Nothing was kept"):
        take_verdicts(dataset.settings, dataset.catalog, path)
    assert verdicts(dataset.settings.home) == {}
    with pytest.raises(Exception, match="cannot be read"):
        take_verdicts(dataset.settings, dataset.catalog, tmp_path / "none.jsonl")
