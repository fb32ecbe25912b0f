"""A field that a further set fills: all readers show the better answer, its confidence, and whose it is."""

from __future__ import annotations

import csv
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel, Field

from tests.support.exports import exported_rows, list_changes
from tests.support.homes import Again, Dataset
from tests.support.sure_answers import sure_dataset
from vlm_assets.assets.fingerprint import settings_digest
from vlm_assets.assets.looked_at import LookedAt
from vlm_assets.assets.truth import verdicts
from vlm_assets.commands.property_view import read_property
from vlm_assets.config.filled_fields import FieldSources
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.questions_file import QuestionsFile
from vlm_assets.config.settings import load_settings
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine.schema import confidence_type, load_schema
from vlm_results.changes import RowSnapshot, Since
from vlm_results.dataset_quality import quality_metadata
from vlm_results.described_table import TableChanges, TablePlace, bring_up_to_date
from vlm_results.export import Format, export
from vlm_results.guarantee import RAW, Guarantee
from vlm_results.joined_rows import FurtherRows, joined
from vlm_results.labels import read_judged
from vlm_results.published_table import matching_rows, read_rows, readable_records
from vlm_results.quality import assess_quality, summarize
from vlm_results.review import (
    Accuracy,
    accuracy,
    append_verdict,
    draw_sample,
    draw_unsure,
    published_answers,
    verdict_of,
)
from vlm_results.word_index import find_words


class Pool(BaseModel):
    """The schema of a set that is asked by what the others say."""

    is_heated: bool = Field(description="Whether its pool is heated")


def test_fields_of_every_type_are_filled_and_where_no_set_answers_there_is_no_answer():
    """Lists and objects too. Without its own confidence, a better answer does not get that of the worse."""
    fields = [("tags", pa.list_(pa.string())), ("rooms", pa.struct([("heated", pa.bool_())]))]
    better = [{"tags": ["b"], "rooms": None}, {"tags": None, "rooms": {"heated": False}}, None]
    worse = [{"tags": ["a"], "rooms": {"heated": True}}, {"tags": ["a"], "rooms": None}, None]
    sure = {"tags": 0.5, "rooms": {"heated": 0.75}}
    first = pa.table(
        {
            "description": pa.array(worse, pa.struct(fields)),
            "confidence": pa.array([sure, sure, None], confidence_type(pa.struct(fields))),
        }
    )
    again = pa.table({"description": pa.array(better, pa.struct(fields))})
    shown = joined(first, [FurtherRows("again", None, again, ("tags", "rooms"))])
    described = [
        {"tags": ["b"], "rooms": {"heated": True}},
        {"tags": ["a"], "rooms": {"heated": False}},
        None,
    ]
    assert shown["description"].to_pylist() == described
    assert shown["confidence"].to_pylist() == [sure | {"tags": None}, sure | {"rooms": None}, None]


def test_an_answer_of_another_type_is_not_shown_in_place_of_the_first():
    """Files of earlier schemas may have a field of another type."""
    first, again = (pa.table({"description": [{"floors": floors}]}) for floors in (2, "three"))
    shown = joined(first, [FurtherRows("again", None, again, ("floors",))])
    assert shown.to_pylist() == [{"description": {"floors": 2}}]


def three_floors(folder: Path) -> Path:
    """A truth file: each of the nine properties has three floors."""
    line = '{{"property_id": "p{}", "description": {{"floors": 3}}}}\n'
    (folder / "truth.jsonl").write_text("".join(map(line.format, range(9))))
    return folder / "truth.jsonl"


def shown_floors(dataset: Dataset, folder: Path) -> dict[str, tuple[Any, Any, Any]]:
    """What an export shows of the floors of each property, how sure, and which fields ``again`` filled."""
    export(dataset.settings, dataset.catalog, folder, Format.jsonl)
    return {
        name: (
            row["description"] and row["description"]["floors"],
            row["confidence"] and row["confidence"]["floors"],
            (row["sets"]["again"] or {}).get("filled"),
        )
        for name, row in exported_rows(folder).items()
    }


def chosen(dataset: Dataset, where: str) -> list[int]:
    return matching_rows(dataset.settings, dataset.catalog, where).nonzero()[0].tolist()


def test_every_reader_shows_the_better_answer_where_there_is_one(asked_again, tmp_path):
    """p0 and p4 have it; p1 got no answer, p2, p3 and p5 were not asked, and of the others is no row yet."""
    better = {"p0": (3, 0.9375, ["floors"]), "p4": (5, 0.9375, ["floors"])}
    left = {"p1": (2, None, []), "p2": (2, None, []), "p3": (2, None, []), "p5": (2, None, [])}
    nothing = dict.fromkeys(("p6", "p7", "p8"), (2, None, None))
    assert shown_floors(asked_again, tmp_path / "out") == better | left | nothing
    export(asked_again.settings, asked_again.catalog, tmp_path / "cells", Format.csv)
    cells = list(csv.DictReader((tmp_path / "cells" / f"{asked_again.keys[0]}.csv").open()))
    assert [(row["description.floors"], row["sets.again.status"]) for row in cells] == [
        ("3", "ok"),
        ("2", "ok"),
        ("2", "not_asked"),
    ]
    assert [row["sets.again.filled"] for row in cells] == ['["floors"]', "[]", "[]"]
    assert chosen(asked_again, "floors > 2") == chosen(asked_again, "confidence.floors > 0.9") == [0, 4]
    assert chosen(asked_again, "list_contains(sets.again.filled, 'floors')") == [0, 4]
    assert chosen(asked_again, "sets.again.status = 'not_asked'") == [2, 3, 5]
    assert chosen(asked_again, "sets.again.status = 'failed'") == []
    records, _ = readable_records(asked_again.settings.descriptions, asked_again.catalog)
    ranked = find_words(asked_again.settings, records, "brick 5", most=20).ranked
    assert 4 in [ordinal for _, ordinal in ranked]


def told(dataset: Dataset, since: Since, following: Path) -> set[str]:
    """The properties that changed since then; writes the next snapshot."""
    return {change.property_id for change in list_changes(dataset, since, following)}


def test_properties_that_are_not_asked_are_no_change_and_no_failure(asked_again, tmp_path):
    """Followers hear of the answers alone; whoever counts, counts the others apart."""
    settings, catalog = asked_again.settings, asked_again.catalog
    place = TablePlace.from_settings(settings)
    before = bring_up_to_date(settings, catalog, place)
    told(asked_again, Since(), tmp_path / "1")
    asked_again.ask_again(asked_again.keys[2], {7: 4})
    assert told(asked_again, RowSnapshot(tmp_path / "1", catalog), tmp_path / "2") == {"p7"}
    after = bring_up_to_date(settings, catalog, place)
    assert (before.lacking["again"], after.lacking["again"]) == (3, 0)
    changed = TableChanges(place.read(), str(before.snapshot)).changes()
    assert {change.property_id for change in changed} == {"p7"}
    quality = assess_quality(settings, catalog)
    assert (quality.ok, quality.failed, quality.lacking["again"]) == (8, {"missing": 1}, 0)
    assert quality.not_asked == {"condition": 0, "again": 5}
    again = question_sets(settings)[2]
    schema = load_schema(again.settings.description_schema)
    key = asked_again.keys[2]
    record = PublishedPartitions(again.asset).record(key)
    assert record is not None
    summary = summarize(again.asset.partition(key).published, schema, record, conditions={}, truth={})
    assert (summary.ok, summary.failed, summary.not_asked, summary.rows) == (1, {}, 2, 3)
    page = quality_metadata(quality, Accuracy({}, 0))
    assert "again was not asked of 5 properties" in page["question sets"].value


def test_what_is_made_of_rows_follows_a_change_of_what_is_filled(asked_again, tmp_path):
    """The rows stay, and what is shown of them does not: exports, words and followers are made anew."""
    settings, catalog = asked_again.settings, asked_again.catalog
    filling = QuestionsFile(
        settings.questions.path,
        tuple((name, asked.model_copy(update={"fills": ()})) for name, asked in settings.questions.sets),
    )
    other = Dataset(settings.model_copy(update={"questions": filling}))
    assert shown_floors(other, tmp_path / "out")["p0"] == (2, None, None)
    told(other, Since(), tmp_path / "1")
    assert shown_floors(asked_again, tmp_path / "out")["p0"] == (3, 0.9375, ["floors"])
    assert told(asked_again, RowSnapshot(tmp_path / "1", catalog), tmp_path / "2") == {"p0", "p4"}


def test_a_withheld_answer_does_not_let_the_worse_one_through(asked_again):
    """The better answer is below its threshold: nothing is shown, though the worse one is above its own."""
    settings, key = asked_again.settings, asked_again.keys[0]
    further = question_sets(settings)[2]
    made_with = [
        settings_digest(PublishedPartitions(asset).record(key).metadata["parts"])
        for asset in (settings.descriptions, further.asset)
    ]
    for of_first, of_further, expected in ((None, 0.9, 3), (0.0, 0.99, None), (0.0, 0.9, 3)):
        thresholds = {(made_with[0], "floors"): of_first, (made_with[1], "floors"): of_further}
        rows = read_rows(settings, Guarantee({"floors": 0.9}, thresholds), key, ["ordinal", "description"])
        first = rows.to_pylist()[0]
        assert (first["description"]["floors"], first[RAW]["floors"]) == (expected, 3)


def test_the_quality_is_that_of_the_answers_that_are_shown(asked_again, tmp_path):
    """Each property counts once in a filled field, by the answer that is shown."""
    settings = asked_again.settings.model_copy(update={"truth": three_floors(tmp_path)})
    quality = assess_quality(settings, asked_again.catalog)
    floors = quality.fields["floors"]
    assert (floors.rows, floors.nulls, floors.counts) == (9, 0, {"2": 7, "3": 1, "5": 1})
    assert (floors.right, floors.judged) == (1, 9)
    assert floors.question_sets == ["", "again"]
    (counts,) = [cells["floors"].sum() for cells in quality.confidences.values() if "floors" in cells]
    assert counts == 2, "only the answers that are shown have a part in what is promised"
    asking = {
        quality.asked_by[made_with]: quality.asks_for(made_with, "floors") for made_with in quality.asked_by
    }
    assert asking == {"": True, "condition": False, "again": True}


def test_a_verdict_stays_with_the_set_whose_answer_was_shown(asked_again):
    """It certifies and teaches of no other set, and is void when another set's answer is shown instead."""
    settings, catalog = asked_again.settings, asked_again.catalog

    def labels() -> dict[str, bool]:
        judged = read_judged(settings, catalog)
        return {
            f"{label.answer}": label.right.get("floors") for of_set in judged.values() for label in of_set
        }

    def floors() -> int:
        right = accuracy(settings.home, published_answers(settings, catalog)).fields.get("floors")
        return right.total if right is not None else 0

    drawn = draw_sample(settings, catalog, count=9, seed=1, suspicious=False)
    sample = {reviewed.property_id: reviewed for reviewed in drawn}
    assert {name: sample[name].description["floors"] for name in ("p0", "p1", "p2")} == {
        "p0": 3, "p1": 2, "p2": 2,
    }  # fmt: skip
    for name in ("p0", "p1"):
        append_verdict(
            settings.home,
            verdict_of(sample[name], right=list(sample[name].description), wrong=(), corrections={}),
        )
    assert floors() == 2
    assert verdicts(settings.home)["p0"].filled.keys() == {"floors"}
    assert not verdicts(settings.home)["p1"].filled
    # The rows of the descriptions have no confidence here, so that only those of the other sets are labels.
    assert sorted(labels().values(), key=str) == [None, None, None, True]
    asked_again.ask_again(asked_again.keys[0], {1: 4}, settings="anew")
    assert floors() == 0, "the first is shown no more, and of the second another answer is shown"
    assert set(labels().values()) <= {None}
    asked_again.ask_again(asked_again.keys[0], {1: None}, settings="nothing again")
    assert floors() == 1, "of the second the answer is shown that was judged"


class OnceMore(BaseModel):
    """The schema of a third opinion."""

    floors: int | None = Field(description="How many floors")


@pytest.mark.parametrize("seed", range(4))
def test_all_readers_decide_alike_whose_answer_is_shown(asked_again, tmp_path, seed):
    """The last set in the file that has an answer gives it: in one row, over columns, and in SQL."""
    chance = random.Random(seed)
    file = asked_again.settings.questions.path
    schemas = {name: f"{__name__}:{name}" for name in ("OnceMore", "Pool")}
    file.write_text(
        f"{file.read_text()}once_more:\n  schema: {schemas['OnceMore']}\n  fills: [floors]\n"
        f"last:\n  schema: {schemas['Pool']}\n  where: floors > 3\n"
    )
    home, truth = asked_again.settings.home, three_floors(tmp_path)
    settings = load_settings(model="example", home=home, questions=file, truth=truth)
    dataset = Dataset(settings)
    answers: dict[str, dict[str, Any]] = {f"p{number}": {} for number in range(9)}
    for key in dataset.keys:
        ordinals = [row["ordinal"] for row in dataset.rows(key)]
        for name, given in (("again", [None, 3, 4]), ("once_more", [None, 5, 6])):
            floors = {at: chance.choice(given) for at in ordinals if chance.random() < 0.8}
            dataset.ask_again(key, floors, name=name)
            for at, value in floors.items():
                answers[f"p{at}"][name] = {"floors": value}
        for row in PublishedPartitions(settings.descriptions).read(key).to_table().to_pylist():
            answers[row["property_id"]]["descriptions"] = row["description"]
    of_field = FieldSources("floors", "descriptions", ("again", "once_more"))
    fillers = {name: of_field.filler(of_property) for name, of_property in answers.items()}
    assert fillers == {
        name: next(
            (of_set for of_set in ("once_more", "again") if of_property.get(of_set, {}).get("floors")), ""
        )
        for name, of_property in answers.items()
    }
    assert {"again", "once_more"} <= set(fillers.values()), "nothing was filled"
    shown = {name: (answers[name][fillers[name] or "descriptions"] or {}).get("floors") for name in answers}
    filled = {
        of_set: {name for name, filler in fillers.items() if filler == of_set} for of_set in of_field.fillers
    }
    catalog = dataset.catalog

    assert {name: floors for name, (floors, *_) in shown_floors(dataset, tmp_path / "out").items()} == shown
    for value in {*shown.values()} - {None}:
        expected = [int(name[1:]) for name in shown if shown[name] == value]
        assert chosen(dataset, f"floors = {value}") == expected
    for of_set, names in filled.items():
        condition = f"list_contains(sets.{of_set}.filled, 'floors')"
        assert {f"p{at}" for at in chosen(dataset, condition)} == names
    where = question_sets(settings)[-1].settings.where
    looks = {}
    for key in dataset.keys:
        ids = [row["property_id"] for row in dataset.rows(key)]
        looks |= LookedAt.read(where, settings.layout, key, ids).looks
    assert {name: look.values[0] for name, look in looks.items()} == shown
    floors = assess_quality(settings, catalog).fields["floors"]
    assert floors.counts == Counter(str(value) for value in shown.values() if value is not None)
    for name in shown:
        of_sets = read_property(settings, catalog, name)["sets"]
        assert {of_set for of_set in filled if of_sets[of_set]["filled"]} == {fillers[name]} - {""}
    # The rows of the descriptions have no confidence here, so that only those of the other sets are labels.
    labels = [
        sum("floors" in label.right for label in of_set) for of_set in read_judged(settings, catalog).values()
    ]
    assert sum(labels) == sum(map(len, filled.values()))
    drawn = draw_sample(settings, catalog, count=9, seed=1, suspicious=False)
    assert {row.property_id: row.description.get("floors") for row in drawn} == {
        name: floors for name, floors in shown.items() if answers[name]["descriptions"]
    }


def test_unsure_draws_where_two_sets_disagree(tmp_path):
    """Such properties teach most; each has the weight that keeps the accuracy that of all answers."""
    file = tmp_path / "questions.yaml"
    file.write_text(f"again:\n  schema: {Again.__module__}:{Again.__name__}\n  fills: [floors]\n")
    dataset = sure_dataset(tmp_path, questions=file)
    settings, catalog = dataset.settings, dataset.catalog
    first = {
        row["ordinal"]: row["description"]["floors"]
        for key in dataset.keys
        for row in pq.read_table(dataset.settings.descriptions.partition(key).published).to_pylist()
    }
    again = dict.fromkeys(range(0, 2000, 4), 2)
    for key, start in zip(dataset.keys, range(0, 2000, 500), strict=True):
        dataset.ask_again(key, {at: again[at] for at in range(start, start + 500) if at in again}, sure=0.999)
    differing = {ordinal for ordinal, floors in again.items() if first[ordinal] != floors}
    assert 10 < len(differing) < 60
    drawn = draw_unsure(settings, catalog, count=400, seed=1)
    disagreeing = {one.ordinal for one in drawn if one.why == "Two question sets disagree on floors."}
    assert disagreeing <= differing
    unsure = {one.ordinal for one in drawn if one.why.startswith("floors has the confidence")}
    assert unsure.isdisjoint(again), "how sure the worse answer is says nothing of the one that is shown"
    share = {
        part: sum(one.ordinal in ordinals for one in drawn) / len(ordinals)
        for part, ordinals in (("differing", differing), ("all", first.keys()))
    }
    assert share["differing"] > 2 * share["all"]
    assert all(one.description["floors"] == {**first, **again}[one.ordinal] for one in drawn)
    truth_file = dataset.write_truth(tmp_path / "truth.jsonl", [f"p{number}" for number in range(200)])
    labels = read_judged(settings.model_copy(update={"truth": truth_file}), catalog)
    with_floors = [sum("floors" in label.right for label in of_set) for of_set in labels.values()]
    assert with_floors == [150, 50], "a label is of the answer that is shown"
    for one in drawn:
        right = [name for name in ("floors",) if one.description[name] == 2]
        wrong = [name for name in ("floors",) if name not in right]
        append_verdict(settings.home, verdict_of(one, right=right, wrong=wrong, corrections={}))
    judged = accuracy(settings.home, published_answers(settings, catalog)).fields["floors"]
    truth = sum(floors == 2 for floors in {**first, **again}.values()) / len(first)
    assert judged.low <= truth <= judged.high
    assert abs(judged.share - truth) < 0.03
