"""The condition of a question set: refused at start in one sentence, or true of the right properties."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import BaseModel, Field

from vlm_assets.config.questions_file import QuestionsFile
from vlm_assets.config.where import Where, WhereError, where_of


class Listing(BaseModel):
    """The descriptions."""

    roof: str = Field(description="Its roof")
    floors: int = Field(description="How many floors")
    Roof: str = Field(description="Its roof, by another author")
    property_id: str = Field(description="The number on its door")


class Roof(BaseModel):
    """A second opinion."""

    roof: str = Field(description="Its roof")


class Pool(BaseModel):
    """Another set."""

    has_pool: bool = Field(description="Whether there is a pool")


def where(condition: str) -> Where:
    """The condition of the set `last`, below the descriptions and `second`, and above `below`."""
    sets = {
        "second": {"schema": f"{__name__}:Roof", "fills": ["roof"]},
        "last": {"schema": f"{__name__}:Pool", "where": condition},
        "below": {"schema": f"{__name__}:Pool"},
    }
    file = QuestionsFile.parse(Path("questions.yaml"), json.dumps(sets).encode())
    found = where_of(file, "last", f"{__name__}:Listing")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("rooof = 'flat'", "no set above it has the field rooof; did you mean roof?"),
        ("confidence.nothing < 1", "no set above it has the field nothing"),
        ("confidence < 1", "no set above it has the field confidence"),
        ("has_pool", "has_pool is of the set last, which does not stand above it"),
        ("floors", "'floors' is a BIGINT, and no condition"),
        ("1 = 1", "names no field of a set above"),
        ("random() < 0.5 AND floors > 1", r"random\(\) does not say the same each time"),
        ("age(TIMESTAMP '2020-01-01') > INTERVAL 1 YEAR AND floors > 1", r"age\(\) does not say the same"),
        ("floors > (SELECT 1)", "has a query"),
        ("row_number() OVER () = floors", "has a window"),
        ("sum(floors) > 3", "cannot contain aggregates"),
        ("floors > 1), (floors > 2", "is no condition: give what stands after WHERE"),
        ("floors > 1) FROM properties UNION SELECT (floors > 2", "is no condition: give what stands after"),
        ("floors >", "is no SQL condition"),
        ("floors > 'many'", "Could not convert"),
        ("floors > 1 AND COLUMNS(*) IS NOT NULL", "has several columns"),
        ("floors > 1 AND #1 = 'a'", "has the place of a column"),
        (f"floors{'+1' * 950} > 2", "nested too deeply"),
        ("roof = 'flat' AND \"Roof\" = 'hip'", "Duplicate"),
    ],
)
def test_what_is_no_condition_on_one_property_is_refused(condition, why):
    """Found after days, or evaluated otherwise the next time, it would have asked the wrong properties."""
    with pytest.raises(WhereError, match=why):
        where(condition)


def rows(of: Where, asset: str, *answers: dict) -> pa.Table:
    (columns,) = (each.columns for each in of.answers if each.asset == asset)
    return pa.Table.from_pylist(list(answers), schema=columns)


def test_the_better_answer_decides_and_what_is_not_known_does_not_hold():
    """A set that fills a field gives its answer and its confidence, where it has one."""
    of = where("confidence.roof < 0.8 AND roof = 'flat'")
    assert of.names == ("confidence.roof", "roof")
    assert [(each.asset, each.fields) for each in of.answers] == [
        ("property_descriptions", ("roof",)),
        ("property_second", ("roof",)),
    ]

    def answer(property_id, roof, sure):
        return {"property_id": property_id, "description": {"roof": roof}, "confidence": {"roof": sure}}

    described = [answer(name, "flat", sure) for name, sure in (("a", 0.5), ("b", 0.5), ("c", 0.9))]
    nothing = {"property_id": "d", "description": None, "confidence": None}
    second = [answer("b", "hip", 0.25), {**nothing, "property_id": "a"}]
    looks = of.evaluate(
        ["a", "b", "c", "d", "e"],
        {
            "property_descriptions": rows(of, "property_descriptions", *described, nothing),
            "property_second": rows(of, "property_second", *second),
        },
    )
    assert {name: look.holds for name, look in looks.items()} == {
        "a": True,
        "b": False,
        "c": False,
        "d": False,
        "e": False,
    }
    assert looks["b"].values == (0.25, "hip")
    assert looks["e"].values == (None, None)


def test_a_field_that_has_the_name_of_a_column_is_what_a_condition_names():
    """Else the ids of the catalogue would be compared with what the model read."""
    of = where("property_id = '7'")
    numbered = rows(
        of,
        "property_descriptions",
        {"property_id": "a", "description": {"property_id": "7"}, "confidence": None},
    )
    looks = of.evaluate(["a", "7"], {"property_descriptions": numbered})
    assert (looks["a"].holds, looks["7"].holds) == (True, False)


def test_a_set_without_a_condition_is_asked_of_all():
    """No condition is none that never holds."""
    file = QuestionsFile.parse(Path("q.yaml"), json.dumps({"last": {"schema": f"{__name__}:Pool"}}).encode())
    assert where_of(file, "last", f"{__name__}:Listing") is None
