"""Pages that are sent to somebody: which image is which, how many there are; nothing is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from PIL import Image

from tests.support.command_line import run_command
from tests.support.listings import write_listing
from tests.support.trials import described
from vlm_assets.commands.comparison_view import cards
from vlm_assets.commands.html_page import Card, ModelValue, page, thumbnails
from vlm_assets.services.trial import Trial
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_engine.images.images import ImageFailure


def home_of(folder: Path, uris: list[str]) -> Path:
    ingest(write_listing(folder / "listing.jsonl", {"p <b>": uris}), folder / "home", range_size=1)
    return folder / "home"


def test_an_image_that_cannot_be_shown_is_named_in_its_place(tmp_path):
    """A link out of the image root is never opened, and moves no other image to its place."""
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "root"
    root.mkdir()
    for name, colour in (("1.jpg", "red"), ("3.jpg", "blue")):
        Image.new("RGB", (64, 48), colour).save(root / name)
    catalog = Catalog.open(home_of(root, ["1.jpg", "2.jpg", "3.jpg"]))
    (root / "2.jpg").symlink_to(tmp_path / "elsewhere" / "secret.jpg")
    [[first, second, third]] = thumbnails(catalog, [["1.jpg", "2.jpg", "3.jpg"]], height=40)
    assert first and third and second is None
    uris = ["1.jpg", "<i>2.jpg", "3.jpg"]
    text = page("p", [Card("p", "", [first, second, third], {}, uris=uris, image_count=9)])
    assert "&lt;i&gt;2.jpg cannot be shown" in text and "3 of 9 images" in text
    assert "default-src &#x27;none&#x27;" in text and "<script" not in text and "http:" not in text


def test_an_answer_has_its_confidence_as_a_number_beside_its_colour():
    """Never a colour alone, and a legend says what it means. What is not known has neither."""
    sure = {
        "roof": ModelValue("<b>slate", 0.949),
        "floors": ModelValue(2, 0.994),
        "pool": ModelValue(False, 0.1),
    }
    unsure = {"rooms": ModelValue(3), "size": ModelValue({"width": 1}, {"width": 0.5})}
    text = page(
        "p", [Card("p", "", [], sure | unsure), Card("q", "", [], {"a": [ModelValue(4, 0.8)]}, ["m"])]
    )
    chip = '<span class="sure" style="border-color: {}">{}</span>'
    for number, colour in (
        ("0.95", "#0072b2"),
        ("0.99", "#0072b2"),
        ("0.10", "#d55e00"),
        ("0.80", "#e69f00"),
    ):
        assert chip.format(colour, number) in text
    assert chip.format("#e69f00", "0.80 to 0.94") in text, "the legend"
    assert text.count('class="sure"') == 4 + 3
    assert "&lt;b&gt;slate<span" in text
    assert 'class="sure"' not in page("p", [Card("p", "", [], unsure)])


def test_show_writes_its_page(tmp_path):
    """The pictures of a property can be sent to somebody, as one file with nothing to run in it."""
    Image.new("RGB", (64, 48), "red").save(tmp_path / "1.jpg")
    home, file = home_of(tmp_path, ["1.jpg", "2.jpg"]), tmp_path / "p.html"
    said = run_command(home, "show", "p <b>", "--html", str(file)).output
    text = file.read_text()
    assert f"Page: {file}" in said
    assert text.count("data:image/jpeg;base64,") == 1 and "2.jpg cannot be shown" in text
    assert "p &lt;b&gt;" in text and "<b>" not in text


def test_a_page_of_a_trial_says_of_how_many_images_an_answer_is(tmp_path):
    """4 of 9 images is another answer than one from all of them."""
    home = home_of(tmp_path, [f"{number}.jpg" for number in range(9)])
    left_out = ImageFailure("1.jpg", "missing", "<u>it is gone")
    one = described(0, {"floors": 2}, property_id="p <b>", images_seen=4, images_failed=(left_out,))
    trial = Trial((one,), 1, "cpu-0", 1, 1.0, 1.0, 10, ((1, 4, 1.0),), images_listed={"p <b>": 9})
    text = page("tried", cards(trial, Catalog.open(home)))
    assert "raw confidence" not in text
    sure = replace(trial, described=(replace(one, confidence={"floors": 0.5}),))
    assert '<dd>2<span class="sure" style="border-color: #d55e00">0.50<' in page(
        "", cards(sure, Catalog.open(home))
    )
    assert "described from 4 of 9 images; 1.jpg left out (missing): &lt;u&gt;it is gone" in text
    failed = replace(one, status="failed", images_seen=0)
    assert trial.images_sentence(failed).startswith("saw 0 of 9 images; "), "nothing was described"
