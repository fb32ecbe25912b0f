"""The page of a partition: counts that are right, and a sheet that shows any id and any schema as it is."""

import base64
import io
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlm_assets.assets.partition_page import (
    IMAGES_A_PROPERTY,
    SAMPLED,
    THUMBNAIL_HEIGHT,
    SheetRow,
    contact_sheet,
    read_quality,
)
from vlm_durable.versions.partition_rows import PartitionRows


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


def test_answers_have_their_confidence_as_number_and_colour():
    """A legend says what the colours are; a sheet of rows without confidences has none."""
    description = {"summary": "A house.", "floors": 2, "rooms": 3, "size": {"width": 1}, "tags": ["a"]}
    confidence = {"summary": 0.4, "floors": 0.971, "rooms": None, "size": {"width": 0.5}, "tags": 0.85}
    sheet = contact_sheet([SheetRow("P-1", (), description, None, 0, confidence)])

    def colour(square):
        red, _, blue = Image.open(io.BytesIO(base64.b64decode(square[1]))).getpixel((5, 5))
        return "BLUE" if blue > red else "RED" if red < 220 else "ORANGE"

    shown = re.sub(r"!\[\]\(data:image/png;base64,([^)]{50,150})\)", colour, sheet).split("\n\n")
    assert shown[0].endswith("(raw confidence): BLUE 0.95 and more, ORANGE 0.80 to 0.94, RED below 0.80*")
    assert shown[3:] == [
        "A house. RED 0.40",
        "floors: 2 BLUE 0.97 · rooms: 3",
        "- size: width 1\n- tags: a ORANGE 0.85",
    ]
    for unknown in (None, {"rooms": None}, {"size": {"width": 0.5}}):
        assert contact_sheet([SheetRow("P-1", (), description, None, 0, unknown)]).startswith("**P")


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


FAILED_IMAGE = pa.struct([("uri", pa.string()), ("kind", pa.string()), ("error", pa.string())])
SCHEMA = pa.schema(
    [
        ("property_id", pa.string()),
        ("ordinal", pa.int64()),
        ("status", pa.string()),
        ("error_kind", pa.string()),
        ("error", pa.string()),
        ("description", pa.struct([("floors", pa.int64())])),
        ("attempts", pa.int32()),
        ("images_seen", pa.int32()),
        ("images_failed", pa.list_(FAILED_IMAGE)),
    ]
)


def row(ordinal, **fields):
    return {
        "property_id": f"p{ordinal}",
        "ordinal": ordinal,
        "status": "ok",
        "description": {"floors": ordinal},
        "attempts": 1,
        "images_seen": 9,
        "images_failed": [],
        **fields,
    }


def failed(ordinal, kind="no_image", **fields):
    why = {"status": "failed", "error_kind": kind, "error": "why", "description": None}
    return row(ordinal, **why, images_seen=0, **fields)


@pytest.fixture
def quality(tmp_path):
    """Reads the quality of rows that are written to a file."""

    def read(rows, *later):
        path = tmp_path / "rows.parquet"
        schema = pa.schema([*SCHEMA, *later])
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=50)
        return read_quality(PartitionRows(path))

    return read


def test_everything_is_counted(quality):
    """Failed rows by kind and by id, images left out, and answers that had to be asked for again."""
    bad = [{"uri": "1.jpg", "kind": "damaged", "error": "cut"}]
    rows = [row(n, attempts=1 + (n < 3)) for n in range(100)]
    rows[7] = row(7, images_seen=7, images_failed=bad * 2)
    rows[60:80] = [failed(n, "timeout" if n < 65 else "no_image") for n in range(60, 80)]
    found = quality(rows)
    assert (found.rows, found.ok, dict(found.failed_by_kind)) == (100, 80, {"timeout": 5, "no_image": 15})
    table = found.table()
    assert "| described | 80 of 100 properties (80.0%) |" in table
    assert "| failed | 20 (no\\_image 15, timeout 5) |" in table
    assert "| which | p60, p61, p62, p63, p64, p65, p66, p67, p68, p69, 10 more |" in table
    assert "| images left out | 2 of 720, in 1 property |" in table
    assert "| asked more than once | 3 properties |" in table


def test_the_sample_is_random_and_always_the_same(quality):
    """The first rows of a partition are neighbours and alike; the sample is spread, and can be compared."""
    found = quality([row(n) for n in range(1000)])
    assert "confidence" not in found.sample[0], "a file of an earlier version has none"
    sure = pa.field("confidence", pa.struct([("floors", pa.float64())]))
    surer = quality([row(n, confidence={"floors": n / 1000}) for n in range(1000)], sure)
    assert [one["confidence"]["floors"] for one in surer.sample] == [
        one["ordinal"] / 1000 for one in found.sample
    ]
    sampled = sorted(one["ordinal"] for one in found.sample)
    assert len(sampled) == SAMPLED
    assert sampled[-1] > 100
    assert (
        sorted(one["ordinal"] for one in quality([row(n) for n in reversed(range(1000))]).sample) == sampled
    )
    assert {one["description"]["floors"] for one in found.sample} == set(sampled)


def test_failed_rows_are_looked_at_beside_the_sample(quality):
    """A person sees what failed without searching for it; a partition where all failed has no sample."""
    found = quality([row(0), failed(1), failed(2)])
    assert [one["property_id"] for one in found.failed] == ["p1", "p2"]
    assert [one["property_id"] for one in found.sample] == ["p0"]
    everything = quality([failed(n) for n in range(30)])
    assert everything.sample == []
    assert len(everything.failed) == 10
