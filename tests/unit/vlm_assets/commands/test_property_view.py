"""``vlm-assets show``: what a person reads is what a program gets."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from tests.support.command_line import run_command
from tests.support.homes import BEGAN, publish
from vlm_assets.assets.description_work import description_rows


def test_a_property_that_is_not_published_yet(empty) -> None:
    """Its images and its partition are told before anything was described."""
    home = empty.settings.home
    told = json.loads(run_command(home, "show", "p4", "--json").stdout)
    assert (told["ordinal"], told["partition"], told["published"]) == (4, "000000003-000000005", [])
    assert [(one["uri"], one["there"]) for one in told["images"]] == [("4.jpg", False)]
    assert told["not_published"]
    said = run_command(home, "show", "p4").output
    assert "p4: ordinal 4, partition 000000003-000000005" in said
    assert "4.jpg: not there now" in said


ROW: dict[str, Any] = {
    "status": "ok",
    "description": {"floors": 2},
    "tries": 1,
    "attempts": 1,
    "images_seen": 1,
    "images_failed": [],
    "seconds": 1.0,
    "model": "a model",
    "model_revision": "1",
    "fingerprint": "f",
    "device": "cpu-0",
    "described_at": BEGAN,
}


def describe(dataset, *rows: dict[str, Any]) -> None:
    """Publish the first range anew, with whole rows. rows: what is otherwise in each."""
    key = dataset.keys[0]
    changed = zip(dataset.rows(key), rows or [{}] * 3, strict=True)
    whole = [{**ROW, **known, **row} for known, row in changed]
    publish(dataset.descriptions, key, whole, description_rows(pa.struct([("floors", pa.int64())])), "f", {})


@pytest.mark.parametrize(
    ("property_id", "expected"),
    [
        ("p0", ["Status ok after 1 attempt, 1 of 1 image seen"]),
        (
            "p1",
            [
                "Status ok after 1 attempt, 4 of 9 images seen",
                "Image left out (corrupt): it is cut short",
                "Not shown to the model (VLM_ASSETS_MAX_IMAGES is 4): 5.jpg, 6.jpg, 7.jpg, 8.jpg",
            ],
        ),
        ("p2", ["Status failed after 0 attempts, 0 of 2 images seen", "Error missing: no image"]),
    ],
)
def test_a_row_says_how_many_of_its_images_were_seen(empty, property_id: str, expected: list[str]) -> None:
    """An answer from 4 of 9 images is not taken for one from all of them; the page says the same."""
    broken = {"uri": "0.jpg", "kind": "corrupt", "error": "it is cut short"}
    some = {
        "images_seen": 4,
        "images_used": [f"{number}.jpg" for number in range(1, 5)],
        "images_not_used": [f"{number}.jpg" for number in range(5, 9)],
        "images_not_used_reason": "VLM_ASSETS_MAX_IMAGES is 4",
        "images_failed": [broken],
    }
    failed = {
        "status": "failed",
        "error_kind": "missing",
        "error": "no image",
        "description": None,
        "attempts": 0,
        "images_seen": 0,
        "images_failed": [broken, {**broken, "uri": "1.jpg"}],
    }
    all_of_it = {"images_used": ["0.jpg"], "images_not_used": [], "confidence": {"floors": 0.97}}
    describe(empty, all_of_it, some, failed)
    html = empty.settings.home / "shown.html"
    said = run_command(html.parent, "show", property_id, "--html", str(html)).output
    for line in expected:
        assert line in said.splitlines()
        assert line in html.read_text()
    assert ("  floors: 2 (confidence 0.97)" in said.splitlines()) == (property_id == "p0")
    assert ("0.97</span>" in html.read_text()) == (property_id == "p0")


def test_the_rows_of_every_question_set_are_shown(two_sets, monkeypatch) -> None:
    """A further set's answer stands below its name, or why there is none; a program finds both."""
    monkeypatch.setenv("VLM_ASSETS_QUESTIONS", str(two_sets.settings.questions))
    describe(two_sets)
    html = two_sets.settings.home / "shown.html"
    said = run_command(html.parent, "show", "p1", "--html", str(html))
    first, further = said.output.split("Question set condition:\n")
    assert "  floors: 2\n" in first and "wear" not in first
    assert "  wear: worn 1 (confidence 0.50)\n" in further and "By model-t" in further
    assert f"File: {two_sets.settings.home / 'property_condition'}" in further
    assert "worn 1" in html.read_text()
    told = run_command(html.parent, "show", "p8", "--json").stdout
    of_set = json.loads(told)["sets"]["condition"]
    assert (of_set["published"], of_set["file"]) == ([], None) and of_set["not_published"]


def test_of_a_filled_field_the_better_answer_is_shown_and_who_was_not_asked_is_told(
    asked_again, monkeypatch
) -> None:
    """Both answers are listed; the page has the one that every reader shows."""
    monkeypatch.setenv("VLM_ASSETS_QUESTIONS", str(asked_again.settings.questions))
    describe(asked_again)
    html = asked_again.settings.home / "shown.html"
    shown = {}
    for name in ("p0", "p1", "p2"):
        arguments = ["show", name, "--html", str(html)]
        said = run_command(html.parent, *arguments).output
        told = run_command(html.parent, *arguments, "--json").stdout
        filled = json.loads(told)["sets"]["again"]["filled"]
        shown[name] = said, filled, ">3<" in html.read_text(), ">2<" in html.read_text()
    assert [of_property[1:] for of_property in shown.values()] == [
        (["floors"], True, False),
        ([], False, True),
        ([], False, True),
    ]
    first, further = shown["p0"][0].split("Question set again:\n")
    assert "  floors: 2\n" in first and "  floors: 3 (confidence 0.94)\n" in further
    assert "Shown in place of the answers of the sets above it: floors\n" in further
    assert "in place of" not in shown["p1"][0]
    assert "Not asked: its where leaves it out" in shown["p2"][0].split("Question set again:\n")[1]
