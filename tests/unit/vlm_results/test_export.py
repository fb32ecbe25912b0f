"""An export that is killed, or beside which another one begins, ends with the same files all the same."""

import csv
import errno
import fcntl
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.damage import flip_bit
from tests.support.exports import exported_rows
from tests.support.kills import killed_homes
from tests.support.listings import write_listing
from vlm_assets.commands.main import find_command
from vlm_assets.config.settings import CHECKOUT, load_settings
from vlm_assets.services.command_error import CommandError
from vlm_catalog.ingest import ingest
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.files.sealed_json import read_sealed, write_sealed
from vlm_results import export as export_module
from vlm_results import exported_rows as exported_rows_module
from vlm_results import published_table
from vlm_results.export import ExportOptions, Format, export
from vlm_results.exported_rows import ExportedRows


def content(folder: Path) -> dict[str, bytes]:
    """Every file that the export names, and what names them."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_an_export_killed_at_any_file_operation_goes_on_to_the_same_files(dataset, tmp_path):
    """SIGKILL before any of its operations: what it said is true, and the next one finishes."""
    results = tmp_path / "results"
    work = lambda: export(dataset.settings, dataset.catalog, results / "out", Format.jsonl)  # noqa: E731
    folders = [killed / "out" for killed, _ in killed_homes(results, work, tmp_path / "killed", parts=5)]
    folders, whole = [folder for folder in folders if folder.exists()], content(results / "out")
    assert len(folders) > 6
    kept = set()
    for folder in folders:
        left = content(folder)
        if "export.json" in left:
            assert json.loads(left["export.json"])["rows"] == 9
            assert {name: left[name] for name in whole if name.endswith(".jsonl")}.items() <= whole.items()
        again = export(dataset.settings, dataset.catalog, folder, Format.jsonl)
        assert (again.rows, again.shards) == (9, 3)
        assert content(folder) == whole
        kept.add(again.kept)
    assert kept == {0, 1, 2, 3}


def test_nothing_says_that_a_folder_is_whole_while_its_shards_are_replaced(dataset, tmp_path, monkeypatch):
    """Killed between two shards, an export of other rows is not taken for the finished one before."""
    folder = tmp_path / "out"
    export(dataset.settings, dataset.catalog, folder, Format.jsonl)
    whole = {"export.json", "SHA256SUMS"}
    assert whole <= content(folder).keys()
    dataset.describe(dataset.keys[0], settings="other")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export_module, "write_sealed", killed)
        export(dataset.settings, dataset.catalog, folder, Format.jsonl)
    assert not whole & content(folder).keys()
    export(dataset.settings, dataset.catalog, folder, Format.jsonl)
    assert whole <= content(folder).keys()


def killed(*_, **__):
    raise KeyboardInterrupt


def test_a_folder_that_cannot_be_locked_is_named(dataset, tmp_path, monkeypatch):
    """A file system without locks is a person's to change, and no bare error."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(CommandError, match="out cannot be locked"):
        export(dataset.settings, dataset.catalog, tmp_path / "out", Format.jsonl)


def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_two_exports_into_one_folder_are_kept_apart(dataset, tmp_path):
    """The second would take the first one's unfinished files for left ones; it is refused until then."""
    folder = tmp_path / "out"
    first = export(dataset.settings, dataset.catalog, folder, Format.jsonl)
    other = acquire_lock(folder / ".shards" / "lock")
    with pytest.raises(CommandError, match="Another export"):
        export(dataset.settings, dataset.catalog, folder, Format.jsonl)
    other.close()
    again = export(dataset.settings, dataset.catalog, folder, Format.jsonl)
    assert (again.rows, again.kept) == (first.rows, first.shards)
    assert not (folder / ".shards" / "lock").exists(), "nothing is left that says it is under way"


def test_the_card_names_the_models_of_the_rows_whatever_the_settings_say_now(dataset, tmp_path):
    """Rows are handed on under the names of what made them."""
    folder = tmp_path / "out"
    dataset.describe(dataset.keys[0], settings="other", text="another house")
    export(dataset.settings, dataset.catalog, folder, Format.huggingface)
    card = (folder / "README.md").read_text()
    assert "9 properties, each described from its images by `model-other`, `model-s`" in card
    assert "`embedding_model`; 3 rows have none yet)" in card


def test_an_export_of_an_earlier_version_is_brought_up_to_date(dataset, tmp_path):
    """Its notes (format 2) counted no images, and its question did not ask for any: it goes on."""
    folder = tmp_path / "out"
    export(dataset.settings, dataset.catalog, folder, Format.huggingface)
    whole = content(folder)
    path = folder / ".shards" / f"{dataset.keys[1]}.json"
    note = read_sealed(path, format_=4)
    assert note["models"] == ["model-s"]
    later = ("images", "images_missing", "unread", "copies")
    write_sealed(path, {name: value for name, value in note.items() if name not in later}, format_=2)
    question = read_sealed(folder / ".shards" / "question.json")
    asked = {name: value for name, value in question.items() if not name.startswith("image")}
    write_sealed(folder / ".shards" / "question.json", asked)
    assert export(dataset.settings, dataset.catalog, folder, Format.huggingface).kept == 2
    assert content(folder) == whole


def test_the_card_has_the_whole_schema_and_names_nothing_that_is_not_missing(dataset, tmp_path, monkeypatch):
    """Its columns are not cut, however many fields a description has; with all vectors none is missing."""
    wide = pa.struct([(f"a_field_with_a_long_name_{number}", pa.string()) for number in range(20)])
    read_rows = ExportedRows.read

    def widened(*arguments):
        table, read = read_rows(*arguments)
        at = table.schema.get_field_index("description")
        return table.set_column(at, "description", pa.nulls(table.num_rows, wide)), read

    monkeypatch.setattr(ExportedRows, "read", widened)
    export(dataset.settings, dataset.catalog, tmp_path / "out", Format.huggingface)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "omitted" not in card and card.count("a_field_with_a_long_name_19") == 2
    assert "none yet" not in card


def test_a_vector_is_given_on_with_the_text_that_it_was_made_from_alone(dataset, tmp_path):
    """Described anew, three properties have no vector until they are embedded again; their shard follows."""
    folder, key = tmp_path / "out", dataset.keys[1]
    asked = dataset.settings, dataset.catalog, folder, Format.jsonl
    assert export(*asked).without_vector == 0
    assert exported_rows(folder)["p3"]["embedding"] == [1.0, 3.0]
    dataset.describe(key, text="another house")
    after = export(*asked)
    # p4 failed: it is not described, so that no vector is missing.
    assert (after.rows, after.without_vector, after.kept) == (9, 2, 2)
    rows = exported_rows(folder)
    assert [rows[name]["embedding"] for name in ("p2", "p3", "p5", "p6")] == [[1, 2], None, None, [1, 6]]
    assert rows["p3"]["embedding_model"] is None
    dataset.embed(key)
    again = export(*asked)
    assert (again.without_vector, again.kept) == (0, 2)
    assert exported_rows(folder)["p3"]["embedding"] == [1.0, 3.0]


def test_each_row_gets_its_own_vector_whatever_order_they_lie_in(dataset, tmp_path):
    """Vectors are joined to rows by what they are of, also where one has none and a condition chooses."""
    dataset.embed(dataset.keys[0], lambda rows: rows[::-1])
    dataset.embed(dataset.keys[2], lambda rows: rows[1:])
    options = ExportOptions(where="ordinal IN (0, 2, 4, 6, 7)")
    found = export(dataset.settings, dataset.catalog, tmp_path / "out", Format.jsonl, options)
    vectors = {name: row["embedding"] for name, row in exported_rows(tmp_path / "out").items()}
    assert vectors == {"p0": [1, 0], "p2": [1, 2], "p4": None, "p6": None, "p7": [1, 7]}
    assert (found.rows, found.without_vector) == (5, 1)


def test_a_shard_that_is_not_what_was_written_ends_the_export(dataset, tmp_path, monkeypatch):
    """A disk that loses bytes is noticed at the end, named, and nothing says that the folder is whole."""
    folder = tmp_path / "out"
    asked = dataset.settings, dataset.catalog, folder, Format.jsonl
    publish = export_module.publish_replacing

    def damaging(staged: Path, path: Path) -> None:
        publish(staged, path)
        if path.name.startswith(dataset.keys[1]):
            flip_bit(path)

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "publish_replacing", damaging)
        with pytest.raises(CommandError, match=rf"{dataset.keys[1]}\.jsonl is not what was written"):
            export(*asked)
    assert not {"export.json", "SHA256SUMS"} & content(folder).keys()
    after = export(*asked)
    assert (after.rows, after.kept) == (9, 2), "the whole ones are kept, the damaged one is written anew"
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1])):
        damage(folder / f"{dataset.keys[0]}.jsonl")
        assert export(*asked).kept == 2
        assert content(folder)["SHA256SUMS"].count(b"\n") == 3


def test_more_rows_than_were_chosen_end_the_export(dataset, tmp_path):
    """A published file that has one of its rows twice is a case for the audit, and no complete export."""
    dataset.describe(dataset.keys[1], lambda rows: [*rows, rows[0]])
    options = ExportOptions(where="1 = 1")
    with pytest.raises(CommandError, match="10 rows were written and 9 should be: `vlm-assets audit`"):
        export(dataset.settings, dataset.catalog, tmp_path / "out", Format.jsonl, options)
    assert "export.json" not in content(tmp_path / "out")


def floors(**of_property):
    """Rows in which these properties have so many floors, and all others two."""
    return lambda rows: [
        {**row, "description": {"floors": of_property.get(row["property_id"], 2), "has_pool": False}}
        for row in rows
    ]


@pytest.mark.parametrize("is_further", [False, True])
def test_a_partition_that_is_published_beside_a_condition_is_chosen_from_anew(
    two_sets, tmp_path, monkeypatch, is_further
):
    """No row goes out for what a condition saw of the answer that a run has replaced since."""
    dataset, key, look, masks = two_sets, two_sets.keys[0], exported_rows_module.matching_rows, []

    def look_before_a_run_publishes(*arguments):
        masks.append(look(*arguments))
        if len(masks) == 1 and is_further:
            new = {"wear": "new", "needs_paint": False}
            dataset.answer_further(key, lambda rows: [{**rows[0], "description": new}, *rows[1:]])
        elif len(masks) == 1:
            dataset.describe(key, floors(p0=9))
        return masks[-1]

    monkeypatch.setattr(exported_rows_module, "matching_rows", look_before_a_run_publishes)
    options = ExportOptions(where="floors = 2 AND wear LIKE 'worn%'")
    asked = dataset.settings, dataset.catalog, tmp_path / "out", Format.jsonl, options
    with pytest.raises(CommandError, match=rf"Partition {key} changed after --where was looked at"):
        export(*asked)
    assert "export.json" not in content(tmp_path / "out")
    assert export(*asked).rows == 4
    assert exported_rows(tmp_path / "out").keys() == {"p1", "p2", "p3", "p5"}


def test_a_condition_that_chooses_other_rows_of_the_same_file_writes_its_shard_anew(dataset, tmp_path):
    """A condition may look at all rows: a partition that no run touched can have other rows to export."""
    options = ExportOptions(where="floors >= (SELECT avg(floors) FROM properties)")
    asked = dataset.settings, dataset.catalog, tmp_path / "out", Format.jsonl, options
    dataset.describe(dataset.keys[0], floors(p0=1, p1=2, p2=3))
    assert export(*asked).rows == 7
    dataset.describe(dataset.keys[1], floors(p3=3, p4=3, p5=3))
    assert export(*asked).rows == 4
    assert exported_rows(tmp_path / "out").keys() == {"p2", "p3", "p4", "p5"}


def test_no_cell_of_a_csv_is_a_formula(dataset, tmp_path):
    """A model's text, an id or a path that begins like a formula is a text in a spreadsheet too."""
    ids = ["=HYPERLINK(A1)", "+1", "-1", "@SUM(A1)", "\tx", "a=b", "'=x", "plain"]
    listing = write_listing(tmp_path / "listing.jsonl", {one: ["-a.jpg"] for one in ids})
    ingest(listing, tmp_path / "odd", range_size=len(ids))
    dataset = type(dataset)(load_settings(model="example", home=tmp_path / "odd"))
    (key,) = dataset.keys
    dataset.describe(key, lambda rows: [{**row, "error": "=1+1"} for row in rows])

    def exported(name: str, **more: bool) -> list[dict[str, str]]:
        export(dataset.settings, dataset.catalog, tmp_path / name, Format.csv, ExportOptions(**more))
        with (tmp_path / name / f"{key}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    rows = exported("safe")
    shown = ["'=HYPERLINK(A1)", "'+1", "'-1", "'@SUM(A1)", "'\tx", "a=b", "'=x", "plain"]
    assert [one["property_id"] for one in rows] == shown
    assert {one["error"] for one in rows} == {"'=1+1"}
    assert {one["description.floors"] for one in rows} == {"2"}
    assert not [cell for one in rows for cell in one.values() if cell[:1] in tuple("=+-@\t\r")]
    assert [one["property_id"] for one in exported("raw", raw_cells=True)] == ids
    with pytest.raises(CommandError, match="holds another export"):
        exported("raw")


@pytest.mark.parametrize("name", ["search", "export"])
def test_help_and_documentation_say_when_a_condition_is_ended(name):
    """Nobody learns of the limit from a condition that was ended after two minutes."""
    (where,) = [one for one in find_command(name).params if one.name == "where"]
    limit = f"{published_table.SECONDS:g} s"
    assert f"Ended after {limit}" in where.help
    assert f"A condition that takes more than {limit} is ended" in (CHECKOUT / "docs" / "use.md").read_text()
