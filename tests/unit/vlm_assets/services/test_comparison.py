"""Comparing: what is said of two contenders, and the page that is sent to somebody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trials import described
from vlm_assets.commands import comparison_view
from vlm_assets.commands.comparison_view import tables
from vlm_assets.commands.html_page import Card, ModelValue, page
from vlm_assets.config.settings import Settings
from vlm_assets.services import comparison as comparison_module
from vlm_assets.services.comparison import ComparedSample, Comparison, Contender, compare
from vlm_assets.services.trial import Trial
from vlm_catalog.catalog import Catalog

Answers = list[dict[str, Any] | None]
SURE = {"first": 0.96, "second": 0.55}
RIGHT = {"floors": 2, "has_pool": True}
WRONG = {"floors": 3, "has_pool": False}


def test_nothing_that_was_said_is_markup_on_a_page() -> None:
    """Ids and answers come from anywhere; the page is opened by somebody else."""
    bad = "<script>alert(1)</script>"
    written = page(bad, [Card(bad, bad, [None], {bad: bad, "list": [bad]})], tables=[(bad, [bad], [[bad]])])
    assert "<script" not in written
    assert written.count("&lt;script&gt;") >= 8


def compared(
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: Answers,
    second: Answers,
    **more: Any,
) -> Comparison:
    """Two contenders that answered so about the eight properties, against a truth in which all is RIGHT."""
    answers = {"first": first, "second": second}
    truth = tmp_path / "truth.csv"
    truth.write_text("id,floors,has_pool,note\n" + "".join(f"p{n},2,true,x\n" for n in range(8)))

    def trial(settings: Settings, *_: object, **__: object) -> Trial:
        sure = SURE[settings.prompt]
        rows = tuple(
            described(number, answer, confidence=dict.fromkeys(answer or {}, sure) or None)
            for number, answer in enumerate(answers[settings.prompt])
        )
        return Trial(rows, 8, "cpu-0", 2, load_seconds=0.0, seconds=80.0, bytes=1, batches=((8, 8, 80.0),))

    monkeypatch.setattr(comparison_module, "run_trial", trial)
    contenders = [Contender(name, settings.model_copy(update={"prompt": name})) for name in answers]
    return compare(contenders, Catalog.open(settings.home), ComparedSample(8, truth), **more)


def cell(comparison: Comparison, caption: str, row: str, column: int = 1) -> str:
    (rows,) = (rows for title, _, rows in tables(comparison) if title == caption)
    return next(line for line in rows if line[0] == row)[column]


def test_contenders_with_the_same_answers_are_not_told_apart(uneven, tmp_path, monkeypatch) -> None:
    """Identical answers are no proof of anything: what is seen and what may be hidden, both ways alike."""
    comparison = compared(uneven, tmp_path, monkeypatch, [RIGHT] * 8, [RIGHT] * 8)
    assert cell(comparison, "Agreement", "first and second", 2) == "no difference seen (-32.4% to +32.4%)"
    assert cell(comparison, "Agreement", "first and second") == "100% (68% to 100%)"
    assert comparison.disagreements == ()


def test_the_better_contender_is_named_and_all_right_is_surer_than_an_error(uneven, tmp_path, monkeypatch):
    """A property that failed has all of its fields wrong; a field wrong in one property counts a half."""
    second = [RIGHT | {"floors": 3}, None, *[RIGHT] * 6]
    comparison = compared(uneven, tmp_path, monkeypatch, [RIGHT] * 8, second)
    (pair,) = comparison.pairs
    assert pair.better_by is not None
    assert pair.better_by.by == pytest.approx(1.5 / 8)
    assert (pair.better_by.total, pair.better_by.differing) == (8, 2)
    assert pair.better_by.low < 0 < pair.better_by.by < pair.better_by.high
    whole, with_errors = (result.overall for result in comparison.results)
    assert whole is not None and with_errors is not None
    assert (whole.share, with_errors.share) == (1.0, pytest.approx(6.5 / 8))
    assert with_errors.low < whole.low < whole.high == 1.0
    assert with_errors.high < 1.0
    assert comparison.results[1].fields["floors"].share == pytest.approx(6 / 8)
    assert (comparison.results[1].failed.share, comparison.results[0].failed.share) == (1 / 8, 0.0)
    assert comparison.results[1].invalid.share == 1 / 8, "it never gave a valid answer"
    assert set(comparison.differences["p0"]) == {"floors"}
    assert comparison.disagreements == ("p1", "p0"), "the one that differs most comes first"
    back = compared(uneven, tmp_path, monkeypatch, second, [RIGHT] * 8).pairs[0].better_by
    assert back is not None
    assert (back.low, back.high) == pytest.approx((-pair.better_by.high, -pair.better_by.low))


def test_where_contenders_differ_the_page_says_how_sure_each_was(uneven, tmp_path, monkeypatch) -> None:
    """As a number beside a colour; an answer that is none, and the truth, have neither."""
    monkeypatch.setattr(
        comparison_view, "thumbnails", lambda _, uris, **__: [[None for _ in of_row] for of_row in uris]
    )
    comparison = compared(uneven, tmp_path, monkeypatch, [RIGHT] * 8, [WRONG, None, *[RIGHT] * 6])
    wrong, failed = comparison_view.comparison_cards(comparison, Catalog.open(uneven.home))
    assert wrong.values["floors"] == [ModelValue(2, 0.96), ModelValue(3, 0.55), 2]
    assert failed.values["floors"] == [ModelValue(2, 0.96), ModelValue(None, None), 2]
    written = page("", [wrong, failed])
    assert written.count(">0.55</span>") == 2
    assert written.count(">0.96</span>") == 4
    assert "confidences" not in comparison.as_json()


def test_a_clear_difference_is_beyond_chance(uneven, tmp_path, monkeypatch) -> None:
    """All right against all wrong: the interval leaves no difference out; cost is that of all devices."""
    comparison = compared(uneven, tmp_path, monkeypatch, [RIGHT] * 8, [WRONG] * 8, price_per_hour=3.6)
    (pair,) = comparison.pairs
    assert pair.better_by is not None and pair.better_by.low > 0.3
    assert pair.agreement.share == 0.0
    assert set(pair.fields) == {"floors", "has_pool"}, "a note of the truth file is no field"
    # Eight properties at 0.1 a second on one device of two: 80 s of one device, at 0.001 a second.
    assert comparison.results[0].cost == pytest.approx(0.08)


def test_a_first_answer_that_was_invalid_is_counted_and_costs_one_prompt(uneven) -> None:
    """Asked again, a property has two prompts behind it; the figure is that of one."""
    rows = tuple(described(0, RIGHT, attempts=times, prompt_tokens=100 * times) for times in (1, 2, 0))
    trial = Trial(rows, 8, "", 1, load_seconds=0.0, seconds=3.0, bytes=1, batches=((3, 3, 3.0),))
    result = comparison_module._result(Contender("a", uneven), [trial], {"p0": RIGHT}, {}, None)
    assert (result.invalid.share, result.invalid.total) == (0.5, 2), "one was never asked: it has no image"
    assert result.prompt_tokens == 100.0
