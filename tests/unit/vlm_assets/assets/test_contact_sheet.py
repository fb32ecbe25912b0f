"""The contact sheet: any id and any schema reads as it is, and no image of a person's is decoded for it."""

import base64
import io
import re

import pytest
from PIL import Image

from vlm_assets.assets.contact_sheet import IMAGES_A_PROPERTY, THUMBNAIL_HEIGHT, SheetRow, contact_sheet


def jpeg(colour="red", width=100):
    stream = io.BytesIO()
    Image.new("RGB", (width, THUMBNAIL_HEIGHT), colour).save(stream, "JPEG")
    return stream.getvalue()


def sheet(description=None, *, property_id="P-1", thumbnails=(), error=None):
    return contact_sheet([SheetRow(property_id, thumbnails, description, error)])


def text_of(markdown):
    """The answer's part of a sheet of one property."""
    return markdown.split("\n\n", 2)[2]


def strip_of(markdown):
    return Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^)]+)", markdown)[1])))


def test_a_nested_schema_is_told_in_words():
    """Lists and models inside a description are no Python literals on the page."""
    said = text_of(
        sheet(
            {
                "summary": "A house with a garden.",
                "floors": 2,
                "has_garden": True,
                "style": None,
                "features": ["balcony", "sea_view"],
                "rooms": [{"kind": "bed_room", "windows": 2}, {"kind": "kitchen", "windows": None}],
                "kitchen": {"colour": "white", "size": {"width": 3, "depth": 2}},
                "tags": [],
            }
        )
    )
    assert said.split("\n\n") == [
        "A house with a garden.",
        "floors: 2 · has garden: yes · style: none",
        "- features: balcony, sea view\n"
        "- rooms: (kind bed room, windows 2), (kind kitchen, windows none)\n"
        "- kitchen: colour white, size (width 3, depth 2)\n"
        "- tags: none",
    ]


def test_a_long_list_and_a_long_text_are_cut():
    """An answer that runs away does not fill the event log."""
    said = text_of(sheet({"numbers": list(range(500)), "story": "word " * 5000}))
    assert "488 more" in said
    assert len(said) < 1000


@pytest.mark.parametrize(
    ("property_id", "shown"),
    [
        ("  7 B", "**“\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}7 B”**"),
        ("a  b", "**a\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}b**"),
        ("*x*_y_<b>", r"**\*x\*\_y\_\<b\>**"),
        ("a\u202eb\x1b]0;t", r"**a\\u202eb\\u001b\]0;t**"),
    ],
)
def test_an_id_is_shown_as_it_is(property_id, shown):
    """The sheet shows spaces at the ends of an id, prints markup as text and names invisible characters."""
    assert sheet({}, property_id=property_id).split("\n\n")[0] == shown


def test_a_long_word_can_be_broken():
    """A word without a space, however long, does not push the page aside."""
    title = sheet({}, property_id="x" * 500).split("\n\n")[0]
    assert max(map(len, title.strip("*").split("\N{ZERO WIDTH SPACE}"))) <= 48


def test_a_failed_image_has_a_placeholder_and_many_are_cut():
    """Of what did not decode a card is shown in its place; a property with forty images is not a wall."""
    strip = strip_of(sheet({}, thumbnails=(jpeg("red"), None, jpeg("blue"))))
    assert strip.size == (100 + 4 + THUMBNAIL_HEIGHT + 4 + 100, THUMBNAIL_HEIGHT)
    red, card, blue = (strip.getpixel((x, 10)) for x in (50, 120, 250))
    assert red[0] > 200 > 60 > red[2] and blue[2] > 200 and abs(card[0] - 214) < 8
    many = strip_of(sheet({}, thumbnails=[jpeg()] * 40))
    assert many.width == IMAGES_A_PROPERTY * 104 - 4
    assert strip_of(sheet({})).width == THUMBNAIL_HEIGHT


def test_a_failed_property_says_why():
    """Its reason stands where the description would."""
    assert text_of(sheet(error="the model said *nothing*")) == r"*failed*: the model said \*nothing\*"


def test_only_a_thumbnail_is_opened():
    """Bytes of any other format are refused: nothing but the pool's own JPEG is decoded here."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    with pytest.raises(OSError, match="cannot identify"):
        sheet({}, thumbnails=(stream.getvalue(),))
