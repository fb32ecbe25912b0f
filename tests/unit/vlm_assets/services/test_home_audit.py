"""The audit finds every kind of wrongness, names it, and is silent about a dataset that is whole."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.damage import damage_rows, flip_bit
from vlm_assets.assets import partition_state
from vlm_assets.assets.partition_state import State
from vlm_assets.services.home_audit import Audit, audit
from vlm_durable.files import seen_files
from vlm_durable.journal.high_water_mark import HighWaterMark, write_mark
from vlm_durable.versions.findings import OF_THE_FILE, FindingKind
from vlm_durable.versions.version_mark import mark_copies

WARNINGS = {FindingKind.EARLIER_VERSION, FindingKind.SETTINGS_DIFFER, FindingKind.STALE}
FIRST, SECOND, THIRD = "000000000-000000002", "000000003-000000005", "000000006-000000008"
DESCRIBED, EMBEDDED = "property_descriptions", "property_embeddings"


def look(dataset, *, deep: bool = False) -> Audit:
    """An audit whose counts add up: what goes in is what comes out."""
    found = audit(dataset.settings, dataset.catalog, deep=deep)
    for one in found.partitions:
        counts = one.counts
        assert counts.rows == (
            counts.expected - counts.not_yet - counts.missing + counts.foreign + counts.duplicate
        )
        assert counts.rows == counts.ok + counts.failed + counts.unsettled
    return found


def wrong(found: Audit) -> set[tuple[FindingKind, str, str | None]]:
    return {(one.kind, one.asset, one.key) for one in found.wrong}


def warned(found: Audit) -> set[tuple[FindingKind, str, str | None]]:
    return {(one.kind, one.asset, one.key) for one in found.warnings}


def partition(found: Audit, asset: str, key: str):
    return next(one for one in found.partitions if (one.asset, one.key) == (asset, key))


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_dataset_is_conserved(dataset, deep):
    """Nine properties in, eight ok and one failed out, of both assets: nothing is wrong."""
    found = look(dataset, deep=deep)
    assert found.ok and not found.findings
    for asset in (DESCRIBED, EMBEDDED):
        total = found.total(asset)
        assert (total.expected, total.ok, total.failed, total.not_yet) == (9, 8, 1, 0)
        assert found.partitions_in(asset, State.DONE) == 3
    assert "Conserved" in found.verdict()


def test_what_is_not_published_yet_is_incomplete_and_no_fault(empty):
    """A dataset under way is counted and is not called wrong."""
    empty.describe(FIRST)
    found = look(empty)
    assert found.ok and not found.findings
    assert found.partitions_in(DESCRIBED, State.NOT_STARTED) == 2
    assert found.total(DESCRIBED).not_yet == 6
    assert found.total(EMBEDDED).not_yet == 9
    assert "5 of 6 partitions are not published yet" in found.verdict()


def test_a_swap_between_partitions_with_equal_counts(empty):
    """Equal row counts hide nothing: the ids are compared as sets, partition by partition."""

    def swap(old: str, new: str) -> Callable:
        return lambda rows: [
            {**r, "property_id": new if r["property_id"] == old else r["property_id"]} for r in rows
        ]

    empty.describe(FIRST, swap("p1", "p7"))
    empty.describe(SECOND)
    empty.describe(THIRD, swap("p7", "p1"))
    found = look(empty)
    assert wrong(found) == {(FindingKind.IDS, DESCRIBED, FIRST), (FindingKind.IDS, DESCRIBED, THIRD)}
    counts = partition(found, DESCRIBED, FIRST).counts
    assert (counts.rows, counts.missing, counts.foreign) == (3, 1, 1)
    assert counts.first_ids == ("p1", "p7")
    assert found.total(DESCRIBED).rows == 9


def test_ids_swapped_inside_a_partition(empty):
    """Two properties that changed places are seen by their ordinals."""

    def exchange(rows):
        ids = {"p0": "p2", "p2": "p0"}
        return [{**row, "property_id": ids.get(row["property_id"], row["property_id"])} for row in rows]

    empty.describe(FIRST, exchange)
    counts = partition(look(empty), DESCRIBED, FIRST).counts
    assert (counts.missing, counts.foreign, counts.misnumbered) == (0, 0, 2)
    assert not counts.conserved


@pytest.mark.parametrize(
    ("change", "said", "first"),
    [
        (lambda rows: rows[:-1], "1 missing", "p2"),
        (lambda rows: [*rows, rows[0], rows[0]], "2 duplicate", "p0"),
        (lambda rows: [*rows, {**rows[0], "property_id": "stranger"}], "1 foreign", "stranger"),
        (lambda rows: [{**rows[0], "status": "queued"}, *rows[1:]], "1 neither ok nor failed", "p0"),
        (lambda rows: [{**rows[0], "status": None}, *rows[1:]], "1 neither ok nor failed", "p0"),
        (lambda rows: [{**rows[0], "ordinal": None}, *rows[1:]], "1 with another ordinal", "p0"),
        (lambda rows: [], "3 missing", "p0"),
    ],
)
def test_ids_that_are_not_conserved(empty, change, said, first):
    """Missing, doubled, foreign and unsettled ids are counted and named."""
    empty.describe(FIRST, change)
    found = look(empty)
    (problem,) = found.wrong
    assert (problem.kind, problem.key) == (FindingKind.IDS, FIRST)
    assert said in problem.sentence
    assert repr(first) in problem.sentence


def test_a_row_without_an_id(dataset):
    """A row without an id is foreign, and its partition's own id missing."""
    rows = [{**row, "fingerprint": "fp-s"} for row in dataset.rows(FIRST)]
    rows[1]["property_id"] = None
    schema = pq.read_schema(dataset.descriptions.path(FIRST))
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), dataset.descriptions.path(FIRST))
    counts = partition(look(dataset), DESCRIBED, FIRST).counts
    assert (counts.missing, counts.foreign) == (1, 1)
    assert "(no id)" in counts.first_ids


DAMAGES = {
    "deleted": (Path.unlink, FindingKind.MISSING),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-50]), FindingKind.TRUNCATED),
    "empty": (lambda path: path.write_bytes(b""), FindingKind.TRUNCATED),
    "footer": (lambda path: path.write_bytes(path.read_bytes()[:-20] + bytes(20)), FindingKind.UNREADABLE),
    "rewritten": (
        lambda path: pq.write_table(pq.read_table(path).slice(0, 2), path),
        FindingKind.ROWS_DIFFER,
    ),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), FindingKind.UNREADABLE),
}


@pytest.mark.parametrize(("damage", "kind"), DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("asset", [DESCRIBED, EMBEDDED])
def test_a_damaged_file_is_found_without_reading_every_byte(dataset, damage, kind, asset):
    """Size, footer and rows alone show a file that is gone, cut, overwritten or replaced."""
    damage(dataset.settings.home / asset / f"{SECOND}.parquet")
    found = look(dataset)
    assert (kind, asset, SECOND) in wrong(found)
    assert partition(found, asset, SECOND).state is State.DAMAGED
    assert partition(found, asset, FIRST).state is State.DONE


def test_every_flipped_bit_is_found_deep(dataset):
    """No bit of a published file or its second copy can change unseen by --deep."""
    for path, kinds in (
        (dataset.descriptions.path(FIRST), OF_THE_FILE),
        (dataset.copy_of(FIRST), {FindingKind.SECOND_COPY}),
    ):
        sound = path.read_bytes()
        for at in range(0, len(sound), len(sound) // 6):
            flip_bit(path, at)
            found = wrong(look(dataset, deep=True))
            assert any((kind, DESCRIBED, FIRST) in found for kind in kinds), f"byte {at}"
            path.write_bytes(sound)
    assert look(dataset, deep=True).ok


def test_a_file_that_does_not_read_takes_no_other_down(dataset):
    """One damaged page leaves all other partitions counted."""
    path = dataset.descriptions.path(SECOND)
    damage_rows(path)
    found = look(dataset)
    assert (FindingKind.COLUMNS, DESCRIBED, SECOND) in wrong(found)
    assert found.total(DESCRIBED).ok == 6
    assert found.partitions_in(DESCRIBED, State.DONE) == 2


def lose_the_version_before(dataset):
    dataset.describe(FIRST, text="a villa")
    dataset.embed(FIRST)
    dataset.copy_of(FIRST, 1).unlink()


def mix_generations(rows):
    return [{**rows[0], "fingerprint": "another"}, *rows[1:]]


def all_ok(rows):
    return [{**row, "status": "ok"} for row in rows]


DIFFER = FindingKind.DESCRIPTIONS_DIFFER, EMBEDDED
CHANGES = {
    # What was done, and the one finding, with words of its sentence.
    "a second copy is gone": (
        lambda dataset: dataset.copy_of(THIRD).unlink(),
        (FindingKind.SECOND_COPY, DESCRIBED, THIRD, ""),
    ),
    "an earlier version is gone: a convenience": (
        lose_the_version_before,
        (FindingKind.EARLIER_VERSION, DESCRIBED, FIRST, ""),
    ),
    "rows of two generations are in one file": (
        lambda dataset: (dataset.describe(FIRST, mix_generations), dataset.embed(FIRST)),
        (FindingKind.MIXED, DESCRIBED, FIRST, ""),
    ),
    "a partition was made with other settings": (
        lambda dataset: (dataset.describe(THIRD, settings="other"), dataset.embed(THIRD)),
        (FindingKind.SETTINGS_DIFFER, DESCRIBED, None, f"maker.*{THIRD}"),
    ),
    "the images of a range were updated": (
        lambda dataset: dataset.replace_images("p7"),
        (FindingKind.STALE, DESCRIBED, THIRD, ""),
    ),
    "the descriptions of embeddings are not there": (
        lambda dataset: dataset.descriptions.set_aside(THIRD),
        (*DIFFER, THIRD, ""),
    ),
    "a failed row is ok in the embeddings": (
        lambda dataset: dataset.embed(SECOND, all_ok),
        (*DIFFER, SECOND, "'p4'"),
    ),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_each_change_is_one_finding(dataset, change, expected):
    """What readers must not read, or nobody could put right, is wrong; what is sound all the same warns."""
    change(dataset)
    report = look(dataset)
    (found,) = report.findings
    *where, words = expected
    assert [found.kind, found.asset, found.key] == where
    assert re.search(words, found.sentence)
    assert report.ok == (found.kind in WARNINGS)


def test_records_that_are_damaged(dataset):
    """One damaged copy of a record is said; both damaged is never taken for 'not published'."""
    paths = dataset.settings.descriptions.partition(FIRST)
    record, copy = paths.record, paths.record_copy
    flip_bit(record, 20)
    assert wrong(look(dataset)) == {(FindingKind.RECORD_COPY, DESCRIBED, FIRST)}
    copy.unlink()
    assert wrong(look(dataset)) == {(FindingKind.RECORD_BEHIND, DESCRIBED, FIRST)}, "its mark says what it is"
    for mark in mark_copies(paths.version_mark):
        mark.unlink()
    found = look(dataset)
    assert (FindingKind.RECORD, DESCRIBED, FIRST) in wrong(found)
    assert partition(found, DESCRIBED, FIRST).counts.ok == 3


def test_a_folder_that_vanished_is_not_a_fresh_start(dataset):
    """What was published once and is gone without a trace is wrong: the high-water mark remembers."""
    for asset in (dataset.settings.descriptions, dataset.settings.embeddings):
        shutil.rmtree(asset.published)
        shutil.rmtree(asset.versions)
    by_version_marks = {
        (FindingKind.VANISHED, asset, key) for asset in (DESCRIBED, EMBEDDED) for key in dataset.keys
    }
    assert wrong(look(dataset)) == by_version_marks
    shutil.rmtree(dataset.settings.state_directory / "version_marks")
    mark = dataset.settings.state_directory / "high_water_marks" / DESCRIBED / FIRST / "g.json"
    mark.parent.mkdir(parents=True)
    write_mark(mark, HighWaterMark(FIRST, "g", 3, 9, 1, None, retired=True))
    found = look(dataset)
    assert wrong(found) == {(FindingKind.VANISHED, DESCRIBED, FIRST)}
    assert found.total(DESCRIBED).missing == 3


def test_foreign_files(dataset):
    """A parquet file that readers would read too is wrong; any other stranger is a warning."""
    asset = dataset.settings.descriptions
    folder = asset.published
    shutil.copy(folder / f"{FIRST}.parquet", folder / "000000009-000000011.parquet")
    shutil.copy(folder / f"{FIRST}.parquet", folder / "copy of mine.parquet")
    (folder / "notes.txt").write_text("mine")
    (asset.versions / "old.parquet").write_text("mine")
    (asset.staging / f".{FIRST}.parquet.1-abc.tmp").write_text("under way")
    (asset.staging / "draft.tmp").write_text("mine")
    found = look(dataset)
    assert [one.kind for one in found.wrong] == [FindingKind.FOREIGN_FILE] * 2
    assert {Path(one.path).name for one in found.warnings} == {"notes.txt", "old.parquet", "draft.tmp"}
    assert {one.kind for one in found.warnings} == {FindingKind.UNKNOWN_FILE}


def test_a_file_that_was_not_published_here(empty):
    """A file under a partition's name without a record is no published partition, whatever is in it."""
    empty.describe(FIRST)
    shutil.copy(empty.descriptions.path(FIRST), empty.descriptions.path(SECOND))
    found = look(empty)
    assert {(FindingKind.UNRECORDED, DESCRIBED, SECOND), (FindingKind.IDS, DESCRIBED, SECOND)} == wrong(found)


def test_embeddings_of_other_descriptions(dataset):
    """Embeddings are wrong once the descriptions that they were made from are replaced."""
    dataset.describe(SECOND, text="a villa")
    assert wrong(look(dataset)) == {(FindingKind.DESCRIPTIONS_DIFFER, EMBEDDED, SECOND)}
    dataset.embed(SECOND)
    assert look(dataset).ok


def test_both_assets_published_between_the_two_looks_at_them_are_whole(dataset, monkeypatch):
    """Descriptions are looked at first: new embeddings are compared with the descriptions that stand then."""
    read, published = partition_state.read_record, []

    def publish_first(files):
        if (files.paths.asset.name, files.key) == (EMBEDDED, SECOND) and not published:
            published.append(dataset.describe(SECOND, text="a villa"))
            dataset.embed(SECOND)
        return read(files)

    monkeypatch.setattr(partition_state, "read_record", publish_first)
    assert look(dataset).ok
    assert published


def test_vectors_that_do_not_fit_their_status_are_found_deep(dataset):
    """An ok row without a vector, or a failed one with one, is found where all columns are read."""
    dataset.embed(SECOND, lambda rows: [{**rows[0], "embedding": None}, *rows[1:]])
    assert look(dataset).ok
    found = look(dataset, deep=True)
    assert wrong(found) == {(FindingKind.DESCRIPTIONS_DIFFER, EMBEDDED, SECOND)}
    assert "'p3'" in found.wrong[0].sentence


def test_it_changes_nothing(dataset, monkeypatch):
    """An audit reads: no file, no lock, no repair, whatever it finds; the note of what it verified alone."""
    monkeypatch.setattr(seen_files, "_SETTLED_NS", -(10**9))
    dataset.descriptions.path(FIRST).write_bytes(b"")
    dataset.settings.descriptions.partition(SECOND).record.unlink()

    def stamps() -> dict[Path, tuple[int, int]]:
        paths = set(dataset.settings.home.rglob("*"))
        paths -= {dataset.settings.state_directory, dataset.settings.state_directory / "verified_files.json"}
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    before = stamps()
    look(dataset, deep=True)
    assert stamps() == before


def test_it_needs_no_dagster(dataset):
    """The audit runs where Dagster does not: not even its package is imported."""
    code = (
        "import sys; from vlm_assets.services.home_audit import audit;"
        "from vlm_catalog.catalog import Catalog;"
        "from vlm_assets.config.settings import load_settings; s = load_settings();"
        "assert audit(s, Catalog.open(s.home), deep=True).ok; assert 'dagster' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"VLM_ASSETS_HOME": str(dataset.settings.home), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_json_says_everything(dataset):
    """What machines read has the counts, the verdict and each problem with its partition."""
    dataset.copy_of(FIRST).unlink()
    said = json.loads(json.dumps(look(dataset).as_json()))
    assert said["ok"] is False
    assert said["totals"][DESCRIBED]["ok"] == 8
    counts = said["totals"][DESCRIBED]["partitions"]
    assert {state: count for state, count in counts.items() if count} == {"done": 2, "damaged": 1}
    assert [(one["kind"], one["key"]) for one in said["wrong"]] == [("second_copy", FIRST)]
    assert len(said["partitions"]) == 6


def test_a_journal_that_went_back_is_told_in_a_whole_sentence(empty, commit, tmp_path):
    """An older copy of a journal lacks rows and no file of its own: there is no trouble to list."""
    settings, key = empty.settings, empty.keys[0]
    commit(settings, key, 1)
    journals = settings.descriptions.partition(key).journals
    shutil.copytree(journals, tmp_path / "older")
    commit(settings, key, 3)
    shutil.rmtree(journals)
    shutil.copytree(tmp_path / "older", journals)
    (problem,) = audit(settings, empty.catalog).wrong
    assert "3 rows are committed, and its journal (generation g) holds 1 of them. A start" in problem.sentence
