"""Comparing a question set that asks again: what it would answer and take follows from two trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trials import described
from vlm_assets.commands.comparison_view import tables
from vlm_assets.config.settings import Settings, SettingsError, load_settings
from vlm_assets.services import comparison as comparison_module
from vlm_assets.services.comparison import ComparedSample, Comparison, Contender, compare
from vlm_assets.services.second_opinion import SecondOpinion
from vlm_assets.services.trial import Trial
from vlm_catalog.catalog import Catalog

SCHEMA = "vlm_assets.config.property_description:PropertyDescription[floors,has_pool]"
RIGHT = {"floors": 2, "has_pool": True}
WRONG = {"floors": 3, "has_pool": False}
UNSURE, FAILED_AGAIN, FAILED = 2, 5, 7
"""Properties: two of which the first is not sure, one of them without a second answer; one that it fails."""

SETS = f"""
second_look:
  schema: {SCHEMA}
  prompt: second
  where: confidence.floors < 0.8 OR floors IS NULL
  fills: [floors, has_pool]
third_look:
  schema: {SCHEMA}
  where: confidence.floors < 0.8
  fills: [floors, has_pool]
condition:
  schema: tests.support.homes:Condition
"""


def asking(home: Path, tmp_path: Path) -> Settings:
    file = tmp_path / "questions.yaml"
    file.write_text(SETS)
    return load_settings(model="example", home=home, prompt="first", questions=file)


def compared(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """The first is wrong where it is unsure, the second never; its sample takes four times as long."""
    first = [
        None if number == FAILED else WRONG if number in (UNSURE, FAILED_AGAIN) else RIGHT
        for number in range(8)
    ]
    second = [None if number == FAILED_AGAIN else RIGHT for number in range(8)]

    def trial(settings: Settings, *_: object, **__: object) -> Trial:
        is_first = settings.prompt == "first"
        rows = []
        for number, answer in enumerate(first if is_first else second):
            sure = {"floors": 0.5 if is_first and answer == WRONG else 0.96, "has_pool": 0.9}
            rows.append(described(number, answer, confidence=sure if answer else None))
        return Trial(
            tuple(rows), 8, "cpu-0", 1, load_seconds=4.0, seconds=80.0 if is_first else 320.0, bytes=1,
            batches=(), start_seconds=1.0, partition_rows=2,
        )  # fmt: skip

    monkeypatch.setattr(comparison_module, "run_trial", trial)
    truth = tmp_path / "truth.csv"
    truth.write_text("id,floors,has_pool\n" + "".join(f"p{number},2,true\n" for number in range(8)))
    opinion = SecondOpinion.of_set(settings, "second_look")
    contenders = [Contender("as set", settings), Contender(opinion.name, opinion.settings)]
    return compare(
        contenders, Catalog.open(settings.home), ComparedSample(8, truth), price_per_hour=3600.0,
        second_opinion=opinion,
    )  # fmt: skip


def test_what_both_would_answer_follows_from_the_two_trials(uneven, tmp_path, monkeypatch) -> None:
    """Where the condition holds the better answer is taken; where the second has none, the first's stays."""
    comparison = compared(asking(uneven.home, tmp_path), tmp_path, monkeypatch)
    first, second, both = comparison.results
    assert [result.name for result in comparison.results] == [
        "as set", "second_look", "as set, then second_look"
    ]  # fmt: skip
    shares = [result.fields["floors"].share for result in comparison.results]
    assert shares == pytest.approx([5 / 8, 7 / 8, 7 / 8])
    assert (first.failed.share, second.failed.share, both.failed.share) == (1 / 8, 1 / 8, 0)
    assert comparison.confidences[both.name][f"p{UNSURE}"] == {"floors": 0.96, "has_pool": 0.9}
    assert comparison.confidences[both.name][f"p{FAILED_AGAIN}"] == {"floors": 0.5, "has_pool": 0.9}
    assert len(comparison.pairs) == 3


def test_the_second_opinion_costs_what_is_asked_again(uneven, tmp_path, monkeypatch) -> None:
    """Three of eight properties are asked again; each partition starts a process and a model for both."""
    comparison = compared(asking(uneven.home, tmp_path), tmp_path, monkeypatch)
    first, second, both = comparison.results
    assert both.asked_again is not None and both.asked_again.share == 3 / 8
    assert (first.asked_again, second.asked_again) == (None, None)
    # Two properties a partition, four partitions: 1 s to start, 4 s to load, then 10 or 40 s a property.
    costs = [4 * (5 + 2 * 10), 4 * (5 + 2 * 40), 4 * (5 + 5 + 2 * (10 + 40 * 3 / 8))]
    assert [result.cost for result in comparison.results] == pytest.approx(costs)
    assert both.prompt_tokens == pytest.approx(137.5)
    ((_, head, rows), *_) = tables(comparison)
    asked_again = next(line for line in rows if line[0] == "asked again")
    assert dict(zip(head, asked_again, strict=True))["as set, then second_look"].startswith("38% (")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "There is no question set 'nothing'; there is second_look, third_look, condition"),
        ("condition", "The set condition has no where: only one that has both asks again"),
        ("third_look", "looks at answers of property_second_look, and a sample has those of"),
    ],
)
def test_what_is_no_second_opinion_of_the_descriptions_is_refused(uneven, tmp_path, name, message) -> None:
    """In one sentence, before anything is described."""
    with pytest.raises(SettingsError, match=message):
        SecondOpinion.of_set(asking(uneven.home, tmp_path), name)
