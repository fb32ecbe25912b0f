"""One view of all question sets: each reader has the fields of every set, and says what is not there yet."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.exports import exported_rows, list_changes
from tests.support.homes import Dataset
from vlm_assets.assets.truth import FieldVerdict, verdicts
from vlm_assets.services.command_error import CommandError
from vlm_durable.versions.published import PublishedPartitions
from vlm_results import explore
from vlm_results.changes import PointInTime, RowSnapshot, Since
from vlm_results.dataset_quality import judged_state, quality_metadata
from vlm_results.described_table import TableChanges, TablePlace, bring_up_to_date
from vlm_results.explore import explore_table
from vlm_results.export import Format, export
from vlm_results.guarantee import RAW, Guarantee
from vlm_results.labels import read_judged
from vlm_results.published_table import matching_rows, read_rows, readable_records
from vlm_results.quality import assess_quality
from vlm_results.review import (
    Accuracy,
    Reviewed,
    accuracy,
    append_verdict,
    draw_sample,
    published_answers,
    take_verdicts,
    verdict_of,
)
from vlm_results.word_index import find_words

IN_THE_SET = {"status", "error_kind", "error", "model", "model_revision", "described_at", "answer"}


def exported(dataset: Dataset, folder: Path) -> dict[str, dict]:
    export(dataset.settings, dataset.catalog, folder, Format.jsonl)
    return exported_rows(folder)


def chosen(dataset: Dataset, where: str) -> list[int]:
    return matching_rows(dataset.settings, dataset.catalog, where).nonzero()[0].tolist()


def test_an_export_has_the_fields_of_all_sets_and_whose_they_are(two_sets, tmp_path):
    """A property without a row of a set has nulls; vectors, texts and verdicts' digests are as before it."""
    rows = exported(two_sets, tmp_path / "two")
    alone = exported(Dataset(two_sets.settings.model_copy(update={"questions": None})), tmp_path / "one")
    assert all("sets" not in row for row in alone.values())
    for name, row in rows.items():
        of_set = row.pop("sets")["condition"]
        assert row["description"].keys() == {"floors", "has_pool", "wear", "needs_paint"}
        if row["ordinal"] < 6:
            assert of_set.keys() == IN_THE_SET
            assert (of_set["model"], of_set["described_at"][:10]) == ("model-t", "2026-11-02")
            assert (row["description"]["wear"], row["confidence"]["wear"]) == (f"worn {row['ordinal']}", 0.5)
        else:
            assert of_set is None and row["description"]["wear"] is None
        first = alone[name]
        assert first.keys() == row.keys()
        others = first.keys() - {"description", "confidence"}
        assert {key: row[key] for key in others} == {key: first[key] for key in others}
    assert rows["p4"]["status"] == "failed" and rows["p4"]["description"]["floors"] is None
    assert rows["p4"]["description"]["wear"] == "worn 4"


def test_an_export_says_how_many_properties_a_set_lacks_and_follows_it(two_sets, tmp_path):
    """What is handed on says what is missing; once the set goes on, only its partition is written anew."""
    folder = tmp_path / "out"
    before = export(two_sets.settings, two_sets.catalog, folder, Format.huggingface)
    assert before.lacking == {"condition": 3}
    card = (folder / "README.md").read_text()
    assert "The question set condition is not complete: 3 properties have no row of it yet" in card
    assert json.loads((folder / "export.json").read_text())["lacking"] == {"condition": 3}
    two_sets.answer_further(two_sets.keys[2])
    after = export(two_sets.settings, two_sets.catalog, folder, Format.huggingface)
    assert (after.lacking, after.kept) == ({"condition": 0}, 2)
    assert "not complete" not in (folder / "README.md").read_text()


def test_a_spreadsheet_has_a_column_for_each_field_of_each_set(two_sets, tmp_path):
    """Also in the file of a partition that the set has not reached."""
    export(two_sets.settings, two_sets.catalog, tmp_path / "out", Format.csv)
    tables = [list(csv.DictReader((tmp_path / "out" / f"{key}.csv").open())) for key in two_sets.keys]
    assert len({tuple(table[0]) for table in tables}) == 1
    assert tables[0][1]["description.wear"] == "worn 1" and tables[2][0]["description.wear"] == ""
    assert tables[0][1]["sets.condition.model"] == "model-t"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("needs_paint", [0, 2, 4]),
        ("needs_paint AND floors = 2", [0, 2]),
        ("confidence.wear = 0.5", [0, 1, 2, 3, 4, 5]),
        ("confidence.wear IS NULL", [6, 7, 8]),
        ("confidence.floors IS NULL AND wear = 'worn 4'", [4]),
        ("description.wear = 'worn 1'", [1]),
        ("sets.condition IS NULL", [6, 7, 8]),
        ("sets.condition.model = 'model-t' AND status = 'failed'", [4]),
        ("floors = 2", [0, 1, 2, 3, 5, 6, 7, 8]),
        ("Status = 'failed'", [4]),
        ("COLUMNS('^stat') = 'failed'", [4]),
        ("#3 = 'failed'", [4]),
        ("ordinal = (SELECT max(ordinal) FROM properties WHERE error IS NULL)", [8]),
    ],
)
def test_a_condition_names_fields_and_confidences_of_every_set(two_sets, where, expected):
    """``--where`` is over the same view."""
    assert chosen(two_sets, where) == expected


def test_a_wrong_condition_is_told_the_columns_of_every_set(two_sets):
    """Also those that a right one of its kind would not have read."""
    with pytest.raises(CommandError, match=r"Columns: property_id.* status.* confidence.* wear.* sets"):
        chosen(two_sets, "no_such_field = 1")


def test_a_condition_may_name_a_set_that_nothing_is_published_of(two_sets):
    """It holds for no property, and is no error."""
    for key in two_sets.keys[:2]:
        PublishedPartitions(two_sets.settings.layout.asset("property_condition")).set_aside(key)
    assert chosen(two_sets, "needs_paint OR NOT needs_paint") == []
    assert chosen(two_sets, "confidence.wear IS NULL AND sets.condition IS NULL") == list(range(9))


def test_a_row_under_another_id_is_not_joined(two_sets, tmp_path):
    """While a withdrawal goes on, one set may have a property still that another has no more."""
    two_sets.answer_further(
        two_sets.keys[0],
        lambda rows: [{**row, "property_id": f"withdrawn {row['property_id']}"} for row in rows],
    )
    rows = exported(two_sets, tmp_path / "out")
    assert [name for name in rows if rows[name]["sets"]["condition"] is not None] == ["p3", "p4", "p5"]
    assert chosen(two_sets, "wear IS NOT NULL") == [3, 4, 5]


def test_words_of_every_set_are_found_and_followed(two_sets):
    """A set's answers are found by their words, also after its partition was described anew."""

    def found(text: str) -> list[int]:
        records, _ = readable_records(two_sets.settings.descriptions, two_sets.catalog)
        ranked = find_words(two_sets.settings, records, text, most=20).ranked
        return sorted(ordinal for _, ordinal in ranked)

    assert found("paint") == [0, 2, 4]
    two_sets.answer_further(
        two_sets.keys[0],
        lambda rows: [{**row, "description": {"wear": "cracked", "needs_paint": False}} for row in rows],
        settings="u",
    )
    assert (found("paint"), found("cracked")) == ([4], [0, 1, 2])


def test_a_promise_covers_the_fields_of_every_set(two_sets):
    """A promised field of a further set is not shown before labels have shown that it holds."""
    for promised, hidden, shown in (("wear", "wear", "floors"), ("floors", "floors", "wear")):
        settings = two_sets.settings
        guarantee = Guarantee({promised: 0.9}, {})
        rows = read_rows(settings, guarantee, two_sets.keys[0], ["ordinal", "description"]).to_pylist()
        assert all(row["description"][hidden] is None for row in rows)
        assert all(row["description"][shown] is not None for row in rows)
        assert all(row[RAW][hidden] is not None for row in rows)


def test_the_table_has_the_fields_of_all_sets_and_follows_each(two_sets):
    """A partition that a set reaches is written anew, and no other; the table says what is not complete."""
    place = TablePlace.from_settings(two_sets.settings)
    first = bring_up_to_date(two_sets.settings, two_sets.catalog, place)
    assert (first.written, first.lacking) == (3, {"condition": 3})
    assert any("condition is not complete" in sentence for sentence in first.sentences())
    two_sets.answer_further(two_sets.keys[2])
    again = bring_up_to_date(two_sets.settings, two_sets.catalog, place)
    assert (again.written, again.lacking) == (1, {"condition": 0})
    rows = {row["property_id"]: row for row in place.read().scan().to_arrow().to_pylist()}
    assert rows["p8"]["description"]["wear"] == "worn 8"
    assert rows["p8"]["sets"]["condition"]["model"] == "model-t"


def test_the_page_has_a_column_for_each_field_of_each_set(two_sets, monkeypatch):
    """With its confidences, and made anew once a set went on."""
    monkeypatch.setattr(explore, "comparable", lambda _, records: (records, []))
    monkeypatch.setattr(explore, "_with_places", lambda table: table)

    def rows_by_id() -> dict[str, dict]:
        table = explore_table(two_sets.settings, two_sets.catalog, sample=20)
        return {row["property_id"]: row for row in table.to_pylist()}

    rows = rows_by_id()
    assert {"wear", "needs_paint", "wear_confidence"} <= rows["p1"].keys()
    assert (rows["p1"]["wear"], rows["p8"]["wear"]) == ("worn 1", None)
    two_sets.answer_further(two_sets.keys[2])
    assert rows_by_id()["p8"]["wear"] == "worn 8"


def told(dataset: Dataset, since: Since, following: Path) -> set[str]:
    """The properties that changed since then; writes the next snapshot."""
    listed = list_changes(dataset, since, following)
    assert {change.change for change in listed} <= {"changed"}
    return {change.property_id for change in listed}


def worn_anew(rows):
    """Another answer of the set for p1 alone."""
    answer = {"wear": "cracked", "needs_paint": False}
    return [{**row, **({"description": answer} if row["ordinal"] == 1 else {})} for row in rows]


def test_changes_tell_a_property_once_for_each_set_that_answers(two_sets, tmp_path):
    """Where a set has published nothing, nothing is told of it; a row that is the same is no change."""
    alone = Dataset(two_sets.settings.model_copy(update={"questions": None}))
    began = datetime.now(UTC)
    assert told(alone, PointInTime(alone.settings, began), tmp_path / "1") == set()
    added = told(two_sets, RowSnapshot(tmp_path / "1", two_sets.catalog), tmp_path / "2")
    assert added == {f"p{number}" for number in range(6)}
    assert told(two_sets, RowSnapshot(tmp_path / "2", two_sets.catalog), tmp_path / "3") == set()
    two_sets.answer_further(two_sets.keys[0], worn_anew)
    two_sets.answer_further(two_sets.keys[1], lambda rows: [{**row, "device": "cuda-7"} for row in rows])
    assert told(two_sets, RowSnapshot(tmp_path / "3", two_sets.catalog), tmp_path / "4") == {"p1"}
    assert told(two_sets, PointInTime(two_sets.settings, began), tmp_path / "5") == {"p1"}


def test_the_table_tells_what_a_set_changed(two_sets):
    """Of its snapshots: rows that a set added or changed, and no others, also where it has no column yet."""
    settings = two_sets.settings
    place = TablePlace.from_settings(settings)
    alone = settings.model_copy(update={"questions": None})
    snapshots = [bring_up_to_date(alone, two_sets.catalog, place).snapshot]
    snapshots.append(bring_up_to_date(settings, two_sets.catalog, place).snapshot)
    two_sets.answer_further(two_sets.keys[0], worn_anew)
    bring_up_to_date(settings, two_sets.catalog, place)

    def since(snapshot: int) -> set[str]:
        listed = list(TableChanges(place.read(), str(snapshot)).changes())
        assert {change.change for change in listed} == {"changed"}
        return {change.property_id for change in listed}

    assert since(snapshots[1]) == {"p1"}
    assert since(snapshots[0]) == {f"p{number}" for number in range(6)}


def test_the_quality_judges_the_fields_of_every_set(two_sets, tmp_path):
    """By the rows of their own set; the page says which set is not complete, and follows it."""
    truth = tmp_path / "truth.jsonl"
    line = '{{"property_id": "p{}", "description": {{"floors": 2, "needs_paint": true}}}}\n'
    truth.write_text("".join(map(line.format, range(9))))
    settings = two_sets.settings.model_copy(update={"truth": truth})
    quality = assess_quality(settings, two_sets.catalog)
    assert (quality.ok, quality.failed) == (8, {"missing": 1})
    paint = quality.fields["needs_paint"]
    assert (paint.rows, paint.counts, paint.question_sets) == (6, {"True": 3, "False": 3}, ["condition"])
    assert (paint.right, paint.judged) == (3, 6)
    assert quality.fields["floors"].rows == 8
    assert quality.lacking == {"condition": 3}
    page = quality_metadata(quality, Accuracy({}, 0))
    assert "condition is not complete: 3 properties" in page["question sets"].value
    assert "True 50%" in page["fields"].value
    before = judged_state(settings)
    two_sets.answer_further(two_sets.keys[2])
    assert judged_state(settings) != before
    again = assess_quality(settings, two_sets.catalog)
    assert (again.fields["needs_paint"].rows, again.lacking) == (9, {"condition": 0})
    labels = read_judged(settings, two_sets.catalog)
    right = {judged.name: judged.right for of_settings in labels.values() for judged in of_settings}
    assert [flags["needs_paint"] for flags in right.values()].count(True) == 5


def test_a_verdict_counts_for_the_sets_whose_answers_it_judged(two_sets, tmp_path):
    """A set that answers anew makes verdicts on its own fields void, and none on those of another set."""
    settings, catalog = two_sets.settings, two_sets.catalog

    def right() -> dict[str, int]:
        return {
            name: share.total
            for name, share in accuracy(settings.home, published_answers(settings, catalog)).fields.items()
        }

    alone = settings.model_copy(update={"questions": None})
    sample = {reviewed.property_id: reviewed for reviewed in draw_sample(alone, catalog, **SAMPLE)}
    append_verdict(settings.home, all_right(sample["p8"]))
    sample = {reviewed.property_id: reviewed for reviewed in draw_sample(settings, catalog, **SAMPLE)}
    assert "p8" not in sample, "chance drew it"
    described = {"floors": 2, "has_pool": False, "wear": "worn 0", "needs_paint": True}
    assert sample["p0"].description == described
    assert sample["p0"].confidence["needs_paint"] == 0.75
    for name in ("p0", "p3", "p7"):
        append_verdict(settings.home, all_right(sample[name]))
    assert right() == {"floors": 4, "has_pool": 4, "wear": 2, "needs_paint": 2}
    two_sets.answer_further(two_sets.keys[0], settings="anew")
    two_sets.answer_further(two_sets.keys[2])
    assert right() == {"floors": 4, "has_pool": 4, "wear": 1, "needs_paint": 1}
    two_sets.describe(two_sets.keys[1], settings="anew")
    assert right() == {"floors": 3, "has_pool": 3, "wear": 1, "needs_paint": 1}
    # The rows of the descriptions have no confidence here, so that they give no labels.
    labels = [label for of_settings in read_judged(settings, catalog).values() for label in of_settings]
    assert [set(label.right) for label in labels] == [{"wear", "needs_paint"}]


def test_a_verdict_from_elsewhere_counts_for_the_answer_that_its_line_names(two_sets, tmp_path):
    """An export's line names the answer of the descriptions, and of a set where the person puts it there."""
    settings, catalog = two_sets.settings, two_sets.catalog
    rows = exported(two_sets, tmp_path / "out")
    described = rows["p0"]["answer"]
    both = f"{rows['p1']['answer']} {rows['p1']['sets']['condition']['answer']}"
    lines = [
        {"property_id": name, "answer": answer, "description": rows[name]["description"]}
        for name, answer in (("p0", described), ("p1", both))
    ]
    (tmp_path / "verdicts").write_text("\n".join(map(json.dumps, lines)))
    assert take_verdicts(settings, catalog, tmp_path / "verdicts").kept == 2
    given = verdicts(settings.home)
    assert set(given["p0"].right) == {"floors", "has_pool"}
    assert set(given["p1"].right) == {"floors", "has_pool", "wear", "needs_paint"}


SAMPLE = {"count": 9, "seed": 1, "suspicious": False}


def all_right(reviewed: Reviewed) -> FieldVerdict:
    return verdict_of(reviewed, right=list(reviewed.description), wrong=(), corrections={})


def test_a_withdrawn_property_is_in_the_view_of_no_set(two_sets, tmp_path):
    """Its answers to further sets are gone with those of the descriptions, also from earlier exports."""
    settings, folder = two_sets.settings, tmp_path / "out"
    export(settings, two_sets.catalog, folder, Format.jsonl)
    place = TablePlace.from_settings(settings)
    bring_up_to_date(settings, two_sets.catalog, place)
    assert chosen(two_sets, "wear = 'worn 1'") == [1]
    two_sets.withdraw("p1")
    export(settings, two_sets.catalog, folder, Format.jsonl)
    assert not [path for path in folder.rglob("*") if path.is_file() and b"worn 1" in path.read_bytes()]
    assert chosen(two_sets, "wear = 'worn 1'") == []
    table = place.read().scan().to_arrow().to_pylist()
    assert "worn 1" not in [(row["description"] or {}).get("wear") for row in table]
    two_sets.answer_further(two_sets.keys[2])
    assert assess_quality(settings, two_sets.catalog).lacking == {"condition": 0}
