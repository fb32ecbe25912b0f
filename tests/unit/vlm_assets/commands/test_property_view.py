"""``vlm-assets show``: what a person reads is what a program gets."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from tests.support.homes import BEGAN, publish
from vlm_assets.assets.property_descriptions import description_rows
from vlm_assets.commands.main import app


def test_a_property_that_is_not_published_yet(empty) -> None:
    """Its images and its partition are told before anything was described."""
    arguments = ["show", "p4", "--home", str(empty.settings.home)]
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert (told["ordinal"], told["partition"], told["published"]) == (4, "000000003-000000005", [])
    assert [(one["uri"], one["there"]) for one in told["images"]] == [("4.jpg", False)]
    assert told["not_published"]
    said = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert "p4: ordinal 4, partition 000000003-000000005" in said
    assert "4.jpg: not there now" in said


ROW: dict[str, Any] = {
    "status": "ok",
    "description": {"floors": 2},
    "tries": 1,
    "attempts": 1,
    "images_failed": [],
    "seconds": 1.0,
    "model": "a model",
    "model_revision": "1",
    "fingerprint": "f",
    "device": "cpu-0",
    "described_at": BEGAN,
}


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
    rows = [
        {
            **ROW,
            "images_seen": 1,
            "images_used": ["0.jpg"],
            "images_not_used": [],
            "confidence": {"floors": 0.97},
        },
        {
            **ROW,
            "images_seen": 4,
            "images_used": [f"{number}.jpg" for number in range(1, 5)],
            "images_not_used": [f"{number}.jpg" for number in range(5, 9)],
            "images_not_used_reason": "VLM_ASSETS_MAX_IMAGES is 4",
            "images_failed": [broken],
        },
        {
            **ROW,
            "status": "failed",
            "error_kind": "missing",
            "error": "no image",
            "description": None,
            "attempts": 0,
            "images_seen": 0,
            "images_failed": [{**broken, "uri": f"{number}.jpg"} for number in range(2)],
        },
    ]
    key = empty.keys[0]
    rows = [{**known, **row} for known, row in zip(empty.rows(key), rows, strict=True)]
    publish(empty.descriptions, key, rows, description_rows(pa.struct([("floors", pa.int64())])), "f", {})
    html = empty.settings.home / "shown.html"
    arguments = ["show", property_id, "--home", str(empty.settings.home), "--html", str(html)]
    said = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    for line in expected:
        assert line in said.splitlines()
        assert line in html.read_text()
    assert ("  floors: 2 (confidence 0.97)" in said.splitlines()) == (property_id == "p0")
    assert ("0.97</span>" in html.read_text()) == (property_id == "p0")


def test_the_rows_of_every_question_set_are_shown(two_sets, monkeypatch) -> None:
    """A further set's answer stands below its name, or why there is none; a program finds both."""
    monkeypatch.setenv("VLM_ASSETS_QUESTIONS", str(two_sets.settings.questions))
    rows = [{**ROW, **row, "images_seen": 1} for row in two_sets.rows(two_sets.keys[0])]
    schema = description_rows(pa.struct([("floors", pa.int64())]))
    publish(two_sets.descriptions, two_sets.keys[0], rows, schema, "f", {})
    arguments = ["--home", str(two_sets.settings.home)]
    html = two_sets.settings.home / "shown.html"
    said = CliRunner().invoke(app, ["show", "p1", *arguments, "--html", str(html)], catch_exceptions=False)
    first, further = said.output.split("Question set condition:\n")
    assert "  floors: 2\n" in first and "wear" not in first
    assert "  wear: worn 1 (confidence 0.50)\n" in further and "By model-t" in further
    assert f"File: {two_sets.settings.home / 'property_condition'}" in further
    assert "worn 1" in html.read_text()
    told = CliRunner().invoke(app, ["show", "p8", *arguments, "--json"], catch_exceptions=False).stdout
    of_set = json.loads(told)["sets"]["condition"]
    assert (of_set["published"], of_set["file"]) == ([], None) and of_set["not_published"]


def test_of_a_filled_field_the_better_answer_is_shown_and_who_was_not_asked_is_told(
    asked_again, monkeypatch
) -> None:
    """Both answers are listed; the page has the one that every reader shows."""
    monkeypatch.setenv("VLM_ASSETS_QUESTIONS", str(asked_again.settings.questions))
    rows = [{**ROW, **row, "images_seen": 1} for row in asked_again.rows(asked_again.keys[0])]
    schema = description_rows(pa.struct([("floors", pa.int64())]))
    publish(asked_again.descriptions, asked_again.keys[0], rows, schema, "f", {})
    html = asked_again.settings.home / "shown.html"
    shown = {}
    for name in ("p0", "p1", "p2"):
        arguments = ["show", name, "--home", str(asked_again.settings.home), "--html", str(html)]
        said = CliRunner().invoke(app, arguments, catch_exceptions=False).output
        told = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout
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
